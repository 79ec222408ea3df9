"""Checkpoints: the whole state of a provider in files, from which another can go on.

storage      where the files are: a directory, an object store
local        a directory of this machine, with every fsync
remote       anything that fsspec reaches: S3, HDFS, memory://
manifest     the file that makes a checkpoint: which segments of which packs it is made of
pack         files of frames, the contents
reader       Checkpoint: a manifest and its storage
ownership    whose a place is: a process that was replaced publishes nothing more
writer       the writing of one checkpoint
checkpointer the checkpoints of a provider in use, full and incremental
job          one of them, as its user sees it
periodic     one every so many seconds
compression  zstd and lz4
rework       checkpoints made from checkpoints: rescaled, merged, compacted, edited
retention    removing old checkpoints and what failed attempts left
"""

from statekit.checkpoint import local as local  # now, rather than in the first checkpoint
from statekit.checkpoint.job import CheckpointJob
from statekit.checkpoint.periodic import PeriodicCheckpoints
from statekit.checkpoint.reader import Checkpoint, checkpoints
from statekit.checkpoint.retention import Collected, collect

__all__ = [
    "Checkpoint",
    "CheckpointJob",
    "Collected",
    "PeriodicCheckpoints",
    "checkpoints",
    "collect",
]
