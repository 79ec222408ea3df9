"""The provider: what users program against.

provider.py   KVProvider: states, commits, checkpoints, split and merge
open.py       statekit.open(): from the URL of a home
home.py       the home that a URL names, and its share of the memory
restore.py    statekit.restore(): from checkpoints
"""
