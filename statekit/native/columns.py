"""Columns of keys and values, as C reads them, from what a Python program has.

Taken without a copy: Arrow arrays of string, large_string, binary, large_binary, int64 and
double (any object with __arrow_c_array__, sliced or not), NumPy arrays and buffers of int64
and float64. Converted: other integer and float widths, NumPy 'S', 'U' and object arrays,
chunked Arrow arrays, pandas and Polars series, and lists or other iterables of str, bytes,
int or float. Neither NumPy nor pyarrow is imported unless the caller's data needs it.

One letter says what is wanted: 's' str, 'b' bytes, 'i' int64, 'f' float64, '*' any of these (an
element of a container). The source must fit: bytes are not accepted as str, nor floats as ints. A
null is an error, which names its position.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, NamedTuple

from statekit._native import ffi, lib
from statekit.errors import ColumnError, native_error, null_item, shorten
from statekit.exact import InexactError, exact_float
from statekit.keys import KeyCodec
from statekit.native.arrow import arrow_column, arrow_from_stream
from statekit.native.buffers import owned_view, readable

_WORDS = {"s": "str", "b": "bytes", "i": "int", "f": "float", "*": "str, bytes, int or float"}
_FORMS = {"s": lib.SK_FORM_STR, "b": lib.SK_FORM_MSGPACK, "i": 0, "f": 0}
_I64_FORMATS = frozenset("ql")  # 8-byte signed integers of memoryview and array
_INT_MAX = 2**63 - 1


class Column(NamedTuple):
    """n items in native memory, which `keep` keeps alive."""

    letter: str  # 's', 'b', 'i' or 'f'
    type: int  # sk_column_type
    n: int
    data: Any  # this and offsets: pointers that cffi accepts as const void *
    offsets: Any
    data_len: int
    keep: object
    is_keys: bool = False  # encoded keys, perhaps of tuples

    def fill(self, target: Any, *, raw: bool = False) -> None:
        """Writes the column into an sk_column. raw: bytes are bytes, not MessagePack."""
        target.type = self.type
        target.form = lib.SK_FORM_BIN if raw and self.letter == "b" else _FORMS[self.letter]
        target.data = self.data
        target.offsets = self.offsets
        target.data_len = self.data_len

    def slice(self, start: int, stop: int) -> "Column":
        """Items start to stop, in the same memory."""
        n = max(0, min(stop, self.n) - start)
        if self.offsets == ffi.NULL:
            data = ffi.cast("char *", self.data) + 8 * start
            return self._replace(n=n, data=data, data_len=8 * n)
        width = 4 if self.type == lib.SK_COL_VAR32 else 8
        return self._replace(n=n, offsets=ffi.cast("char *", self.offsets) + width * start)

    def encoded(self, record: int) -> bytes:
        """One item as bytes: a key as it is stored."""
        if self.offsets == ffi.NULL:
            return bytes(ffi.buffer(ffi.cast("char *", self.data) + 8 * record, 8))
        width = "int32_t *" if self.type == lib.SK_COL_VAR32 else "int64_t *"
        offsets = ffi.cast(width, self.offsets)
        start, end = offsets[record], offsets[record + 1]
        return bytes(ffi.buffer(ffi.cast("char *", self.data) + start, end - start))


def column(source: Any, want: str, what: str = "the column") -> Column:
    """A column of what is wanted. what: its name in messages, "the keys of state 'visits'"."""
    try:
        found = _find(source, want)
        if want in ("*", found.letter):
            return found
        if found.n == 0:  # the type of an empty array says nothing: it depends on the library
            return _from_items((), want)
        if want == "f" and found.letter == "i":
            return _floats(found)
        raise _misfit(f"it holds {_WORDS[found.letter]}", want)
    except ColumnError as error:
        raise ColumnError(f"{what}: {error}") from None


def key_column(source: Any, codec: KeyCodec, what: str = "the keys") -> Column:
    """A column of encoded keys. Tuple keys: a tuple of columns, or a list of tuples."""
    if isinstance(source, Column) and source.is_keys:
        return source
    if not codec.is_tuple:
        return column(source, codec.parts, what)._replace(is_keys=True)
    parts = _tuple_parts(source, len(codec.parts))
    if parts is None:
        raise ColumnError(
            f"{what} do not fit {codec.python}. "
            f"Pass a tuple of {len(codec.parts)} columns or a list of tuples."
        )
    columns = [
        column(part, want, f"part {at} of {what}")
        for at, (part, want) in enumerate(zip(parts, codec.parts, strict=True))
    ]
    n = columns[0].n
    if any(part.n != n for part in columns):
        lengths = ", ".join(str(part.n) for part in columns)
        raise ColumnError(f"the parts of {what} have {lengths} items. They must be equally many.")
    native = ffi.new("sk_column[]", len(columns))
    for at, part in enumerate(columns):
        part.fill(native[at])
    offsets = bytearray(8 * (n + 1))
    buf = ffi.new("sk_buf *")
    status = lib.sk_pack_keys(codec.native, native, n, ffi.from_buffer("int64_t[]", offsets), buf)
    data = owned_view(buf)
    if status:
        raise native_error(status)
    return _variable("b", data, offsets, n)._replace(is_keys=True)


def route(keys: Any, codec: KeyCodec, leaves: int) -> "memoryview[int]":
    """The leaf of each key, in a store that has `leaves` leaves."""
    col = key_column(keys, codec)
    native = ffi.new("sk_column *")
    col.fill(native)
    out = memoryview(bytearray(4 * col.n)).cast("I")
    native_out = ffi.from_buffer("uint32_t[]", out)
    status = lib.sk_route_keys(codec.native, native, col.n, leaves, native_out)
    if status:
        raise native_error(status)
    return out


def _tuple_parts(source: Any, count: int) -> Any:
    """The columns of a source of tuple keys, or None."""
    if isinstance(source, tuple):
        return source if len(source) == count else None
    if isinstance(source, str | bytes | Mapping) or not isinstance(source, Iterable):
        return None
    rows = source if isinstance(source, list) else list(source)
    if not rows:
        return [[] for _ in range(count)]
    # Rows must be tuples: two lists of two items could be either rows or columns.
    fit = all(isinstance(row, tuple) and len(row) == count for row in rows)
    return list(zip(*rows, strict=True)) if fit else None


def _check_pandas(source: Any) -> None:
    """Refuses nulls of pandas' own types, of which pandas 2 would make NaN and so floats."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(source, pandas.Series | pandas.Index):
        return
    if isinstance(source.dtype, pandas.api.extensions.ExtensionDtype) and source.hasnans:
        raise null_item(int(source.isna().argmax()))


