"""What a state holds, as data: read from type hints, kept with the state, compared on reopening.

A type is written as plain JSON, so that any program can read it:

    "int" "float" "bool" "str" "bytes" "none" "any" "datetime" "date" "time" "timedelta" "uuid"
    "decimal"                       scalars
    ["list", T] ["set", T] ["dict", K, V]
    ["tuple", T, ...] ["tuple*", T]               of these types; of any length
    ["record", name, {field: [T, required]}]      dataclass or TypedDict: a map with field names
    ["row", name, {field: [T, required]}]         NamedTuple: an array
    ["enum", name, [value, ...]]                  Enum, or "Literal"
    ["flags", name, [value, ...]]                 Flag: an int, whose bits are these
    ["union", T, ...]                             Optional[T] is ["union", T, "none"]
    ["ref", name]                                 a record inside itself

>>> describe(dict[str, list[int]])
['dict', 'str', ['list', 'int']]
>>> show(describe(dict[str, int | None]))
'dict[str, int | None]'
>>> refusal(describe(list[int]), describe(list[float])) is None
True
>>> refusal("str", "int")
'str cannot become int'
"""

import collections
import collections.abc
import dataclasses
import datetime
import decimal
import enum
import types
import typing
import uuid
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

from statekit.errors import SchemaError, shorten
from statekit.keys import key_codec
from statekit.kinds import KINDS, VALUE_KINDS

Type: TypeAlias = str | list[Any]

_SCALARS: dict[Any, str] = {
    int: "int", float: "float", bool: "bool", str: "str", bytes: "bytes",
    None: "none", type(None): "none", Any: "any", object: "any",
    datetime.datetime: "datetime", datetime.date: "date", datetime.time: "time",
    datetime.timedelta: "timedelta", uuid.UUID: "uuid", decimal.Decimal: "decimal",
}  # fmt: skip
_BARE = {
    list: ["list", "any"],
    dict: ["dict", "str", "any"],
    set: ["set", "any"],
}
_FORM_KINDS = {"list": "list", "map": "map", "set": "map", "timers": "timers"}
_KEY_PARTS = frozenset(("str", "bytes", "int"))
_ADVICE = (
    "Use int, float, bool, str, bytes, None, datetime, date, time, timedelta, UUID, Decimal, Any, "
    "list, dict, set, tuple[...], a dataclass, NamedTuple, TypedDict, Enum or Literal, or unions "
    "of these."
)
_INSTEAD: dict[Any, str] = {
    tuple: "tuple[int, ...] or tuple[str, int]",
    frozenset: "set",
    bytearray: "bytes",
    collections.abc.Sequence: "list",
    collections.abc.Mapping: "dict",
    collections.abc.Set: "set",
    collections.deque: "list",
    collections.defaultdict: "dict",
    collections.Counter: "dict[str, int]",
    collections.OrderedDict: "dict",
}


class StateSchema(NamedTuple):
    """What a provider remembers of a state."""

    name: str
    form: str  # "value", "list", "map", "set" or "timers": how it is stored and read
    key: str  # the key type, as the native store writes it: "s", "(si)"
    type: Type  # of the whole value under a key
    clock: str = ""  # of a state with a time to live: "processing" or "event"

    @property
    def timed(self) -> bool:
        """Entries carry the time they were last touched."""
        return bool(self.clock)

    @property
    def kind(self) -> str:
        """The kind of the native state that holds it."""
        if self.form != "value":
            return _FORM_KINDS[self.form]
        return VALUE_KINDS.get(self.type, "bytes") if isinstance(self.type, str) else "bytes"

    def __str__(self) -> str:
        timed = f", with a time to live in {self.clock} time" if self.clock else ""
        return f"{self.form} of {show(self.type)} under {key_codec(self.key).python} keys{timed}"


def value_kind(stored: Type) -> str:
    """The kind of a value state, as far as the state has to know it.

    "i64" or "f64" for numbers, with which it can compute; "bytes" for everything that is stored
    encoded, whichever native kind it has (StateSchema.kind).
    """
    kind = VALUE_KINDS.get(stored, "bytes") if isinstance(stored, str) else "bytes"
    return kind if KINDS[kind].code else "bytes"


def describe(hint: Any) -> Type:
    """The type that a hint stands for. SchemaError if it cannot be stored."""
    return _describe(hint, {})


_WRAPPERS = (typing.Annotated, typing.Required, typing.NotRequired)
_ALIAS: Any = getattr(typing, "TypeAliasType", ())  # since Python 3.12: `type UserId = int`


def unwrapped(hint: Any) -> Any:
    """The type in an Annotated, a NewType, an alias, Required or NotRequired.

    >>> unwrapped(typing.Annotated[typing.NewType("UserId", int), "who"])
    <class 'int'>
    """
    while True:
        if isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif isinstance(hint, _ALIAS):
            hint = hint.__value__
        elif typing.get_origin(hint) in _WRAPPERS:
            hint = typing.get_args(hint)[0]
        else:
            return hint


