"""Encoded values and keys as columns, without a Python object per value (csrc/unpack.c).

>>> record = Node("record", (Node("str", name="url"), Node("int", name="at", is_optional=True)))
>>> import msgspec
>>> rows = [msgspec.msgpack.encode(row) for row in ({"url": "/", "at": 7}, {"url": "/a"})]
>>> values = Unpacking(record)
>>> values.add(Items.of(rows))
>>> [(one.op, one.rows, one.nulls, bytes(one.data)) for one in values.take()]  # doctest: +ELLIPSIS
[('record', 2, 0, b''), ('str', 2, 0, b'//a'), ('int', 2, 1, b'\\x07...')]
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeAlias

from statekit._native import ffi, lib
from statekit.errors import native_error
from statekit.keys import KeyCodec
from statekit.native.buffers import owned_view

Op: TypeAlias = Literal[
    "nil", "bool", "int", "float", "str", "bin", "moment", "raw", "list", "map", "array", "record"
]

UNFIT = (lib.SK_BAD_VALUE, lib.SK_TOO_DEEP, lib.SK_TOO_LARGE)  # statuses of values, not of bytes
_OPS: dict[str, int] = {op: getattr(lib, f"SK_UNPACK_{op.upper()}") for op in Op.__args__}  # type: ignore[attr-defined]
_WITH_OFFSETS = frozenset(("str", "bin", "raw", "list", "map"))
_MANY = 2**32 - 1
_LETTERS: dict[str, Op] = {"s": "str", "b": "bin", "i": "int"}


class Node(NamedTuple):
    """A type, or a part of one; below: what it is made of. csrc/unpack.c says what each op is."""

    op: Op
    below: tuple["Node", ...] = ()
    is_optional: bool = False  # nil is a null
    name: str = ""  # of a field
    is_required: bool = False  # of a field
    least: int = 0  # of an array: how many items it has
    most: int = _MANY


class Gathered(NamedTuple):
    """The column of one node, in the buffers that Arrow has."""

    op: Op
    rows: int
    nulls: int
    valid: memoryview  # a byte per row
    offsets: memoryview
    data: memoryview


class Items(NamedTuple):
    """A column of bytes: item r is data[offsets[r]:offsets[r + 1]]. Offsets are of 4 or 8 bytes."""

    data: Any
    offsets: memoryview

    @classmethod
    def of(cls, items: Sequence[bytes]) -> "Items":
        offsets = array("q", accumulate(map(len, items), initial=0))
        return cls(b"".join(items), memoryview(offsets))

    def __len__(self) -> int:
        return len(self.offsets) - 1


class Unpacking:
    """Columns that are being gathered. For one thread at a time."""

    __slots__ = ("_native", "_nodes", "_owner", "_parts")

    def __init__(self, node: Node) -> None:
        self._prepare([*_preorder(node, 0)])

    def _prepare(self, nodes: list[tuple[Node, int]]) -> None:
        self._nodes = [node for node, _ in nodes]
        native = self._native = ffi.new("sk_unpack_node[]", len(nodes))
        # It frees the buffers that were not taken. ffi.gc() makes a pointer of an array.
        self._owner = ffi.gc(ffi.addressof(native, 0), lambda _: _free_nodes(native))
        self._parts = []
        zero = bytes(4)
        for at, (node, stop) in enumerate(nodes):
            one = native[at]
            one.op, one.stop = _OPS[node.op], stop
            one.is_optional, one.is_required = node.is_optional, node.is_required
            one.least, one.most = node.least, node.most
            name = ffi.from_buffer("uint8_t[]", node.name.encode())
            self._parts.append(name)  # C has only its address
            one.name, one.name_len = name, len(name)
            if node.op in _WITH_OFFSETS:
                _expect(lib.sk_buf_put(ffi.addressof(one, "offsets"), zero, 4))

    def add(self, items: Items, start: int = 0, stop: int | None = None, skip: Any = None) -> None:
        """Adds the values of items start to stop. skip: a byte for each item; 1: leave it out.

        A status of UNFIT says that a value is not of the type; what was gathered is then lost.
        """
        column, keep = _column(items)
        stop = len(items) if stop is None else stop
        _expect(lib.sk_unpack(self._native, column, start, stop, _skip(skip)))
        del keep

    def take(self) -> list[Gathered]:
        """What was gathered, node by node, in preorder. Nothing may be added afterwards."""
        return [
            Gathered(
                node.op,
                one.rows,
                one.nulls,
                _moved(one, "valid"),
                _moved(one, "offsets"),
                _moved(one, "data"),
            )
            for node, one in zip(self._nodes, self._native, strict=True)
        ]


class KeyUnpacking(Unpacking):
    """The parts of keys that are being gathered, a column for each. Not for bare int keys."""

    __slots__ = ("_is_tuple",)

    def __init__(self, codec: KeyCodec) -> None:
        self._is_tuple = codec.is_tuple
        nodes = [(Node(_LETTERS[letter]), at + 1) for at, letter in enumerate(codec.parts)]
        self._prepare(nodes)

    def add(self, items: Items, start: int = 0, stop: int | None = None, skip: Any = None) -> None:
        column, keep = _column(items)
        stop = len(items) if stop is None else stop
        count = len(self._nodes)
        _expect(
            lib.sk_unpack_keys(
                self._native, count, self._is_tuple, column, start, stop, _skip(skip)
            )
        )
        del keep


def _preorder(node: Node, at: int) -> Iterator[tuple[Node, int]]:
    """Each node and the number of the first one that is not below it. at: the node's number."""
    below: list[tuple[Node, int]] = []
    for one in node.below:
        below += _preorder(one, at + 1 + len(below))
    yield node, at + 1 + len(below)
    yield from below


def _column(items: Items) -> tuple[Any, object]:
    column = ffi.new("sk_column *")
    data, offsets = ffi.from_buffer("uint8_t[]", items.data), ffi.from_buffer(items.offsets)
    column.type = lib.SK_COL_VAR32 if items.offsets.itemsize == 4 else lib.SK_COL_VAR64
    column.data, column.data_len, column.offsets = data, len(data), offsets
    return column, (data, offsets)


def _skip(skip: Any) -> Any:
    return ffi.NULL if skip is None else ffi.from_buffer("uint8_t[]", skip)


def _moved(node: Any, name: str) -> memoryview:
    """A buffer of a node, which becomes the view's: a node's memory ends with the Unpacking."""
    own = ffi.new("sk_buf *")
    own[0] = getattr(node, name)
    setattr(node, name, (ffi.NULL, 0, 0))
    return owned_view(own)


def _free_nodes(nodes: Any) -> None:
    for one in nodes:
        for name in ("valid", "offsets", "data"):
            lib.sk_buf_free(ffi.addressof(one, name))


def _expect(status: int) -> None:
    if status:
        raise native_error(status)