def _find(source: Any, want: str) -> Column:
    """The column of a source, whatever its items are."""
    if isinstance(source, Column):
        return source
    if isinstance(source, list | tuple):
        return _from_items(source, want)
    if hasattr(source, "__arrow_c_array__"):
        return Column(*arrow_column(source))
    if isinstance(source, str | bytes | bytearray):
        raise ColumnError(f"{shorten(source)} is one item, not a column. Pass a list of items.")
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(source, numpy.ndarray):
        return _from_numpy(source, want, numpy)
    if hasattr(source, "__arrow_c_stream__"):
        return Column(*arrow_column(arrow_from_stream(source)))
    if isinstance(source, array | memoryview):
        return _from_buffer(memoryview(source), want)
    if hasattr(source, "to_numpy"):
        _check_pandas(source)
        return _find(source.to_numpy(), want)
    if isinstance(source, Mapping):
        raise ColumnError(
            f"{shorten(source)} is a mapping, not a column. Pass list(x) for its keys and "
            "list(x.values()) for its values."
        )
    if isinstance(source, Iterable):
        return _from_items(list(source), want)
    raise ColumnError(
        f"an object of type {type(source).__name__} is no column. "
        f"Pass a list, an Arrow or NumPy array, or a series of {_WORDS[want]}."
    )


# ---- Python items


def _from_items(source: Any, want: str) -> Column:
    items = tuple(source)  # a copy: no other thread can change it, nor has it a __len__ of its own
    if want == "*":
        want = _letter_of(items[0]) if items else "s"
    try:
        if want == "i":
            return _numbers("i", array("q", items), len(items))
        if want == "f":
            return _numbers("f", _float_items(items), len(items))
        joined, lengths = _join_str(items) if want == "s" else (b"".join(items), map(len, items))
    except (TypeError, ValueError, OverflowError):
        raise _item_error(items, want) from None
    return _variable(want, joined, array("q", accumulate(lengths, initial=0)), len(items))


def _float_items(items: tuple[Any, ...]) -> "array[float]":
    """The items as floats. InexactError for a number that no float is equal to."""
    floats = array("d", items)
    if not set(map(type, items)) <= {float} and tuple(floats) != items:
        for item in items:  # a NaN is not equal to itself
            exact_float(item)
    return floats


