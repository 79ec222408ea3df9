"""Checkpoints: the whole state of a provider in files, from which another provider can go on.

reader.py      Checkpoint: a manifest and its storage
table.py       a state as a table: Arrow record batches
packs.py       packs in a storage, read and verified
union.py       several checkpoints as one
ownership.py   who owns a place: a process that was replaced publishes nothing more
writer.py      the writing of one checkpoint, or of a part of one
publishing.py  numbers, and the one step that makes a checkpoint exist
parts.py       checkpoints that many processes write, and one publishes
retention.py   removing old checkpoints and the files that failed attempts left
"""

from statekit.checkpoint.parts import Part, publish, write_attachment
from statekit.checkpoint.reader import Checkpoint, checkpoints
from statekit.checkpoint.retention import Collected, collect
from statekit.format.description import Attachment

__all__ = [
    "Attachment",
    "Checkpoint",
    "Collected",
    "Part",
    "checkpoints",
    "collect",
    "publish",
    "write_attachment",
]
