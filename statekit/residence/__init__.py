"""What is here and what is not.

residence.py   fetch, write back, evict, scan: a store and its home
loading.py     leaves that come from somewhere else: sources, and bringing what they have
frozen.py      the state at one moment
"""
