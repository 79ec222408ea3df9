"""PlainCodec: the functions that read and write the plain values of one type, made once."""

import datetime
import json
from collections.abc import Collection
from struct import Struct
from typing import Any, Literal, TypeAlias

from statekit.errors import BadValueError, CorruptBlockError, KeyTypeError, shorten, where
from statekit.keys import KeyCodec, key_codec
from statekit.kinds import KINDS
from statekit.render.anything import as_object, pairs_of, read_any, write_any
from statekit.render.keys import (
    hex_text,
    key_from_json,
    key_text,
    listed,
    parse_key,
    to_json,
)
from statekit.render.scalars import (
    SCALARS,
    TEXTS,
    TYPED_COLUMNS,
    as_float,
    as_int,
    enum_node,
    expect_list,
    expect_map,
    expect_str,
    read_datetime_text,
    read_float_json,
    text_writer,
    write_bytes,
    write_datetime,
    write_float,
)
from statekit.render.wire import (
    MisfitError,
    NoColumnError,
    Node,
    PackedMap,
    Read,
    pack,
    pack_array,
    pack_map,
    step,
    unpack,
    write_at,
    write_field,
    write_items,
)
from statekit.schema import StateSchema, Type, show

Style: TypeAlias = Literal["json", "columns"]

_I64, _F64 = Struct("<q"), Struct("<d")
_LETTERS = {"str": "s", "bytes": "b", "int": "i"}


class PlainCodec:
    """Turns what a Block gives into plain values of one state, and these into what a store takes.

    text: the types that are text in the style "columns", too (TYPED_COLUMNS says which can be).
    """

    def __init__(
        self, schema: StateSchema, style: Style = "json", *, text: Collection[str] = ()
    ) -> None:
        self.schema = schema
        self.kind = schema.kind
        self.key = key_codec(schema.key)
        node = _Compiler(style, text).node(schema.type, schema.form in ("list", "map", "set"))
        self._read, self._write = node

    def read(self, stored: Any) -> Any:
        """The plain value. stored: an int, a float or bytes, as Block.value_list() has them."""
        if self.kind == "timers":
            return memoryview(stored).cast("q").tolist()
        try:
            if KINDS[self.kind].code:
                return self._read(stored)
            return self._read(unpack(stored))
        except NoColumnError as error:
            error.told(self.schema)
            raise
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise CorruptBlockError(
                f"{shorten(stored)} is not {show(self.schema.type)} ({error})"
                f"{where(self.schema.name)}. Its schema and its values do not agree."
            ) from None

    def write(self, plain: Any) -> bytes:
        """The bytes that State.put_encoded() takes. BadValueError says which part does not fit."""
        try:
            if self.kind == "timers":
                return _write_timers(plain)
            if self.kind == "i64":
                return _I64.pack(as_int(plain))
            if self.kind == "f64":
                return _F64.pack(as_float(plain))
            return self._write(plain)
        except MisfitError as misfit:
            path = "$" + "".join(reversed(misfit.path))
            kind = type(misfit.value).__name__
            article = "an" if kind[0] in "aeiou" else "a"
            got = "null" if misfit.value is None else f"{shorten(misfit.value)}, {article} {kind}"
            error = BadValueError(
                f"the value at {path} is {got}; expected is {misfit.expected}"
                f"{where(self.schema.name)}. "
                "Correct it, or see docs/cli.md for how values are written."
            )
            error.state = self.schema.name
            raise error from None
        except RecursionError:
            raise BadValueError(
                f"the value is nested too deeply{where(self.schema.name)}. Make it flatter."
            ) from None


def part_reader(kind: Type, text: Collection[str], is_live: bool) -> Read:
    """Reads one part of values, in the style "columns", from what MessagePack has."""
    return _Compiler("columns", text).node(kind, is_live).read


# ---- Types, compiled to a pair of functions


