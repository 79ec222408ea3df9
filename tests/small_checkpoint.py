"""Checkpoints for tests, made of packs and manifests directly, in a storage that is a dict."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgpack

from statekit import Store
from statekit.checkpoint.reader import Checkpoint
from statekit.errors import DamagedError, MissingFileError
from statekit.format.manifest import Manifest, PackRef, Segment, arrange
from statekit.format.pack import PackBuilder
from statekit.schema import StateSchema
from statekit.storage import Entry, Storage

GROUPS, SUBGROUPS = 2, 2
LEAVES = GROUPS * SUBGROUPS
SCHEMAS = (
    StateSchema("visits", "value", "s", "int"),
    StateSchema("names", "value", "(si)", "str", "processing"),
    StateSchema("tags", "list", "i", ["list", "str"]),
    StateSchema("due", "timers", "s", "none"),
)


class Files(dict[str, bytes]):
    """As much of a Storage as reading needs, on a dict of files."""

    shown = url = "dict:"

    def storage(self) -> Storage:
        return cast("Storage", self)

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if name not in self:
            raise MissingFileError(f"{name} is missing")
        end = len(self[name]) if length is None else offset + length
        if end > len(self[name]):
            raise DamagedError(f"{name} is too short", file=self.file(name), offset=len(self[name]))
        return self[name][offset:end]

    read_parts = Storage.read_parts
    drop_copies = Storage.drop_copies

    def list(self) -> "list[Entry]":
        return [Entry(name, len(self[name]), float(at)) for at, name in enumerate(sorted(self))]

    def file(self, name: str) -> str:
        return f"dict:/{name}"

    def is_unfinished(self, name: str) -> bool:
        return False

    def save(self, folder: Path) -> None:
        for name, data in self.items():
            (folder / name).write_bytes(data)


Storage.register(Files)


def new_store() -> Store:
    store = Store(GROUPS, SUBGROUPS)
    store.state("visits", "i64")
    store.state("names", "bytes", tuple[str, int], timed=True)
    store.state("tags", "list", int)
    store.state("due", "timers")
    store.set_time("processing", 1_700_000_000_000)  # stamps are the same in every run
    return store


def fill(store: Store, start: int, stop: int) -> None:
    states: dict[str, Any] = {state.name: state for state in store.states()}
    for i in range(start, stop):
        states["visits"].put(f"key-{i}", i * i)
        states["names"].put((f"name-{i}", i), f"n{i}".encode())
        states["tags"].put(i, msgpack.packb([f"tag-{i}", "x" * (i % 7)]))
        states["due"].set(f"key-{i}", 1000 + i)


def dump(store: Store) -> list[bytes]:
    """All that a store holds, to be compared."""
    return [store.encode_leaf(leaf) for leaf in range(LEAVES)]


class Line:
    """The checkpoints of one directory, one after the other."""

    def __init__(self, compression: str | None = None) -> None:
        self.files = Files()
        self.compression = compression
        self.packs: list[PackRef] = []
        self.chains: dict[int, list[Segment]] = {}
        self.number = 0

    def take(
        self, new: dict[int, bytes], *, full: bool = True, packs: int = 1, **more: Any
    ) -> Checkpoint:
        """One more checkpoint, of blocks by leaf: full ones replace a chain, others go on top."""
        self.number += 1
        if full:
            self.chains = {}
        leaves = [leaf for leaf, blocks in new.items() if blocks]
        for part in range(packs):
            builder = PackBuilder(self.number, self.compression)
            for leaf in leaves[part::packs]:
                builder.add(leaf, new[leaf])
            if not leaves[part::packs]:
                continue
            ref, parts, segments = builder.finish()
            self.files[ref.name] = b"".join(parts)
            for segment in segments:
                chain = self.chains.setdefault(segment.leaf, [])
                chain.append(segment._replace(pack=len(self.packs), is_delta=bool(chain)))
            self.packs.append(ref)
        rows = [segment for chain in self.chains.values() for segment in chain]
        refs, segments_ = arrange(self.packs, rows)
        manifest = Manifest(
            number=self.number,
            key_groups=GROUPS,
            subgroups=SUBGROUPS,
            owned=(range(GROUPS),),
            schemas=SCHEMAS,
            compression=self.compression,
            packs=refs,
            segments=segments_,
            **more,
        )
        self.files[manifest.name] = manifest.encode()
        return Checkpoint(self.files.storage(), manifest)


def restore(checkpoint: Checkpoint, leaves: Sequence[int] = range(LEAVES)) -> Store:
    """Everything, through the steps of read_leaf(); states are declared from the blocks."""
    store = Store(GROUPS, SUBGROUPS)
    for schema in checkpoint.states.values():
        store.state(schema.name, schema.kind, schema.key, timed=schema.timed)  # type: ignore
    store.mark(0, LEAVES, "absent")
    for leaf in leaves:
        *above, last = checkpoint.read_leaf(leaf) or [b""]
        for step in above:
            store.decode_leaf(leaf, step, "under")
        store.decode_leaf(leaf, last, "under_all")
    return store
