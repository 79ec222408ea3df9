"""Where bytes are kept: directories of files that are written whole and never changed.

storage.py   what a storage is: durable names, exclusive creation, locks and pins
local.py     a directory of this machine, with every fsync
fsspec.py    anything that fsspec reaches: S3, HDFS, memory://
cached.py    one of these, with copies of packs on this host
url.py       which of them a path or a URL names
"""

from statekit.storage.storage import Entry, Pin, Storage, is_temporary
from statekit.storage.url import open_storage

__all__ = ["Entry", "Pin", "Storage", "is_temporary", "open_storage"]