class _Compiler:
    """Makes the functions of a type. A record that contains itself is found by its name."""

    def __init__(self, style: Style, text: Collection[str] = ()) -> None:
        self.is_json = style == "json"
        self.text = text
        self.records: dict[str, tuple[str, list[Node]]] = {}

    def node(self, kind: Type, is_live: bool = False) -> Node:
        """is_live: this is in the part that is alive in the store, where sets are maps to nil."""
        if not self.is_json and not has_column(kind):
            return _as_text(_Compiler("json").node(kind, is_live))
        match kind:
            case str():
                return self._scalar(kind)
            case ["list", item]:
                return self._list(self.node(item, is_live), "a list")
            case ["tuple*", item]:
                return self._list(self.node(item), "a list")
            case ["set", item]:
                return self._set(self.node(item), item, is_live)
            case ["dict", "any", item]:
                return self._dict_any(self.node(item, is_live))
            case ["dict", key, item]:
                return self._dict(key, self.node(item, is_live))
            case ["tuple", *parts]:
                return self._tuple([self.node(part) for part in parts])
            case ["record" | "row" as tag, name, fields]:
                cell: list[Node] = []
                before = self.records.get(name)
                self.records[name] = tag, cell
                members = {field: (self.node(part), need) for field, (part, need) in fields.items()}
                cell.append(_record(name, members) if tag == "record" else _row(name, members))
                if before is not None:  # another record of that name, which this one is inside of
                    self.records[name] = before
                return cell[0]
            case ["enum", name, values]:
                return enum_node(name, values)
            case ["flags", _, _]:
                return Node(*SCALARS["int"])
            case ["union", *parts]:
                return self._union(parts)
            case ["ref", name]:
                _, target = self.records[name]
                return Node(lambda value: target[0].read(value), lambda v: target[0].write(v))
            case _:
                raise BadValueError(f"{kind} is no type that this statekit knows. Update statekit.")

    def _scalar(self, kind: str) -> Node:
        if kind == "any":
            return Node(read_any, write_any)
        if kind in TYPED_COLUMNS and not self.is_json and kind not in self.text:
            write = write_datetime if kind == "datetime" else text_writer(kind)
            return Node(TYPED_COLUMNS[kind], write)
        if kind == "datetime":
            return Node(read_datetime_text, write_datetime)
        if kind in TEXTS:
            return Node(expect_str, text_writer(kind))
        if kind == "float" and self.is_json:
            return Node(read_float_json, write_float)
        if kind == "bytes" and self.is_json:
            return Node(hex_text, write_bytes)
        return Node(*SCALARS[kind])

    def _list(self, item: Node, expected: str) -> Node:
        read_item, write_item = item

        def read(value: Any) -> Any:
            return [read_item(one) for one in expect_list(value)]

        def write(plain: Any) -> bytes:
            return pack_array(write_items(plain, write_item, expected))

        return Node(read, write)

    def _set(self, item: Node, kind: Type, is_live: bool) -> Node:
        read_item, write_item = item

        def read(value: Any) -> Any:
            # In the live part a set is a map from its members to nil, elsewhere it is an array.
            members = (
                [one for one, _ in value] if isinstance(value, PackedMap) else expect_list(value)
            )
            found = [read_item(one) for one in members]
            try:
                return sorted(found)
            except TypeError:
                return sorted(found, key=to_json)

        def write_member(plain: Any) -> bytes:
            # Members are found by their bytes, and 0.0 and -0.0 are the same member.
            return write_float(as_float(plain) + 0.0) if kind == "float" else write_item(plain)

        def write(plain: Any) -> bytes:
            members = dict.fromkeys(write_items(plain, write_member, "a list"), b"\xc0")
            return pack_map(members) if is_live else pack_array(list(members))

        return Node(read, write)

    def _dict(self, key: Type, item: Node) -> Node:
        read_item, write_item = item
        letters = _key_letters(key)
        codec = key_codec(letters)
        is_json, is_text = self.is_json, letters == "s"

        def read(value: Any) -> Any:
            pairs = expect_map(value)
            if is_json and is_text:
                return {one: read_item(other) for one, other in pairs}
            if is_json:
                return {key_text(codec, tupled(one)): read_item(other) for one, other in pairs}
            return [(self._column_key(one), read_item(other)) for one, other in pairs]

        def write(plain: Any) -> bytes:
            is_object = isinstance(plain, dict)
            if not is_object and not _are_pairs(plain):  # a column gives pairs
                raise MisfitError(plain, "an object" if is_json else "a list of pairs")
            pairs: dict[bytes, bytes] = {}
            for one, other in plain.items() if is_object else plain:
                packed = _write_map_key(codec, one, is_text=is_object and not is_text)
                if packed in pairs:
                    raise MisfitError(one, "a key that is not there yet").at(step(one))
                try:
                    pairs[packed] = write_item(other)
                except MisfitError as misfit:
                    raise misfit.at(step(one)) from None
            return pack_map(pairs)

        return Node(read, write)

    @staticmethod
    def _column_key(key: Any) -> Any:
        return {str(at): part for at, part in enumerate(key)} if isinstance(key, list) else key

    def _dict_any(self, item: Node) -> Node:
        """Keys of any type: an object if all are text, else {"$map": [[key, value], ...]}."""
        read_item, write_item = item

        def read(value: Any) -> Any:
            return as_object([(one, read_item(other)) for one, other in expect_map(value)])

        def write(plain: Any) -> bytes:
            pairs: dict[bytes, bytes] = {}
            for one, other in pairs_of(plain):
                try:
                    pairs[write_any(one)] = write_item(other)
                except MisfitError as misfit:
                    raise misfit.at(step(one)) from None
            return pack_map(pairs)

        return Node(read, write)

    def _tuple(self, parts: list[Node]) -> Node:
        names = [str(at) for at in range(len(parts))]
        is_json = self.is_json

        def read(value: Any) -> Any:
            items = expect_list(value)
            found = [part.read(one) for part, one in zip(parts, items, strict=True)]
            return found if is_json else dict(zip(names, found, strict=True))

        def write(plain: Any) -> bytes:
            if not is_json and isinstance(plain, dict) and list(plain) == names:
                plain = list(plain.values())
            if not isinstance(plain, list | tuple) or len(plain) != len(parts):
                raise MisfitError(plain, f"a list of {len(parts)}")
            return pack_array(
                [write_at(at, parts[at].write, one) for at, one in enumerate(plain)],
            )

        return Node(read, write)

    def _stored_classes(self, part: Type) -> tuple[type, ...]:
        """What a member of a union is in MessagePack. msgspec allows no two that are alike."""
        match part:
            case ["enum", _, values]:
                return tuple({type(value) for value in values})
            case ["ref", name]:
                return _CLASSES[self.records[name][0]]
            case _:
                return _CLASSES.get(part if isinstance(part, str) else part[0], (str,))

    def _union(self, parts: list[Type]) -> Node:
        others = [part for part in parts if part != "none"]
        if "any" in others:
            return self.node("any")
        nodes = [(self.node(part), self._stored_classes(part)) for part in others]
        is_optional = len(others) < len(parts)
        expected = show(["union", *parts])

        def read(value: Any) -> Any:
            if value is None and is_optional:
                return None
            for node, classes in nodes:
                if value.__class__ in classes:
                    return node.read(value)
            raise ValueError(f"{shorten(value)} is none of {expected}")

        def write(plain: Any) -> bytes:
            if plain is None and is_optional:
                return b"\xc0"
            found: MisfitError | None = None
            for node, _ in nodes:
                try:
                    return node.write(plain)
                except MisfitError as misfit:
                    # The member that got furthest into the value knows best what is wrong.
                    if found is None or len(misfit.path) > len(found.path):
                        found = misfit
            assert found is not None
            raise found if found.path else MisfitError(plain, expected)

        return Node(read, write)


