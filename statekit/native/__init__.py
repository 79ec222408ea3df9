"""The native store in Python: `Store`, its states, blocks and snapshots. Bytes in, bytes out.

    store.py        Store: geometry, states, leaves, homes, snapshots, scans
    states.py       handles of a state: what all kinds can do, and bytes
    numbers.py      handles of i64 and f64 states
    containers.py   handles of list, map and nested states
    batch.py        one operation on many keys
    columns.py      batches from Arrow, NumPy, pandas and lists (arrow.py: the C data interface)
    block.py        reading encoded blocks in place
    snapshot.py     the store at one moment
    frames.py       frames of a pack, in native memory, and their checksums
    unpack.py       encoded values as the columns of a table
    chains.py       picks single entries out of leaves that lie in packs
    ttl.py          time to live: its settings, and the thread that clears away what has expired
    buffers.py, kinds.py, digest.py   what these share

Typed state (dataclasses, views) is built on top of this, in the layer above.
"""

from statekit.native.block import Block
from statekit.native.snapshot import Snapshot
from statekit.native.store import Leaves, Scan, Stats, Store

__all__ = ["Block", "Leaves", "Scan", "Snapshot", "Stats", "Store"]
