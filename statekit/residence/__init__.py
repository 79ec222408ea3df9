"""What is here and what is not.

residence.py   fetch, write back, evict, scan: a store and its home
sources.py     what leaves come from that are neither here nor at home: checkpoints, processes
loading.py     bringing what sources have
frozen.py      the state at one moment
"""