def _are_pairs(plain: Any) -> bool:
    return isinstance(plain, list) and all(isinstance(one, tuple) for one in plain)


def _as_text(node: Node) -> Node:
    """For a type that no column can hold: its values as JSON text."""

    def write_text(plain: Any) -> bytes:
        if not isinstance(plain, str):
            raise MisfitError(plain, "JSON text")
        try:
            value = json.loads(plain)
        except ValueError:
            raise MisfitError(plain, "JSON text") from None
        return node.write(value)

    return Node(lambda value: to_json(node.read(value)), write_text)


def has_column(kind: Type) -> bool:
    """Whether a column can hold a type as it is. Parquet has no unions and no recursive types."""
    match kind:
        case "any" | ["dict", "any", _]:
            return False
        case ["union", *parts]:
            return sum(part != "none" for part in parts) <= 1 and "any" not in parts
        case ["record" | "row", name, fields]:
            return bool(fields) and not _refers_to(fields, name)
        case ["tuple"]:
            return False
        case ["enum", _, values]:
            return {type(value) for value in values} in ({str}, {int}, {bool})
        case _:
            return True


def _refers_to(fields: Any, name: str) -> bool:
    """Whether a record of that name is somewhere inside its own fields."""
    if isinstance(fields, dict):
        return any(_refers_to(part, name) for part, _ in fields.values())
    if isinstance(fields, list) and fields:
        if fields[0] == "ref":
            return bool(fields[1] == name)
        return any(_refers_to(part, name) for part in fields[1:])
    return False


