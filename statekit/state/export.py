"""Whole states as Arrow tables: numbers directly from blocks, other values one by one."""

from datetime import datetime, time
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from msgspec import json

from statekit.errors import package
from statekit.kinds import KINDS
from statekit.native import Block
from statekit.schema import Type

if TYPE_CHECKING:
    import pyarrow

    from statekit.state.keyed import KeyedState


def to_arrow(state: "KeyedState[Any]") -> "pyarrow.Table":
    """All entries of a state: its key columns and "value"."""
    pyarrow = package("pyarrow", "to_arrow()")
    raw = state._raw
    if KINDS[raw.kind].code and not raw.codec.is_tuple and state._residence.is_whole:
        return _numbers_table(state)
    keys, values = [], []
    for key, value in state.items():
        keys.append(key)
        values.append(value)
    columns = _key_columns(state, keys)
    kind = ["list", "int"] if state.schema.form == "timers" else state.schema.type
    columns["value"] = arrow_array(values, kind)
    return pyarrow.table(columns)


def _key_columns(state: "KeyedState[Any]", keys: list[Any]) -> dict[str, Any]:
    import pyarrow

    types = {"s": pyarrow.string(), "b": pyarrow.binary(), "i": pyarrow.int64()}
    codec = state._raw.codec
    if not codec.is_tuple:
        return {"key": pyarrow.array(keys, types[codec.parts])}
    return {
        f"key_{at}": pyarrow.array([key[at] for key in keys], types[part])
        for at, part in enumerate(codec.parts)
    }


def _numbers_table(state: "KeyedState[Any]") -> "pyarrow.Table":
    """Leaf by leaf, without a Python object per entry."""
    import pyarrow

    raw, store = state._raw, state._residence.store
    letter = raw.codec.parts
    key_type = {"s": pyarrow.string(), "b": pyarrow.binary(), "i": pyarrow.int64()}[letter]
    value_type = pyarrow.int64() if KINDS[raw.kind].code == "q" else pyarrow.float64()
    keys, values = [], []
    for leaf in state._residence.leaves():
        for block in Block.each(store.encode_leaf(leaf, raw)):
            data = pyarrow.py_buffer(block.key_column)
            buffers = [None, data]
            offsets = block.key_offsets
            if offsets is not None:
                wide = offsets.itemsize == 8
                key_type = _wide(key_type) if wide else key_type
                buffers = [None, pyarrow.py_buffer(offsets), data]
            keys.append(pyarrow.Array.from_buffers(key_type, block.entries, buffers))
            numbers = [None, pyarrow.py_buffer(block.value_column)]
            values.append(pyarrow.Array.from_buffers(value_type, block.entries, numbers))
    return pyarrow.table(
        {
            "key": pyarrow.chunked_array(keys, key_type),
            "value": pyarrow.chunked_array(values, value_type),
        }
    )


def _wide(key_type: Any) -> Any:
    import pyarrow

    return pyarrow.large_string() if key_type == pyarrow.string() else pyarrow.large_binary()


_SCALARS = {"int": "int64", "float": "float64", "bool": "bool_", "str": "string", "bytes": "binary"}


def arrow_array(values: list[Any], kind: Type) -> "pyarrow.Array":
    """Values of a schema type as an Arrow array: maps as maps, records and tuples as structs.

    Where the type does not say it (Any, unions, dates), Arrow chooses a type from the values.
    Values that Arrow cannot hold become JSON text. If some datetimes have a zone and others do not,
    all become text in ISO 8601.
    """
    pyarrow = package("pyarrow", "to_arrow()")
    match kind:
        case "int" | "float" | "bool" | "str" | "bytes":
            return pyarrow.array(values, getattr(pyarrow, _SCALARS[kind])())
        case ["union", one, "none"] | ["union", "none", one]:
            return arrow_array(values, one)
        case ["enum" | "flags", _, _]:
            return _guessed([getattr(value, "value", value) for value in values])
        case ["list" | "set" | "tuple*", item]:
            flat = [one for value in values if value is not None for one in value]
            return pyarrow.ListArray.from_arrays(_offsets(values), arrow_array(flat, item))
        case ["dict", key, item]:
            there = [value for value in values if value is not None]
            keys = arrow_array([one for value in there for one in value], key)
            items = arrow_array([one for value in there for one in value.values()], item)
            return pyarrow.MapArray.from_arrays(_offsets(values), keys, items)
        case ["tuple", *parts]:
            columns = {str(at): (part, _item_getter(at)) for at, part in enumerate(parts)}
            return _struct(values, columns)
        case ["record" | "row", _, fields]:
            columns = {name: (part, _field_getter(name)) for name, (part, _) in fields.items()}
            return _struct(values, columns)
        case _:
            return _guessed(values)


def _offsets(values: list[Any]) -> "pyarrow.Array":
    """Where each container's items start; null for a container that is None."""
    import pyarrow

    ends = list(accumulate((len(value or ()) for value in values), initial=0))
    starts = [None if value is None else at for value, at in zip(values, ends, strict=False)]
    return pyarrow.array([*starts, ends[-1]], pyarrow.int32())


def _struct(values: list[Any], columns: dict[str, tuple[Type, Any]]) -> "pyarrow.Array":
    import pyarrow

    arrays = [
        arrow_array([None if value is None else get(value) for value in values], part)
        for part, get in columns.values()
    ]
    missing = pyarrow.array([value is None for value in values], pyarrow.bool_())
    return pyarrow.StructArray.from_arrays(arrays, list(columns), mask=missing)


def _item_getter(at: int) -> Any:
    return lambda value: value[at]


def _field_getter(name: str) -> Any:
    return lambda value: value.get(name) if isinstance(value, dict) else getattr(value, name, None)


def _guessed(values: list[Any]) -> "pyarrow.Array":
    import pyarrow

    if _needs_text(values):
        texts = [None if value is None else value.isoformat() for value in values]
        return pyarrow.array(texts, pyarrow.string())
    try:
        return pyarrow.array(values)
    except (pyarrow.ArrowException, OverflowError):
        texts = [None if value is None else json.encode(value).decode() for value in values]
        return pyarrow.array(texts, pyarrow.string())


def _needs_text(values: list[Any]) -> bool:
    """Whether no column can hold these times: some with a time zone, or times of day with one."""
    zones = {value.tzinfo is None for value in values if isinstance(value, datetime)}
    has_zone = any(isinstance(value, time) and value.tzinfo is not None for value in values)
    are_times = all(value is None or isinstance(value, datetime | time) for value in values)
    return are_times and (len(zones) == 2 or has_zone)
