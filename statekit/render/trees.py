"""Arrow types of declared types, and arrays of what was unpacked (columns.py has the table).

A type is compiled to a tree. Its nodes say what is to be gathered from the encoded values
(native/unpack.py); from what was gathered the tree makes one array, nearly always without a copy.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from statekit.errors import ArgumentError, StateKitError
from statekit.native.unpack import UNFIT, Gathered, Items, Node, Unpacking
from statekit.render.codec import has_column, part_reader
from statekit.render.scalars import DECIMAL_DIGITS, DECIMAL_SCALE, TYPED_COLUMNS
from statekit.render.wire import unpack
from statekit.schema import Type

Array: TypeAlias = Any  # pyarrow has no types


# ---- Types


def check_text(text: Collection[str]) -> frozenset[str]:
    """The types that are to be text. ArgumentError if they cannot be."""
    names = frozenset((text,) if isinstance(text, str) else text)
    if unknown := names - TYPED_COLUMNS.keys():
        raise ArgumentError(
            f"text={sorted(map(str, unknown))!r} is no type that may be text instead of a column "
            f"of its own. These may: {', '.join(TYPED_COLUMNS)}."
        )
    return names


def arrow_type(kind: Type, text: Collection[str] = ()) -> Any:
    """The Arrow type of a column of values of a type."""
    import pyarrow

    def of(part: Type) -> Any:
        return arrow_type(part, text)

    if not has_column(kind) or (isinstance(kind, str) and kind in text):
        return pyarrow.string()
    match kind:
        case ["list" | "set" | "tuple*", item]:
            return pyarrow.list_(of(item))
        case ["dict", key, item]:
            return pyarrow.map_(of(key), of(item))
        case ["tuple", *parts]:
            return pyarrow.struct([(str(at), of(part)) for at, part in enumerate(parts)])
        case ["record" | "row", _, fields]:
            return pyarrow.struct([(name, of(part)) for name, (part, _) in fields.items()])
        case ["union", *parts]:
            return of(next((part for part in parts if part != "none"), "none"))
        case ["enum", _, [first, *_]]:
            return {int: pyarrow.int64(), bool: pyarrow.bool_()}.get(type(first), pyarrow.string())
        case ["flags", _, _]:
            return pyarrow.int64()
        case _:
            return _scalar_type(str(kind))


def _scalar_type(kind: str) -> Any:
    import pyarrow

    scalars = {
        "int": pyarrow.int64(),
        "float": pyarrow.float64(),
        "bool": pyarrow.bool_(),
        "str": pyarrow.string(),
        "bytes": pyarrow.binary(),
        "none": pyarrow.null(),
        "datetime": pyarrow.timestamp("us", "UTC"),
        "date": pyarrow.date32(),
        "time": pyarrow.time64("us"),
        "timedelta": pyarrow.duration("us"),
        "uuid": pyarrow.string(),
        "decimal": pyarrow.decimal128(DECIMAL_DIGITS, DECIMAL_SCALE),
    }
    return scalars[kind]


# ---- Arrays


def _valid(column: Gathered) -> Any:
    import numpy
    import pyarrow

    if not column.nulls:
        return None
    return pyarrow.py_buffer(
        numpy.packbits(numpy.frombuffer(column.valid, "u1"), bitorder="little")
    )


def flat_array(kind: Any, column: Gathered) -> Array:
    """A column of numbers or bytes. Bytes that are no UTF-8 raise: others rely on it."""
    import numpy
    import pyarrow

    buffers = [_valid(column), pyarrow.py_buffer(column.data)]
    match column.op:
        case "nil":
            return pyarrow.nulls(column.rows)
        case "bool":
            bits = numpy.packbits(numpy.frombuffer(column.data, "u1"), bitorder="little")
            buffers[1] = pyarrow.py_buffer(bits)
        case "str" | "bin" | "raw":
            buffers.insert(1, pyarrow.py_buffer(column.offsets))
    found = pyarrow.Array.from_buffers(kind, column.rows, buffers, column.nulls)
    if column.op == "str":
        found.validate(full=True)
    return found


class UnfitError(Exception):
    """A column has a value that is not of its type."""


class Tree:
    """A type, compiled: what to gather of it, and how to make an array of what was gathered."""

    def __init__(
        self,
        node: Node,
        kind: Any,
        below: Sequence["Tree"] = (),
        finish: Callable[[Array], Array] | None = None,
        flat: Any = None,
    ) -> None:
        """kind: the Arrow type. finish: what is to be done with a column of the type `flat`."""
        self.node = node
        self.kind = kind
        self.below = below
        self.finish = finish
        self.flat = kind if flat is None else flat

    def unpacked(self, columns: Iterable[tuple[Items, int, int, Any]]) -> Array | None:
        """The array of encoded values; None if one of them is not of the type.

        columns: each with the items to begin and to stop at, and a byte for each one to skip.
        """
        import pyarrow

        values = Unpacking(self.node)
        try:
            for items, start, stop, skip in columns:
                values.add(items, start, stop, skip)
            return self.array(iter(values.take()))
        except (pyarrow.ArrowException, UnfitError):
            return None
        except StateKitError as error:
            if error.status not in UNFIT:
                raise
            return None

    def array(self, columns: Iterator[Gathered]) -> Array:
        """columns: the gathered ones, in preorder; those of this node and below are used up."""
        import pyarrow

        own = next(columns)
        if self.below:
            children = [tree.array(columns) for tree in self.below]
            buffers = [_valid(own)]
            if own.op in ("list", "map"):
                buffers.append(pyarrow.py_buffer(own.offsets))
            if own.op == "map":
                entry = pyarrow.struct([self.kind.key_field, self.kind.item_field])
                pairs = pyarrow.Array.from_buffers(
                    entry, len(children[0]), [None], children=children
                )
                children = [pairs]
            return pyarrow.Array.from_buffers(
                self.kind, own.rows, buffers, own.nulls, children=children
            )
        found = flat_array(self.flat, own)
        return found if self.finish is None else self.finish(found)


def compile_type(kind: Type, text: Collection[str], is_live: bool) -> Tree:
    """The tree of a type. text: types that are to be text; is_live: see PlainCodec."""
    return _Trees(text).tree(kind, is_live)


class _Trees:
    """Makes the trees of types."""

    def __init__(self, text: Collection[str]) -> None:
        self.text = text

    def tree(self, kind: Type, is_live: bool = False) -> Tree:
        """is_live: this is in the part that is alive in the store, where sets are maps to nil."""
        if not has_column(kind):
            return self._one_by_one(kind, is_live)
        match kind:
            case str():
                return self._scalar(kind)
            case ["list" | "tuple*" as tag, item]:
                return self._nested("list", kind, [self.tree(item, is_live and tag == "list")])
            case ["dict", key, item]:
                return self._nested("map", kind, [self.tree(key), self.tree(item, is_live)])
            case ["tuple", *parts]:
                found = self._nested("array", kind, [self.tree(part) for part in parts])
                found.node = found.node._replace(least=len(parts), most=len(parts))
                return found
            case ["record", _, fields]:
                return self._nested("record", kind, self._fields(fields))
            case ["row", _, fields]:
                found = self._nested("array", kind, self._fields(fields))
                least = sum(needed for _, needed in fields.values())
                found.node = found.node._replace(least=least)
                return found
            case ["union", *parts]:
                found = self.tree(next((part for part in parts if part != "none"), "none"))
                if "none" in parts and found.node.op != "raw":
                    found.node = found.node._replace(is_optional=True)
                    return found
                return self._one_by_one(kind, is_live) if found.node.op == "raw" else found
            case ["enum", _, values]:
                return self._enum(kind, values)
            case ["flags", _, _]:
                return self._scalar("int")
            case _:  # sets, whose members are sorted
                return self._one_by_one(kind, is_live)

    def _nested(self, op: Any, kind: Type, below: list[Tree]) -> Tree:
        node = Node(op, tuple(tree.node for tree in below))
        return Tree(node, arrow_type(kind, self.text), below)

    def _fields(self, fields: dict[str, tuple[Type, bool]]) -> list[Tree]:
        found = []
        for name, (part, needed) in fields.items():
            tree = self.tree(part)
            tree.node = tree.node._replace(name=name, is_required=needed)
            found.append(tree)
        return found

    def _scalar(self, kind: str) -> Tree:
        import pyarrow

        found = arrow_type(kind, self.text)
        if kind == "datetime" and kind in self.text:
            return self._one_by_one(kind, False)
        if kind in ("time", "timedelta") and kind not in self.text:
            return Tree(Node("str"), found, finish=_each(kind), flat=pyarrow.string())
        ops = {"int": "int", "float": "float", "bool": "bool", "bytes": "bin", "none": "nil"}
        op: Any = "moment" if kind == "datetime" else ops.get(kind, "str")
        if op == "str" and found != pyarrow.string():
            return Tree(
                Node("str"), found, finish=lambda texts: texts.cast(found), flat=pyarrow.string()
            )
        return Tree(Node(op), found)

    def _enum(self, kind: Type, values: list[Any]) -> Tree:
        import pyarrow

        found = arrow_type(kind, self.text)
        known = pyarrow.array(values, found)

        def check(column: Array) -> Array:
            import pyarrow.compute

            there = pyarrow.compute.is_in(column.drop_null(), known)
            if not pyarrow.compute.all(there, min_count=0).as_py():
                raise UnfitError
            return column

        ops: dict[type, Any] = {int: "int", bool: "bool"}
        return Tree(Node(ops.get(type(values[0]), "str")), found, finish=check)

    def _one_by_one(self, kind: Type, is_live: bool) -> Tree:
        import pyarrow

        read = part_reader(kind, self.text, is_live)
        found = arrow_type(kind, self.text)

        def convert(column: Array) -> Array:
            try:
                values = [
                    None if item is None else read(unpack(item)) for item in column.to_pylist()
                ]
                return pyarrow.array(values, found)
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise UnfitError from error

        return Tree(Node("raw"), found, finish=convert, flat=pyarrow.binary())


def _each(kind: str) -> Callable[[Array], Array]:
    """Reads a column of texts one by one: pyarrow has no cast to these types."""

    def convert(texts: Array) -> Array:
        import pyarrow

        read = TYPED_COLUMNS[kind]
        try:
            values = [None if text is None else read(text) for text in texts.to_pylist()]
            return pyarrow.array(values, _scalar_type(kind))
        except (ValueError, OverflowError) as error:  # NoColumnError is a ValueError
            raise UnfitError from error

    return convert
