"""Checkpoints of a provider in use.

checkpointer.py   full and incremental checkpoints, while other threads write
job.py            one checkpoint in progress, as its user sees it
periodic.py       a checkpoint at regular intervals
"""
