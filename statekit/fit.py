"""Fits: whether a value is of a type, so that what is read is what was written.

A value is *exact* if it comes back from MessagePack as it is: its class is the one that the type
names, and the same holds for its parts, at every depth. An exact value is packed as it stands. Any
other value is *converted* if something exact is equal to it: True becomes 1, a NumPy number becomes
a number, a Counter a dict, a view a copy of what it shows. Everything else is refused, with an
error that names the place where it does not fit: an instance of a subclass of your dataclass would
lose its own fields, a TypedDict its extra keys, a tuple in an Any its class.

An aware datetime is stored as the same moment in UTC; its zone is not kept (docs/states/value.md).

For some types the class of a value does not tell enough. Their values are proved: encoded, and
decoded again to compare (`is_odd`). These are classes whose instances change when they are made,
types with constraints of msgspec, and records that contain records of their own class, which might
be nested too deeply to be read.
"""

import dataclasses
import typing
from collections.abc import Callable, Iterable
from enum import Enum
from operator import attrgetter, itemgetter
from types import MemberDescriptorType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec.msgpack import Decoder

from statekit.errors import shorten
from statekit.exact import (
    ANY_KEY,
    INT_MAX,
    INT_MIN,
    LIVE_ANY_KEY,
    MEMBER_FLOAT,
    SCALARS,
    VALUE_FAULTS,
    Field,
    Fit,
    MisfitError,
    by_class,
    converted,
    is_exact_any,
    is_exact_int,
    pack,
    view_copy,
)
from statekit.schema import Type, annotations, describe, show, unwrapped

Role: TypeAlias = Literal["value", "key", "member"]


def make_fit(hint: Any, role: Role = "value") -> tuple[Fit, bool]:
    """The fit of a type hint that describe() takes, and whether values have to be proved.

    role: the keys of a live map and the members of a live set are found by their bytes. So members
    that are equal must have equal bytes, and -0.0 is 0.0.
    """
    compiler = _Compiler(role == "member")
    fit = compiler.fit(hint)
    if role != "value" and fit.kind == "any":
        fit = LIVE_ANY_KEY
    return fit, compiler.is_odd


class _Item(NamedTuple):
    """A field of a record, or an item of a tuple."""

    step: str  # ".url", "[0]": in a message, and in the source of a function
    get: Callable[[Any], Any]
    fit: Fit


class _Compiler:
    """Makes the fits of a type. A record that contains its own class is found in `records`."""

    def __init__(self, is_member: bool) -> None:
        self.is_member = is_member
        self.is_odd = False
        self.records: dict[Any, list[Fit]] = {}

    def fit(self, hint: Any) -> Fit:
        if any(isinstance(one, msgspec.Meta) for one in annotations(hint)):
            self.is_odd = True  # a constraint, which the decoder checks
        hint = unwrapped(hint)
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin in (typing.Union, UnionType):
            return _union_fit(describe(hint), [self.fit(arg) for arg in args])
        kind = describe(hint)
        if isinstance(kind, str):
            return MEMBER_FLOAT if kind == "float" and self.is_member else SCALARS[kind]
        match kind[0]:
            case "list":
                return _list_fit(kind, self.fit(args[0] if args else Any))
            case "set":
                return _set_fit(kind, self._hashed_fit(args[0] if args else Any))
            case "dict":
                key, item = args or (str, Any)
                return _dict_fit(kind, self._hashed_fit(key), self.fit(item))
            case "tuple*":
                return _tuple_of_any_length_fit(kind, self.fit(args[0]))
            case "tuple":
                fits = map(self.fit, args)
                return _tuple_fit(
                    kind, [_Item(f"[{at}]", itemgetter(at), fit) for at, fit in enumerate(fits)]
                )
            case "enum" | "flags":
                return _literal_fit(kind) if origin is Literal else _enum_fit(kind, hint)
            case _:
                return self._record_fit(kind, hint)

    def _hashed_fit(self, hint: Any) -> Fit:
        """The fit of the keys of a dict or the members of a set."""
        fit = self.fit(hint)
        return ANY_KEY if fit.kind == "any" else fit

    def _record_fit(self, kind: Type, cls: Any) -> Fit:
        if cls in self.records:
            cell = self.records[cls]
            if cell:
                return cell[0]
            self.is_odd = True  # the class is inside itself
            return Fit(kind, lambda value: cell[0].is_exact(value), lambda v: cell[0].convert(v))
        cell = self.records[cls] = []
        hints = typing.get_type_hints(cls, include_extras=True)
        if typing.is_typeddict(cls):
            fit = _typed_dict_fit(kind, cls, {name: self.fit(one) for name, one in hints.items()})
        elif dataclasses.is_dataclass(cls):
            self.is_odd |= _changes_itself(cls)
            names = [field.name for field in dataclasses.fields(cls)]
            fit = _record_fit(kind, cls, self._fields(names, hints), dict)
        else:
            self.is_odd |= cls.__new__ is not _namedtuple_base(cls).__new__
            fit = _record_fit(kind, cls, self._fields(cls._fields, hints), list)
        cell.append(fit)
        return fit

    def _fields(self, names: Iterable[str], hints: dict[str, Any]) -> list[_Item]:
        return [
            _Item(f".{name}", attrgetter(name), self.fit(hints.get(name, Any))) for name in names
        ]


