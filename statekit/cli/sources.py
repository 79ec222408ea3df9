"""Sources: what read-only commands can look at. All are read leaf by leaf, like checkpoints.

    a checkpoint       one of a directory
    several            those of all workers of a directory, together
    a home             a private copy of it, or (Redis) its rows as they are when they are read
    a process          what it has at one moment: it sends that as fast as it can, and it is kept
                       here

Looking never changes a source: no state is declared, nothing is written or flushed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

import statekit
from statekit.assignment import show_groups
from statekit.checkpoint.reader import Checkpoint, Stamped
from statekit.checkpoint.table import state_pieces
from statekit.checkpoint.union import check_alike, unite
from statekit.cli.output import show_bytes, show_time
from statekit.cli.peers import Access
from statekit.cli.places import is_address, is_home, open_several, parse_place
from statekit.errors import (
    ArgumentError,
    CorruptBlockError,
    HomeError,
    NotOwnedError,
    PeerError,
    temporary_failed,
)
from statekit.homes import Home, HomeUrl, open_home
from statekit.homes.record import HomeRecord
from statekit.homes.rows import native_read, read_value, split_stamp
from statekit.keys import encode_key, key_codec, leaf_of_encoded
from statekit.native import Block
from statekit.protocol.calls import QueryCall, ScanCall
from statekit.render import PlainCodec
from statekit.render.columns import Piece, piece_of_rows
from statekit.schema import StateSchema

if TYPE_CHECKING:
    from statekit.protocol.calls import PeerHello

_CACHE_BYTES = 64 << 20  # for a home that is read once
_ASIDE_BYTES = 64 << 20  # if the state of a process is larger, it is kept in a file


class Source(ABC):
    """State to look at. Close it, best with `with`."""

    name: str  # for messages: "checkpoint 7 of '/data/ckpt'"
    title: str  # the first line that is shown of it: "checkpoint 7 of /data/ckpt"
    states: Mapping[str, StateSchema]
    key_group_count: int
    subgroups: int
    key_groups: tuple[range, ...]  # those that are here
    watermark: int | None = None
    size: int | None = None  # bytes of all leaves, if that is known before they are read

    @property
    def leaf_count(self) -> int:
        return self.key_group_count * self.subgroups

    @abstractmethod
    def leaves(self) -> Iterator[int]:
        """The leaves that may have entries, ascending."""

    @abstractmethod
    def leaf_rows(self, leaf: int, state: str | None = None) -> dict[str, dict[bytes, Stamped]]:
        """Like Checkpoint.leaf_rows(). state: other states need not be read."""

    def leaf_bytes(self, leaf: int) -> int:
        """About how much is read for a leaf."""
        return 1

    def pieces(self, schema: StateSchema, on_bytes: Callable[[int], None]) -> Iterator[Piece]:
        """All entries of a state. on_bytes is told about how much was read, bit by bit."""
        for leaf in self.leaves():
            rows = self.leaf_rows(leaf, schema.name).get(schema.name)
            if rows:
                yield piece_of_rows([(key, *row) for key, row in rows.items()], schema)
            on_bytes(self.leaf_bytes(leaf))

    def place(self, leaf: int) -> object:
        """Where a leaf lies: leaves of equal places are equal; None: not known."""
        return None

    def find(self, schema: StateSchema, key: Any) -> tuple[Any] | None:
        """The plain value under a key, in a tuple of one; None if there is none.

        NotOwnedError if only another worker can tell.
        """
        encoded = encode_key(schema.key, key)
        leaf = self.leaf_of(schema, key, encoded)
        found = self._find(schema, leaf, encoded)
        return None if found is None else (PlainCodec(schema).read(found),)

    def leaf_of(self, schema: StateSchema, key: Any, encoded: bytes) -> int:
        """The leaf of a key. NotOwnedError if its key-group is not here."""
        leaf = leaf_of_encoded(key_codec(schema.key), encoded, self.leaf_count)
        group = leaf // self.subgroups
        if not any(group in part for part in self.key_groups):
            raise NotOwnedError(
                f"the key {key!r} is of key-group {group}, and {self.name} has "
                f"{show_groups(self.key_groups)}. Ask the worker that has it."
            )
        return leaf

    def _find(self, schema: StateSchema, leaf: int, encoded: bytes) -> Any:
        row = self.leaf_rows(leaf, schema.name).get(schema.name, {}).get(encoded)
        return None if row is None else row[0]

    def schema_of(self, name: str) -> StateSchema:
        """The schema of a state. ArgumentError, with all names, if there is no such state."""
        schema = self.states.get(name)
        if schema is None:
            raise ArgumentError(
                f"{self.name} has no state {name!r}. It has: {', '.join(self.states) or 'none'}."
            )
        return schema

    def describe(self) -> dict[str, Any]:
        """What JSON shows of it, without its states."""
        return {
            "key_groups": [[part.start, part.stop] for part in self.key_groups],
            "key_group_count": self.key_group_count,
            "subgroups": self.subgroups,
            "watermark": self.watermark,
        }

    def lines(self) -> list[tuple[str, str]]:
        """What people are shown of it: lines of a title and a text."""
        groups = f"{show_groups(self.key_groups)} of {self.key_group_count}"
        watermark = "none" if self.watermark is None else _moment(self.watermark)
        return [
            ("key-groups", f"{groups}, {self.subgroups} sub-groups each"),
            ("watermark", watermark),
        ]

    def close(self) -> None:  # noqa: B027
        """Lets go of it."""

    def __enter__(self) -> "Source":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _moment(ms: int) -> str:
    try:
        return f"{ms} ({datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC)"
    except (ValueError, OverflowError, OSError):
        return str(ms)


def open_source(url: str, at: int | None, access: Access) -> Source:
    """The source that a URL names. at: the number of a checkpoint, from the option --at."""
    if is_address(url) or is_home(url):
        if at is not None:
            raise ArgumentError(
                f"--at {at} is the number of a checkpoint, and {url!r} has none. Leave it out."
            )
        return ProcessSource(url, access) if is_address(url) else HomeSource(url)
    return CheckpointSource(parse_place(url, at).shown, open_several([url], at))


# ---- Checkpoints


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """What JSON shows of a checkpoint, without its states."""
    manifest = checkpoint.manifest
    return {
        "number": checkpoint.number,
        "time": checkpoint.modified.isoformat(),
        "key_groups": [[part.start, part.stop] for part in checkpoint.key_groups],
        "key_group_count": checkpoint.key_group_count,
        "subgroups": checkpoint.subgroups,
        "bytes": checkpoint.bytes,
        "new_bytes": checkpoint.new_bytes,
        "base": manifest.base,
        "compression": manifest.compression,
        "watermark": checkpoint.watermark,
        "metadata": checkpoint.metadata,
    }


class CheckpointSource(Source):
    """One checkpoint, or those of several workers."""

    def __init__(self, place: str, checkpoints: Sequence[Checkpoint]) -> None:
        check_alike(checkpoints)
        union = unite(checkpoints)
        self.checkpoints = union.checkpoints
        first = self.checkpoints[0]
        self.is_one = len(self.checkpoints) == 1
        self.url = first.url if self.is_one else place
        count = len(self.checkpoints)
        self.name = f"the checkpoints of {count} workers in {place!r}"
        self.title = f"checkpoints of {count} workers in {place}"
        if self.is_one:
            self.name = f"checkpoint {first.number} of {first.url!r}"
            self.title = f"checkpoint {first.number} of {first.url}"
        self.states = {schema.name: schema for schema in union.schemas}
        self.key_group_count, self.subgroups = first.key_group_count, first.subgroups
        self.key_groups = union.covered
        self.watermark = union.watermark
        self.size = sum(one.bytes for one in union.checkpoints)
        self._owners = {
            group: one for one in union.checkpoints for part in one.key_groups for group in part
        }

    def owner(self, leaf: int) -> Checkpoint | None:
        """The checkpoint that has a leaf."""
        return self._owners.get(leaf // self.subgroups)

    def leaves(self) -> Iterator[int]:
        return iter(sorted(leaf for one in self.checkpoints for leaf in one.leaves()))

    def leaf_rows(self, leaf: int, state: str | None = None) -> dict[str, dict[bytes, Stamped]]:
        owner = self.owner(leaf)
        return {} if owner is None else owner.leaf_rows(leaf)

    def leaf_bytes(self, leaf: int) -> int:
        owner = self.owner(leaf)
        return 0 if owner is None else owner.leaf_bytes(leaf)

    def pieces(self, schema: StateSchema, on_bytes: Callable[[int], None]) -> Iterator[Piece]:
        for one in self.checkpoints:
            for group in (group for part in one.key_groups for group in part):
                if schema.name in one.states:
                    yield from state_pieces(one, schema, (range(group, group + 1),))
                leaves = range(group * one.subgroups, (group + 1) * one.subgroups)
                on_bytes(sum(map(one.leaf_bytes, leaves)))

    def place(self, leaf: int) -> object:
        owner = self.owner(leaf)
        return () if owner is None else owner.place(leaf)

    def _find(self, schema: StateSchema, leaf: int, encoded: bytes) -> Any:
        owner = self.owner(leaf)
        assert owner is not None
        return owner.find(schema.name, encoded) if schema.name in owner.states else None

    def describe(self) -> dict[str, Any]:
        if self.is_one:
            return {**describe_checkpoint(self.checkpoints[0]), "url": self.url}
        workers = [{"url": one.url, **describe_checkpoint(one)} for one in self.checkpoints]
        return {**super().describe(), "bytes": self.size, "url": self.url, "workers": workers}

    def lines(self) -> list[tuple[str, str]]:
        from statekit.cli.output import cut
        from statekit.render import to_json

        groups, watermark = super().lines()
        if not self.is_one:
            workers = [
                (
                    one.url.rpartition("/")[2],
                    f"checkpoint {one.number}, {show_time(one.modified)}, key-groups "
                    f"{show_groups(one.key_groups)}, {show_bytes(one.bytes)}",
                )
                for one in self.checkpoints
            ]
            return [groups, ("size", show_bytes(self.size or 0)), watermark, *workers]
        (one,) = self.checkpoints
        lines = [
            ("time", show_time(one.modified)),
            groups,
            ("size", f"{show_bytes(one.bytes)}, {show_bytes(one.new_bytes)} new"),
            ("base", "none" if one.manifest.base is None else str(one.manifest.base)),
            ("compression", one.manifest.compression or "none"),
            watermark,
        ]
        if one.metadata:
            lines.append(("metadata", cut(to_json(one.metadata))))
        return lines


# ---- Homes


class HomeSource(Source):
    """The rows of a home that nobody has open."""

    _home: Home
    _numbers: Mapping[str, int]  # of the states, at home

    def __init__(self, url: str) -> None:
        parsed = HomeUrl.parse(url)
        self.url = parsed.shown
        self.name, self.title = f"the home {parsed.shown!r}", f"home {parsed.shown}"
        if parsed.scheme == "memory":
            raise ArgumentError('"memory:" is the memory of this command, which has nothing in it.')
        self._kv: statekit.KVProvider | None = None
        if parsed.scheme == "rocksdb":
            self._open_copy(f"{url}{'&' if parsed.options else '?'}look=1")
        else:
            self._open_itself(parsed)
        if not self.states:
            self.close()
            raise ArgumentError(f"{self.url!r} holds no states. Check the URL.")

    def _open_copy(self, url: str) -> None:
        """Opens a copy like any home: what a crash left half done is completed in the copy."""
        kv = self._kv = statekit.open(url)
        home = kv._residence.home
        assert home is not None
        self._home, self._numbers, self.states = home, kv._residence.numbers, kv.schemas
        self.key_group_count, self.subgroups = kv.key_group_count, kv.subgroups
        self.key_groups = kv.key_groups

    def _open_itself(self, url: HomeUrl) -> None:
        """Opens the home without a provider, which might repair what it finds."""
        url.take_bytes("memory", 0)
        self._home = open_home(url, _CACHE_BYTES)
        try:
            record = HomeRecord.read(self._home, self.url)
        except BaseException:
            self._home.close()
            raise
        if record.arriving:
            self._home.close()
            raise HomeError(
                f"key-groups {show_groups(record.arriving)} of {self.url!r} are on their way from "
                "another process: a part of them would be missing here. Look at it when the "
                "hand-over is done."
            )
        if record.sources:
            self._home.close()
            raise HomeError(
                f"{self.url!r} is still being filled from checkpoints: what is in these would be "
                "missing here. Look at it when kv.loading is None, or at the checkpoints."
            )
        self.states = {schema.name: schema for schema in record.schemas}
        self._numbers = {schema.name: at for at, schema in enumerate(record.schemas)}
        self.key_group_count, self.subgroups = record.key_groups or 1, record.subgroups or 1
        self.key_groups = (range(self.key_group_count),)

    def leaves(self) -> Iterator[int]:
        for part in self.key_groups:
            yield from range(part.start * self.subgroups, part.stop * self.subgroups)

    def leaf_rows(self, leaf: int, state: str | None = None) -> dict[str, dict[bytes, Stamped]]:
        found = {}
        self._bring(leaf)
        for name, number in self._numbers.items():
            if state not in (None, name):
                continue
            schema = self.states[name]
            rows = {key: _row(schema, row) for key, row in self._home.load(leaf, number)}
            if rows:
                found[name] = rows
        return found

    def _bring(self, leaf: int) -> None:
        """Has a leaf move into the copy that is still in a checkpoint."""
        if self._kv is not None:
            self._kv._residence.load_leaves((leaf,))

    def _find(self, schema: StateSchema, leaf: int, encoded: bytes) -> Any:
        self._bring(leaf)
        (row,) = self._home.get([(leaf, self._numbers[schema.name], encoded)])
        return None if row is None else _row(schema, row)[0]

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "url": self.url}

    def close(self) -> None:
        if self._kv is not None:
            self._kv.close()
        else:
            self._home.close()


def _row(schema: StateSchema, row: bytes) -> Stamped:
    """A row of a home as a Block would give it."""
    value, stamp = split_stamp(schema.kind, row)
    return read_value(schema.kind, value), stamp


# ---- Processes


class ProcessSource(Source):
    """What a process that serves at an address has. A single key is read as it is at that time."""

    def __init__(self, address: str, access: Access) -> None:
        self._channel = access.connect(address)
        self._aside: IO[bytes] | None = None
        try:
            hello = self._channel.hello()
        except BaseException:
            self._channel.close()
            raise
        self._hello: PeerHello = hello
        self.url = self._channel.address
        self.name, self.title = f"the process at {self.url}", f"process at {self.url}"
        self.states = {schema.name: schema for schema in hello.schemas}
        self.key_group_count, self.subgroups = hello.key_groups, hello.subgroups
        self.key_groups = hello.owned
        self.watermark = hello.watermark
        self._places: dict[int, tuple[int, int]] = {}  # leaf -> where its blocks are

    def leaves(self) -> Iterator[int]:
        self._fetch()
        return iter(sorted(self._places))

    def leaf_rows(self, leaf: int, state: str | None = None) -> dict[str, dict[bytes, Stamped]]:
        self._fetch()
        found: dict[str, dict[bytes, Stamped]] = {}
        try:
            for block in Block.each(self._blocks(leaf)):
                schema = self.states.get(block.name)
                if schema is None:
                    continue  # a state that was declared after we connected
                known = (block.kind, block.codec.text, block.leaf, block.is_delta)
                if known != (schema.kind, schema.key, leaf, False):
                    raise CorruptBlockError(f"{block!r} is not of {schema}")
                stamps = block.stamps
                times = [None] * len(block) if stamps is None else stamps.tolist()
                found[block.name] = {
                    key: (value, stamp) for (key, value), stamp in zip(block, times, strict=True)
                }
        except CorruptBlockError as error:
            raise PeerError(
                f"the process at {self.url} sent what cannot be read: {error} Check its version."
            ) from None
        return found

    def leaf_bytes(self, leaf: int) -> int:
        return self._places.get(leaf, (0, 0))[1]

    def _find(self, schema: StateSchema, leaf: int, encoded: bytes) -> Any:
        reply = self._channel.query(QueryCall(schema.name, (encoded,)))
        (value,) = reply.values
        return None if value is None else native_read(reply.schema.kind, value)

    def _fetch(self) -> None:
        """Gets everything at once: writers of the process may have to wait for a slow reader."""
        if self._aside is not None:
            return
        aside: IO[bytes] = SpooledTemporaryFile(_ASIDE_BYTES)  # noqa: SIM115
        self._aside = aside
        at = 0
        for leaf, blocks in self._channel.scan(ScanCall(self.key_groups)):
            if not any(leaf // self.subgroups in part for part in self.key_groups):
                raise PeerError(
                    f"the process at {self.url} sent leaf {leaf}, which is not its own."
                )
            try:
                aside.write(blocks)
            except OSError as error:
                raise temporary_failed(error) from error
            self._places[leaf] = (at, len(blocks))
            at += len(blocks)
        self.size = at
        if self._channel.hello().schemas[: len(self._hello.schemas)] != self._hello.schemas:
            raise PeerError(f"states of the process at {self.url} changed meanwhile. Try again.")

    def _blocks(self, leaf: int) -> bytes:
        assert self._aside is not None
        start, length = self._places.get(leaf, (0, 0))
        try:
            self._aside.seek(start)
            return self._aside.read(length)
        except OSError as error:
            raise temporary_failed(error) from error

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "url": self.url, "process": self._hello.name}

    def lines(self) -> list[tuple[str, str]]:
        return [*super().lines(), ("process", f"{self._hello.name}, {self._hello.version}")]

    def close(self) -> None:
        self._channel.close()
        if self._aside is not None:
            self._aside.close()
