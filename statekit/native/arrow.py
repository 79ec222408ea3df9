"""Arrow arrays as native columns, through the Arrow C data interface and without pyarrow.

An object with __arrow_c_array__ hands out two capsules. They hold pointers to the structs
below (their layout is fixed by the interface) and free the memory when they are collected, so
a column keeps the capsule. pyarrow is imported only for arrays that must be converted.
"""

import ctypes
from typing import Any, TypeAlias

from statekit._native import ffi, lib
from statekit.errors import ColumnError, MissingPackageError, null_item, package

# letter, type, n, data, offsets, data_len, keep: the fields of columns.Column
ArrowColumn: TypeAlias = tuple[str, int, int, Any, Any, int, object]


class _Schema(ctypes.Structure):
    _fields_ = (
        ("format", ctypes.c_char_p),
        ("name", ctypes.c_char_p),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("children", ctypes.c_void_p),
        ("dictionary", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("private_data", ctypes.c_void_p),
    )


class _Array(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_int64),
        ("null_count", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("n_buffers", ctypes.c_int64),
        ("n_children", ctypes.c_int64),
        ("buffers", ctypes.POINTER(ctypes.c_void_p)),
        ("children", ctypes.c_void_p),
        ("dictionary", ctypes.c_void_p),
        ("release", ctypes.c_void_p),
        ("private_data", ctypes.c_void_p),
    )


# A prototype of our own: setting types on ctypes.pythonapi would change them for everybody.
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)

_NUMBERS = {b"l": ("i", lib.SK_COL_I64), b"g": ("f", lib.SK_COL_F64)}
_VARIABLE = {
    b"u": ("s", lib.SK_COL_VAR32, 4),
    b"U": ("s", lib.SK_COL_VAR64, 8),
    b"z": ("b", lib.SK_COL_VAR32, 4),
    b"Z": ("b", lib.SK_COL_VAR64, 8),
}
_NO_OFFSETS = bytes(8)  # for an empty column, which may have no buffers at all


def arrow_column(source: Any) -> ArrowColumn:
    """The column of an object with __arrow_c_array__."""
    capsules = source.__arrow_c_array__()
    schema = _Schema.from_address(_capsule_pointer(capsules[0], b"arrow_schema"))
    native = _Array.from_address(_capsule_pointer(capsules[1], b"arrow_array"))
    layout = schema.format
    if schema.dictionary or not (layout in _NUMBERS or layout in _VARIABLE):
        return arrow_column(_convert(source, layout, bool(schema.dictionary)))
    _check_nulls(native)
    n, start = native.length, native.offset
    if layout in _NUMBERS:
        letter, kind = _NUMBERS[layout]
        data, keep = _aligned(native.buffers[1], 8, start, n, capsules[1])
        return letter, kind, n, data, ffi.NULL, 8 * n, keep
    letter, kind, width = _VARIABLE[layout]
    if n == 0:
        empty = ffi.from_buffer(_NO_OFFSETS)
        return letter, kind, 0, empty, empty, 0, _NO_OFFSETS
    offsets, keep = _aligned(native.buffers[1], width, start, n + 1, capsules[1])
    last = ffi.cast("int32_t *" if width == 4 else "int64_t *", offsets)[n]
    data = ffi.cast("void *", native.buffers[2] or 0)
    return letter, kind, n, data, offsets, last, (keep, capsules[1])


def arrow_from_stream(source: Any) -> Any:
    """One array from an object with __arrow_c_stream__: chunked arrays, pandas, Polars."""
    pa = _pyarrow("a chunked column")
    try:
        chunked = source if isinstance(source, pa.ChunkedArray) else pa.chunked_array(source)
    except pa.ArrowException as error:
        raise ColumnError(f"the column cannot be read as Arrow: {error}.") from None
    if chunked.num_chunks == 1:
        return chunked.chunk(0)
    whole = chunked.combine_chunks()
    if isinstance(whole, pa.ChunkedArray):  # more bytes than 32-bit offsets can count
        large = pa.large_string() if pa.types.is_string(whole.type) else pa.large_binary()
        whole = whole.cast(large).combine_chunks()
    return whole


def _convert(source: Any, layout: bytes, is_dictionary: bool) -> Any:
    """A copy of an array in one of the types that need no conversion."""
    pa = _pyarrow(f"an Arrow column of format {layout.decode()!r}")
    values = pa.array(source)
    kind = values.type
    if is_dictionary:
        kind = kind.value_type
    target = None
    if pa.types.is_integer(kind):
        target = pa.int64()
    elif pa.types.is_floating(kind):
        target = pa.float64()
    elif str(kind).endswith(("string", "string_view")):
        target = pa.large_string()
    elif "binary" in str(kind):
        target = pa.large_binary()
    elif pa.types.is_null(kind):
        if len(values):
            raise null_item(0)
        target = pa.string()
    if target is None:
        raise ColumnError(
            f"a column of Arrow type {values.type} is not supported. "
            "Cast it to string, binary, int64 or double."
        )
    try:
        return values.cast(kind).cast(target)
    except pa.ArrowException as error:
        raise ColumnError(
            f"the column of Arrow type {values.type} does not fit {target}: {error}. "
            "Cast it yourself, saying what should become of such items."
        ) from None


def _check_nulls(native: _Array) -> None:
    bitmap = native.buffers[0]
    n, start = native.length, native.offset
    if native.null_count == 0 or not bitmap or n == 0:
        return
    first_byte, shift = divmod(start, 8)
    packed = bytes(ffi.buffer(ffi.cast("char *", bitmap + first_byte), (shift + n + 7) // 8))
    nulls = ~(int.from_bytes(packed, "little") >> shift) & ((1 << n) - 1)
    if nulls:  # null_count may be -1, "not counted"
        at = (nulls & -nulls).bit_length() - 1
        raise null_item(at)


def _aligned(
    base: int | None, width: int, start: int, count: int, keep: object
) -> tuple[Any, object]:
    """A pointer to part of a buffer of `width`-byte numbers, and what keeps it alive.

    It is a copy if the part is not aligned: Arrow recommends alignment but does not demand it; C
    does.
    """
    address = (base or 0) + width * start
    if address % width == 0:
        return ffi.cast("void *", address), keep
    copy = bytes(ffi.buffer(ffi.cast("char *", address), width * count))
    return ffi.from_buffer(copy), copy


def _pyarrow(what: str) -> Any:
    try:
        return package("pyarrow", f"converting {what}")
    except MissingPackageError as error:
        raise ColumnError(f"{error}. Or pass string, binary, int64 or double.") from None
