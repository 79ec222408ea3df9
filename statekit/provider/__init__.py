"""The provider: what users program against.

provider.py   KVProvider: commits, checkpoints, figures
recording.py  what its home's record says of who owns what
declare.py    its states: how they are asked for, and made
split.py      its key-groups: whose they are, split and merge
open.py       statekit.open(): from the URL of a home
home.py       the home that a URL names, and its share of the memory
restore.py    statekit.restore(): from checkpoints
"""
