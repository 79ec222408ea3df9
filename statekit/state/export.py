"""Whole states as Arrow tables: numbers straight from the store's columns, the rest one by one."""

from typing import TYPE_CHECKING, Any

from statekit.schema import Type
from statekit.store import Block

if TYPE_CHECKING:
    import pyarrow

    from statekit.state.keyed import KeyedState

_NUMBERS = {"i64", "f64"}


def to_arrow(state: "KeyedState[Any]") -> "pyarrow.Table":
    """All entries of a state: its key columns and "value"."""
    import pyarrow

    raw = state._raw
    if raw.kind in _NUMBERS and not raw.codec.is_tuple and state._residence.home is None:
        return _numbers_table(state)
    keys, values = [], []
    for key, value in state.items():
        keys.append(key)
        values.append(value)
    columns = _key_columns(state, keys)
    kind = arrow_type(state.schema.type) if state.schema.form != "timers" else None
    if state.schema.form == "timers":
        kind = pyarrow.list_(pyarrow.int64())
    plain = [_arrow_value(value, state.schema.type) for value in values]
    columns["value"] = pyarrow.array(plain, kind) if kind is not None else pyarrow.array(plain)
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
    value_type = pyarrow.int64() if raw.kind == "i64" else pyarrow.float64()
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


_SCALARS = {
    "int": "int64", "float": "float64", "bool": "bool_", "str": "string", "bytes": "binary",
    "none": "null",
}  # fmt: skip


def arrow_type(kind: Type) -> Any:
    """The Arrow type of a schema type; None where Arrow is to find out from the values."""
    import pyarrow

    match kind:
        case str():
            name = _SCALARS.get(kind)
            return getattr(pyarrow, name)() if name else None
        case ["list" | "set" | "tuple*", item]:
            inner = arrow_type(item)
            return pyarrow.list_(inner) if inner is not None else None
        case ["dict", key, value]:
            parts = arrow_type(key), arrow_type(value)
            return pyarrow.map_(*parts) if None not in parts else None
        case ["record" | "row", _, fields]:
            inner = [(name, arrow_type(field)) for name, (field, _) in fields.items()]
            return pyarrow.struct(inner) if all(part for _, part in inner) else None
        case ["union", one, "none"] | ["union", "none", one]:
            return arrow_type(one)
        case ["enum", _, values]:
            return pyarrow.string() if isinstance(values[0], str) else pyarrow.int64()
        case _:
            return None


def _arrow_value(value: Any, kind: Type) -> Any:
    """A value as pyarrow.array() takes it: records as dicts, dicts as pairs."""
    if value is None or isinstance(kind, str):
        return value
    match kind:
        case ["list" | "set" | "tuple*", item]:
            return [_arrow_value(one, item) for one in value]
        case ["dict", key, item]:
            return [(_arrow_value(k, key), _arrow_value(v, item)) for k, v in value.items()]
        case ["record" | "row", _, fields]:
            get = value.get if isinstance(value, dict) else lambda name: getattr(value, name)
            return {name: _arrow_value(get(name), field) for name, (field, _) in fields.items()}
        case ["union", one, "none"] | ["union", "none", one]:
            return _arrow_value(value, one)
        case ["enum", _, _]:
            return getattr(value, "value", value)
        case _:
            return value