_CLASSES: dict[str, tuple[type, ...]] = {
    "int": (int,), "flags": (int,), "float": (float, int), "bool": (bool,), "bytes": (bytes,),
    "datetime": (datetime.datetime, str), "list": (list,), "tuple": (list,), "tuple*": (list,),
    "set": (list, PackedMap), "row": (list,), "dict": (PackedMap,), "record": (PackedMap,),
}  # fmt: skip


_Members: TypeAlias = dict[str, tuple[Node, bool]]


def _record(name: str, members: _Members) -> Node:
    names = {field: pack(field) for field in members}

    def read(value: Any) -> Any:
        stored = dict(expect_map(value))
        missing = [one for one, (_, need) in members.items() if need and one not in stored]
        if missing:
            raise ValueError(f"field {missing[0]!r} of {name} is missing")
        return {one: node.read(stored[one]) for one, (node, _) in members.items() if one in stored}

    def write(plain: Any) -> bytes:
        _check_fields(name, members, plain)
        return pack_map(
            {
                names[one]: write_field(one, node.write, plain[one])
                for one, (node, need) in members.items()
                if one in plain and not (plain[one] is None and not need and not _takes_none(node))
            }
        )

    return Node(read, write)


def _takes_none(node: Node) -> bool:
    try:
        node.write(None)
    except MisfitError:
        return False
    return True


def _check_fields(name: str, members: _Members, plain: Any) -> None:
    if not isinstance(plain, dict):
        raise MisfitError(plain, f"an object with the fields of {name}: {', '.join(members)}")
    for one, (_, need) in members.items():
        if need and one not in plain:
            raise MisfitError(plain, f"an object with the field {one!r}")
    for one in plain:
        if one not in members:
            raise MisfitError(plain[one], f"no field {one!r}; {name} has {', '.join(members)}").at(
                step(one)
            )


def _row(name: str, members: _Members) -> Node:
    nodes = [node for node, _ in members.values()]
    needed = sum(need for _, need in members.values())

    def read(value: Any) -> Any:
        items = expect_list(value)
        if not needed <= len(items):
            raise ValueError(f"{name} has {needed} fields at least, not {len(items)}")
        return {
            one: node.read(item)
            for (one, (node, _)), item in zip(members.items(), items, strict=False)
        }

    def write(plain: Any) -> bytes:
        if isinstance(plain, list | tuple):
            if not needed <= len(plain) <= len(nodes):
                raise MisfitError(plain, f"a list of the {len(nodes)} fields of {name}")
            return pack_array([write_at(at, nodes[at].write, one) for at, one in enumerate(plain)])
        _check_fields(name, members, plain)
        there = [one for one in members if one in plain]
        while there and plain[there[-1]] is None and not members[there[-1]][1]:
            if _takes_none(members[there[-1]][0]):
                break
            there.pop()  # a column has null for a field that is not stored
        gap = next((one for one, two in zip(members, there, strict=False) if one != two), None)
        if gap is not None:
            raise MisfitError(plain, f"the field {gap!r} too, since {name} is stored by position")
        return pack_array([write_field(one, members[one][0].write, plain[one]) for one in there])

    return Node(read, write)


# ---- Timers


def _write_timers(plain: Any) -> bytes:
    if not isinstance(plain, list | tuple) or not plain:
        raise MisfitError(plain, "a list of due times, in ms, of one at least")
    times = set()
    for at, due in enumerate(plain):
        try:
            times.add(as_int(due))
        except MisfitError as misfit:
            raise misfit.at(f"[{at}]") from None
    return b"".join(map(_I64.pack, sorted(times)))


# ---- Keys


def _key_letters(kind: Type) -> str:
    if isinstance(kind, str):
        return _LETTERS[kind]
    return f"({''.join(_LETTERS[part] for part in kind[1:])})"


def tupled(key: Any) -> Any:
    return tuple(key) if isinstance(key, list) else key


def _write_map_key(codec: KeyCodec, key: Any, *, is_text: bool) -> bytes:
    """A key of a map, packed. is_text: it is the name of a member of a JSON object."""
    try:
        if is_text:
            key = parse_key(codec, key)
        elif isinstance(key, dict):  # a tuple from a column
            key = tuple(key.values())
        else:
            key = key_from_json(codec, listed(key))
    except KeyTypeError:
        raise MisfitError(key, f"a key of type {codec.python}").at(step(key)) from None
    return pack(key)