def all_exact(fit: Fit) -> Callable[[Any], bool]:
    """A function that tells whether all items of a container are exact."""
    if fit.classes is not None:
        classes = fit.classes
        return lambda items: set(map(type, items)) <= classes
    if fit.is_exact is is_exact_int:
        return _are_ints
    if fit.is_exact is is_exact_any:
        return lambda items: is_exact_any(list(items))
    if fit is ANY_KEY:
        return lambda items: is_exact_any(dict.fromkeys(items))
    is_exact = fit.is_exact
    return lambda items: all(map(is_exact, items))


_decode_ints = Decoder(list[Annotated[int, msgspec.Meta(ge=INT_MIN, le=INT_MAX)]]).decode


def _are_ints(items: Iterable[Any]) -> bool:
    # Packing and unpacking all items at once is several times as fast as a call for each.
    numbers = items if items.__class__ is list else list(items)
    return bool(_decode_ints(pack(numbers)) == numbers)


def _list_fit(kind: Type, item: Fit) -> Fit:
    are_exact = all_exact(item)

    def convert(value: Any) -> Any:
        items = view_copy(value)
        if not isinstance(items, list):
            raise MisfitError(value, kind)
        return [converted(f"[{at}]", item.convert, one) for at, one in enumerate(items)]

    return Fit(kind, lambda value: value.__class__ is list and are_exact(value), convert)


def _set_fit(kind: Type, item: Fit) -> Fit:
    are_exact = all_exact(item)

    def convert(value: Any) -> Any:
        members = view_copy(value)
        if not isinstance(members, set | frozenset):
            raise MisfitError(value, kind)
        # As a list: dataclasses are converted to dicts, which cannot be members of a set.
        return sorted([converted("", item.convert, one, "a member") for one in members], key=repr)

    return Fit(kind, lambda value: value.__class__ is set and are_exact(value), convert)


def _dict_fit(kind: Type, key: Fit, item: Fit) -> Fit:
    keys_exact, items_exact = all_exact(key), all_exact(item)

    def is_exact(value: Any) -> bool:
        return value.__class__ is dict and keys_exact(value) and items_exact(value.values())

    def convert(value: Any) -> Any:
        entries = view_copy(value)
        if not isinstance(entries, dict):
            raise MisfitError(value, kind)
        return {
            converted("", key.convert, one, "a key"): converted(
                f"[{shorten(one)}]", item.convert, other
            )
            for one, other in entries.items()
        }

    return Fit(kind, is_exact, convert)


