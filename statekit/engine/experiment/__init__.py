"""The experiment: strategies side by side, on the same load, rescaled in the middle of it.

run.py       one run of a strategy: a job of its own, with a checked result
figures.py   what a run shows: latencies of keys that move and of keys that stay, and what follows
report.py    the table, JSON, and the pictures
"""
