"""The provider: what users program against.

provider.py   KVProvider: states, commits, checkpoints, split and merge
opening.py    statekit.open() and statekit.restore()
"""