def _tuple_of_any_length_fit(kind: Type, item: Fit) -> Fit:
    are_exact = all_exact(item)

    def convert(value: Any) -> Any:
        if not isinstance(value, tuple):
            raise MisfitError(value, kind)
        return tuple(converted(f"[{at}]", item.convert, one) for at, one in enumerate(value))

    return Fit(kind, lambda value: value.__class__ is tuple and are_exact(value), convert)


def _tuple_fit(kind: Type, parts: list[_Item]) -> Fit:
    def convert(value: Any) -> Any:
        if not isinstance(value, tuple):
            raise MisfitError(value, kind)
        if len(value) != len(parts):
            raise MisfitError(value, kind, f"has {len(value)} items, not {len(parts)}")
        return tuple(
            converted(part.step, part.fit.convert, one)
            for part, one in zip(parts, value, strict=True)
        )

    return _compiled(kind, tuple, parts, convert, f"len(value) == {len(parts)}")


def _record_fit(kind: Type, cls: Any, fields: list[_Item], form: Any) -> Fit:
    """The fit of a dataclass or NamedTuple.

    Only instances of this very class fit: a subclass may have more fields.
    """

    def convert(value: Any) -> Any:
        if value.__class__ is not cls:
            raise _other_class(value, kind, cls)
        found = {}
        for step, get, fit in fields:
            try:
                part = get(value)
            except AttributeError:
                raise MisfitError(
                    value, kind, f"has nothing in its field {step[1:]!r}", "Set it first."
                ) from None
            found[step[1:]] = converted(step, fit.convert, part)
        return found if form is dict else list(found.values())

    return _compiled(kind, cls, fields, convert)


def _other_class(value: Any, kind: Type, cls: type) -> MisfitError:
    if not isinstance(value, cls):
        return MisfitError(value, kind)
    name = type(value).__name__
    return MisfitError(
        value,
        kind,
        f"is of the subclass {name} of {show(kind)}, and would come back as {show(kind)}",
        f"Declare the state with {name}, or pass a value of type {show(kind)}.",
    )


def _compiled(
    kind: Type, cls: type, parts: list[_Item], convert: Callable[[Any], Any], also: str = ""
) -> Fit:
    """Writes the test's source and compiles it: several times as fast as a loop over the parts.

    For a dataclass with `url: str`, `at: int` and `tags: list[str]` it is

        value.__class__ is cls and value.url.__class__ is c0 and value.at.__class__ is int and
        -2**63 <= value.at <= 2**63 - 1 and f2(value.tags)
    """
    tests = ["value.__class__ is cls", also] if also else ["value.__class__ is cls"]
    scope: dict[str, Any] = {"cls": cls}
    for at, (step, _, fit) in enumerate(parts):
        part = f"value{step}"  # names of fields are identifiers
        if fit.is_exact is is_exact_int:
            tests += [f"{part}.__class__ is int", f"{INT_MIN} <= {part} <= {INT_MAX}"]
        elif fit.classes is not None and len(fit.classes) == 1:
            (scope[f"c{at}"],) = fit.classes
            tests.append(f"{part}.__class__ is c{at}")
        else:
            scope[f"f{at}"] = fit.is_exact
            tests.append(f"f{at}({part})")
    fit = _written(kind, " and ".join(tests), scope, convert)
    if also:
        return fit  # a tuple: it has items, not fields
    return fit._replace(record=(cls, tuple(_field(step, part) for step, _, part in parts)))


def _field(step: str, fit: Fit) -> Field:
    if fit.is_exact is is_exact_int:
        return step[1:], int, None
    if fit.classes is not None and len(fit.classes) == 1:
        return step[1:], next(iter(fit.classes)), None
    return step[1:], None, fit.is_exact


def _written(kind: Type, test: str, scope: dict[str, Any], convert: Callable[[Any], Any]) -> Fit:
    names = {**scope}
    exec(f"def is_exact(value): return {test}", names)
    return Fit(kind, names["is_exact"], convert, source=(test, scope))


