"""Checkpoints: the whole state of a provider in files, from which another can go on.

reader.py      Checkpoint: a manifest and its storage
packs.py       packs in a storage, read and verified
union.py       several checkpoints as one
ownership.py   whose a place is: a process that was replaced publishes nothing more
writer.py      the writing of one checkpoint
retention.py   removing old checkpoints and what failed attempts left
"""

from statekit.checkpoint.reader import Checkpoint, checkpoints
from statekit.checkpoint.retention import Collected, collect

__all__ = ["Checkpoint", "Collected", "checkpoints", "collect"]
