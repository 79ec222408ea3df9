"""Types written on a command line.

>>> parse_type("dict[str, list[int]]")
['dict', 'str', ['list', 'int']]
>>> parse_type("{name: str, age: float | None}")
['record', 'record', {'name': ['str', True], 'age': [['union', 'float', 'none'], True]}]
>>> parse_type('["list", "int"]')
['list', 'int']
>>> parse_type("tuple[int, ...]"), parse_type("Any")
(['tuple*', 'int'], 'any')
"""

import ast
import json
from typing import Any

from statekit.errors import ArgumentError
from statekit.schema import Type

_NAMES = {
    name: name
    for name in (
        "int", "float", "bool", "str", "bytes", "datetime", "date", "time", "timedelta", "uuid",
        "decimal",
    )
} | {"Any": "any", "any": "any", "None": "none", "UUID": "uuid", "Decimal": "decimal"}  # fmt: skip
_FORMS = {"list": "list", "dict": "map", "set": "set"}
_KEYS = ("str", "bytes", "int")


def parse_type(text: str) -> Type:
    """The type that a text stands for: as Python writes it, or as a schema has it in JSON."""
    try:
        if text.lstrip().startswith("["):
            found: Type = json.loads(text)
            return found
        return _type(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = str(error) if type(error) is ValueError else "it cannot be read"
        raise ArgumentError(
            f"{text!r} is no type: {reason}. Write int, str, list[int], dict[str, float], "
            "set[str], tuple[int, str], {name: str, age: int | None} or the like."
        ) from None


def form_of(kind: Type) -> str:
    """The form of a state of that type by default: the same that KVProvider.state() chooses."""
    return _FORMS.get(kind[0], "value") if isinstance(kind, list) else "value"


def _type(node: ast.expr) -> Type:
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Constant(value=None):
            return "none"
        case ast.BinOp(op=ast.BitOr()):
            return ["union", *_members(node)]
        case ast.Dict(keys=keys, values=values):
            return ["record", "record", dict(map(_field, keys, values))]
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return ["union", _type(inner), "none"]
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _container(name, parts)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not known")


def _members(node: ast.expr) -> list[Type]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_members(node.left), *_members(node.right)]
    return [_type(node)]


def _field(key: ast.expr | None, value: ast.expr) -> tuple[str, list[Any]]:
    match key:
        case ast.Name(id=name) | ast.Constant(value=str(name)):
            return name, [_type(value), True]
        case _:
            raise ValueError("the fields of a record are names")


def _container(name: str, parts: list[ast.expr]) -> Type:
    match name, parts:
        case (("list" | "set"), [item]):
            return [name, _type(item)]
        case "tuple", [item, ast.Constant(value=value)] if value is ...:
            return ["tuple*", _type(item)]
        case "tuple", _:
            return ["tuple", *map(_type, parts)]
        case "dict", [key, item]:
            return ["dict", _map_key(_type(key)), _type(item)]
        case (("list" | "set" | "dict"), _):
            raise ValueError(f"{name} has {2 if name == 'dict' else 1} in its brackets")
        case _:
            raise ValueError(f"{name!r} is not known")


def _map_key(kind: Type) -> Type:
    is_tuple = isinstance(kind, list) and kind[0] == "tuple" and all(p in _KEYS for p in kind[1:])
    if is_tuple or kind == "any" or kind in _KEYS:
        return kind
    raise ValueError("the keys of a dict are str, bytes, int, or tuples of these")