def annotations(hint: Any) -> tuple[Any, ...]:
    """What an Annotated says about its type."""
    found: tuple[Any, ...] = ()
    while typing.get_origin(hint) in _WRAPPERS:
        hint, *more = typing.get_args(hint)
        found += tuple(more)
    return found


def _describe(hint: Any, open_records: dict[Any, str]) -> Type:
    hint = unwrapped(hint)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    try:
        if (scalar := _SCALARS.get(hint)) is not None:
            return scalar
        bare = None if args else _BARE.get(origin or hint)
    except TypeError as error:  # unhashable
        raise _no_type(hint) from error
    if bare is not None:
        return list(bare)
    if origin in (typing.Union, types.UnionType):
        return ["union", *(_describe(arg, open_records) for arg in args)]
    if origin is Literal:
        return ["enum", "Literal", list(args)]
    if origin in (list, set):
        return [origin.__name__, _describe(args[0], open_records)]
    if origin is dict:
        return ["dict", _describe_map_key(args[0]), _describe(args[1], open_records)]
    if origin is tuple and (args or hint == tuple[()]):
        return _describe_tuple(args, open_records)
    if isinstance(hint, type):
        return _describe_class(hint, open_records)
    raise _no_type(hint)


def _no_type(hint: Any) -> SchemaError:
    advice = _ADVICE
    origin = typing.get_origin(hint) or hint
    if isinstance(hint, str):
        advice = "Pass the type itself, not its name."
    elif isinstance(origin, collections.abc.Hashable) and origin in _INSTEAD:
        advice = f"Use {_INSTEAD[origin]}."
    elif isinstance(hint, type) and hint.__module__.partition(".")[0] in ("numpy", "pandas"):
        advice = "Use int, float, bool, str, datetime or a list of these: NumPy's are taken too."
    elif dataclasses.is_dataclass(hint) and not isinstance(hint, type):
        advice = f"Pass the class, {type(hint).__name__}."
    name = hint.__name__ if isinstance(hint, type) else shorten(hint)
    return SchemaError(f"{name} is no type that a state can hold. {advice}")


def _describe_tuple(args: tuple[Any, ...], open_records: dict[Any, str]) -> Type:
    if len(args) == 2 and args[1] is Ellipsis:
        return ["tuple*", _describe(args[0], open_records)]
    return ["tuple", *(_describe(arg, open_records) for arg in args)]


def _describe_map_key(hint: Any) -> Type:
    key = _describe(hint, {})
    is_tuple = isinstance(key, list) and key[0] == "tuple" and set(key[1:]) <= _KEY_PARTS
    if key == "any" or is_tuple or (isinstance(key, str) and key in _KEY_PARTS):
        return key
    raise SchemaError(
        f"{shorten(hint)} cannot be the key of a map. Use str, bytes, int, or a tuple of these."
    )


def _describe_class(cls: type, open_records: dict[Any, str]) -> Type:
    if cls in open_records:
        return ["ref", open_records[cls]]
    if issubclass(cls, enum.Enum):
        values = [member.value for member in cls]
        if {type(value) for value in values} not in ({int}, {str}):
            raise SchemaError(
                f"the values of {cls.__name__} are not all str or all int, so it cannot be "
                "stored. Give its members values of one of these types."
            )
        return ["flags" if issubclass(cls, enum.Flag) else "enum", cls.__name__, values]
    fields = _fields(cls)
    if fields is None:
        raise _no_type(cls)
    inside = {**open_records, cls: cls.__name__}
    described = {
        name: [_describe(hint, inside), required] for name, (hint, required) in fields.items()
    }
    return ["row" if issubclass(cls, tuple) else "record", cls.__name__, described]