def _join_str(items: Any) -> tuple[bytes, Iterable[int]]:
    text = "".join(items)
    data = text.encode()
    if len(data) == len(text):  # all ASCII: characters are bytes
        return data, map(len, items)
    return data, [len(item.encode()) for item in items]


def _letter_of(item: object) -> str:
    if isinstance(item, bool):
        raise ColumnError("a column of bool is not supported. Pack each item with msgpack.")
    for letter, kind in (("s", str), ("b", bytes), ("i", int), ("f", float)):
        if isinstance(item, kind):
            return letter
    return "s"  # it does not fit: _item_error will name it


def _item_error(items: Any, want: str) -> ColumnError:
    """Finds the item that array() or join() did not accept."""
    for at, item in enumerate(items):
        try:
            _from_items_one(item, want)
        except OverflowError:
            return ColumnError(
                f"item {at}, {shorten(item)}, does not fit into 64 bits, which is -2**63 to "
                "2**63 - 1. Declare the state with another type, or leave it out."
            )
        except InexactError as fault:
            return ColumnError(f"item {at}, {shorten(item)}, {fault}. {fault.advice}")
        except (TypeError, ValueError):
            if item is None:
                return null_item(at)
            if want == "s" and isinstance(item, str):
                return ColumnError(
                    f"item {at}, {shorten(item)}, has no UTF-8 form. Remove its lone surrogates."
                )
            return _misfit(f"item {at} is {shorten(item)}", want)
    return _misfit("it changed while it was read", want)


def _from_items_one(item: Any, want: str) -> None:
    if want == "i":
        array("q", [item])
    elif want == "f":
        exact_float(item)
    elif want == "s":
        "".join([item]).encode()
    else:
        b"".join([item])


def _misfit(found: str, want: str) -> ColumnError:
    return ColumnError(f"{found}. Pass {_WORDS[want]} items.")


# ---- Buffers and NumPy


def _is_misaligned(view: memoryview) -> bool:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(view))) % 8 != 0


def _from_buffer(view: memoryview, want: str) -> Column:
    letter = "i" if view.format in _I64_FORMATS else "f" if view.format == "d" else ""
    if view.ndim != 1:
        raise ColumnError(f"the column has {view.ndim} dimensions. Pass a one-dimensional one.")
    if not letter or view.itemsize != 8 or not view.c_contiguous or _is_misaligned(view):
        return _from_items(view.tolist(), want)
    return _numbers(letter, view, len(view))


def _from_numpy(source: Any, want: str, numpy: Any) -> Column:
    kind = source.dtype.kind
    if source.ndim != 1:
        raise ColumnError(f"the array has {source.ndim} dimensions. Pass a one-dimensional one.")
    if isinstance(source, numpy.ma.MaskedArray) and numpy.ma.is_masked(source):
        raise null_item(int(numpy.argmax(numpy.ma.getmaskarray(source))))
    if kind in "iu":
        if kind == "u" and len(source) and int(source.max()) > _INT_MAX:
            at = int(numpy.argmax(source > _INT_MAX))
            raise ColumnError(
                f"item {at}, {source[at]}, does not fit into 64 bits, which is -2**63 to "
                "2**63 - 1. Declare the state with another type, or leave it out."
            )
        data = numpy.require(source, "<i8", ["C", "A"])
        return _numbers("i", data, len(data))
    if kind == "f" and source.dtype.itemsize <= 8:
        data = numpy.require(source, "<f8", ["C", "A"])
        return _numbers("f", data, len(data))
    if kind in "SUO":
        return _from_items(source.tolist(), want)
    raise _misfit(f"its dtype is {source.dtype}", want)


def _floats(ints: Column) -> Column:
    return _from_items(ffi.unpack(ffi.cast("int64_t *", ints.data), ints.n), "f")


# ---- Native memory


def _numbers(letter: str, data: Any, n: int) -> Column:
    kind = lib.SK_COL_I64 if letter == "i" else lib.SK_COL_F64
    native = readable(data) if data.__class__ is memoryview else ffi.from_buffer(data)
    return Column(letter, kind, n, native, ffi.NULL, 8 * n, data)


def _variable(letter: str, data: Any, offsets: Any, n: int) -> Column:
    native = ffi.from_buffer(data)
    return Column(
        letter, lib.SK_COL_VAR64, n, native, ffi.from_buffer(offsets), len(native), (data, offsets)
    )