def _typed_dict_fit(kind: Type, cls: Any, fields: dict[str, Fit]) -> Fit:
    required: frozenset[str] = cls.__required_keys__
    tests = {name: fit.is_exact for name, fit in fields.items()}

    def is_exact(value: Any) -> bool:
        if value.__class__ is not dict or not required <= value.keys() <= tests.keys():
            return False
        return all(tests[name](one) for name, one in value.items())

    def convert(value: Any) -> Any:
        entries = view_copy(value)
        if not isinstance(entries, dict):
            raise MisfitError(value, kind)
        if extra := [name for name in entries if name not in fields]:
            raise MisfitError(
                value,
                kind,
                f"has the key {shorten(extra[0])}, which {show(kind)} does not have",
                f"Leave it out, or add it to {show(kind)}.",
            )
        if missing := sorted(required - entries.keys()):
            raise MisfitError(
                value, kind, f"lacks the key {missing[0]!r} of {show(kind)}", "Add it."
            )
        return {
            name: converted(f"[{name!r}]", fields[name].convert, one)
            for name, one in entries.items()
        }

    return Fit(kind, is_exact, convert)


def _enum_fit(kind: Type, cls: type[Enum]) -> Fit:
    def convert(value: Any) -> Any:
        if value.__class__ is not cls:
            raise MisfitError(value, kind, advice=f"Pass a member of {cls.__name__}.")
        return value

    return by_class(kind, convert, cls)


def _literal_fit(kind: Type) -> Fit:
    values = {(type(one), one) for one in kind[2]}

    def is_exact(value: Any) -> bool:
        return (value.__class__, value) in values

    def convert(value: Any) -> Any:
        for cls, one in values:
            if value.__class__ is cls and value == one:
                return value
            if isinstance(value, cls) and value == one and not isinstance(value, bool):
                return one  # a subclass of str or int
        raise MisfitError(value, kind, f"is none of {show(kind)}")

    return Fit(kind, is_exact, convert)


def _union_fit(kind: Type, members: list[Fit]) -> Fit:
    if any(member.kind == "any" for member in members):
        return SCALARS["any"]

    def convert(value: Any) -> Any:
        found: MisfitError | None = None
        for member in sorted(members, key=lambda one: not _is_exact(one, value)):
            try:
                return member.convert(value)
            except MisfitError as misfit:
                # The member that got furthest into the value knows best what is wrong.
                if found is None or (len(misfit.path), bool(misfit.why)) > (
                    len(found.path), bool(found.why)
                ):  # fmt: skip
                    found = misfit
        assert found is not None
        raise found if found.path or found.why else MisfitError(value, kind)

    classes = [member.classes for member in members]
    if None not in classes:
        return by_class(kind, convert, *frozenset().union(*filter(None, classes)))
    scope = {f"f{at}": member.is_exact for at, member in enumerate(members)}
    return _written(kind, " or ".join(f"{name}(value)" for name in scope), scope, convert)


def _is_exact(fit: Fit, value: Any) -> bool:
    try:
        return fit.is_exact(value)
    except VALUE_FAULTS:
        return False


def _changes_itself(cls: Any) -> bool:
    """Whether an instance of a dataclass, made anew from its fields, may differ from the first."""
    if hasattr(cls, "__post_init__") or cls.__new__ is not object.__new__:
        return True
    if cls.__setattr__ is not object.__setattr__ and not cls.__dataclass_params__.frozen:
        return True
    attributes = (getattr(cls, field.name, None) for field in dataclasses.fields(cls))
    return any(
        hasattr(type(one), "__set__") and not isinstance(one, MemberDescriptorType)
        for one in attributes
    )


def _namedtuple_base(cls: Any) -> Any:
    """The class that NamedTuple made, whose __new__ takes the fields as they are."""
    return next(one for one in reversed(cls.__mro__) if hasattr(one, "_fields"))