def _fields(cls: type) -> dict[str, tuple[Any, bool]] | None:
    """The fields of a record class: their hints, and whether a value must be given."""
    # In a TypedDict, Required[...] may stand at any depth in the type of a field.
    is_record = dataclasses.is_dataclass(cls) or typing.is_typeddict(cls)
    if not is_record and not (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        return None
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:
        raise SchemaError(
            f"{cls.__name__} has a field whose type cannot be found ({error}). "
            "Define that type at the top of its module."
        ) from None
    if dataclasses.is_dataclass(cls):
        return {
            field.name: (
                hints[field.name],
                field.init
                and field.default is dataclasses.MISSING
                and field.default_factory is dataclasses.MISSING,
            )
            for field in dataclasses.fields(cls)
        }
    if typing.is_typeddict(cls):
        required: frozenset[str] = getattr(cls, "__required_keys__", frozenset())
        return {name: (hint, name in required) for name, hint in hints.items()}
    defaults: dict[str, Any] = getattr(cls, "_field_defaults", {})
    names: tuple[str, ...] = getattr(cls, "_fields", ())
    return {name: (hints.get(name, Any), name not in defaults) for name in names}


# ---- In words


_SHOWN = {"none": "None", "any": "Any", "uuid": "UUID", "decimal": "Decimal"}


def show(stored: Type) -> str:
    """A type as Python would write it."""
    if isinstance(stored, str):
        return _SHOWN.get(stored, stored)
    tag, *rest = stored
    if tag == "enum" and rest[0] == "Literal":
        return f"Literal[{', '.join(map(repr, rest[1]))}]"
    if tag == "union":
        return " | ".join(show(part) for part in rest)
    if tag in ("record", "row", "enum", "flags", "ref"):
        return str(rest[0])
    if tag == "tuple*":
        return f"tuple[{show(rest[0])}, ...]"
    return f"{tag}[{', '.join(show(part) for part in rest)}]"


# ---- Evolution


def refusal(stored: Type, asked: Type) -> str | None:
    """Why what is stored cannot be read as what is asked for; None if it can.

    Allowed: a new field with a default, a field that is gone, int where float is asked for. (But
    members of a set and keys of a map may not change at all: they are found by their bytes.)
    """
    if stored == asked:
        return None
    if stored == "int" and asked == "float":
        return None
    if isinstance(stored, list) and isinstance(asked, list) and stored[0] == asked[0]:
        compare = _COMPARE.get(stored[0])
        if compare is not None:
            return compare(stored, asked)
    return f"{show(stored)} cannot become {show(asked)}"


def _refuse_parts(stored: list[Any], asked: list[Any]) -> str | None:
    if len(stored) != len(asked):
        return f"{show(stored)} cannot become {show(asked)}"
    reasons = (refusal(a, b) for a, b in zip(stored[1:], asked[1:], strict=True))
    return next((reason for reason in reasons if reason), None)


def _refuse_union(stored: list[Any], asked: list[Any]) -> str | None:
    if sorted(stored[1:], key=show) == sorted(asked[1:], key=show):
        return None  # the order of the members does not matter
    return _refuse_parts(stored, asked)


def _refuse_dict(stored: list[Any], asked: list[Any]) -> str | None:
    if stored[1] != asked[1]:
        return f"map keys of {show(stored[1])} cannot become {show(asked[1])}"
    return refusal(stored[2], asked[2])


def _refuse_fields(stored: list[Any], asked: list[Any]) -> str | None:
    name = asked[1]
    for field, (kind, required) in asked[2].items():
        if field not in stored[2]:
            if required:
                return f"field {field!r} of {name} is new and has no default"
            continue
        if required and not stored[2][field][1]:
            return f"field {field!r} of {name} may be missing in what is stored, and has no default"
        reason = refusal(stored[2][field][0], kind)
        if reason:
            return f"field {field!r} of {name}: {reason}"
    return None


def _refuse_row(stored: list[Any], asked: list[Any]) -> str | None:
    # The fields of a NamedTuple are stored by position: the stored ones must keep their places.
    before, after = list(stored[2]), list(asked[2])
    if after[: len(before)] != before:
        return f"the fields of {asked[1]} are stored by position, and only new ones at the end fit"
    return _refuse_fields(stored, asked)


def _refuse_enum(stored: list[Any], asked: list[Any]) -> str | None:
    gone = [value for value in stored[2] if value not in asked[2]]
    return f"{asked[1]} has lost the values {gone}" if gone else None


def _refuse_ref(stored: list[Any], asked: list[Any]) -> str | None:
    # The record that a ref names is compared where it is described. So only the names count here.
    return None if stored[1] == asked[1] else f"{stored[1]} cannot become {asked[1]}"


_COMPARE: dict[str, Callable[[list[Any], list[Any]], str | None]] = {
    "list": _refuse_parts,
    "tuple": _refuse_parts,
    "tuple*": _refuse_parts,
    "union": _refuse_union,
    "dict": _refuse_dict,
    "record": _refuse_fields,
    "row": _refuse_row,
    "enum": _refuse_enum,
    "flags": _refuse_enum,
    "ref": _refuse_ref,
}


def check_evolution(stored: StateSchema, asked: StateSchema) -> None:
    """SchemaError, naming both sides, if the stored state cannot be read as what is asked for."""
    reason = None
    if stored.form != asked.form:
        reason = f"a {stored.form} cannot become a {asked.form}"
    elif stored.key != asked.key:
        keys = key_codec(stored.key).python, key_codec(asked.key).python
        reason = f"{keys[0]} keys cannot become {keys[1]}"
    elif stored.clock and asked.clock and stored.clock != asked.clock:
        reason = f"stamps in {stored.clock} time mean nothing in {asked.clock} time"
    else:
        reason = refusal(stored.type, asked.type)
    if reason is not None:
        error = SchemaError(
            f"state {asked.name!r} is stored as {stored}; asked for was {asked}: {reason}. "
            "Allowed are new fields with a default, removed fields, and int to float. "
            "Ask for what is stored, or use another name."
        )
        error.state = asked.name
        raise error
