"""The oracle of the model tests: what the store's contract says, on plain Python objects.

A state is a dict. A container is a tree of lists, dicts and scalars in which scalars and map keys
are their MessagePack bytes, because 1, 1.0 and True are one key to Python and three to the store.
"""

import math
import struct
from typing import Any

import msgpack

from statekit import Store
from statekit.keys import key_codec
from statekit.native.block import Block

I64_MIN, I64_MAX = -(2**63), 2**63 - 1

# name -> (kind, key type): every kind, and every type of key
SPECS: dict[str, tuple[Any, Any]] = {
    "i64 by str": ("i64", str),
    "i64 by int": ("i64", int),
    "f64 by bytes": ("f64", bytes),
    "bytes by tuple": ("bytes", tuple[str, int]),
    "list by str": ("list", str),
    "map by int": ("map", int),
    "nested by bytes": ("nested", bytes),
    "nested by tuple": ("nested", tuple[int, bytes]),
}
NUMBERS = [name for name, (kind, _) in SPECS.items() if kind in ("i64", "f64")]
CONTAINERS = [name for name, (kind, _) in SPECS.items() if kind in ("list", "map", "nested")]
CODECS = {name: key_codec(key_type) for name, (_, key_type) in SPECS.items()}

Tree = Any  # bytes (a scalar's MessagePack), list of trees, dict of key bytes to trees
Image = dict[str, dict[bytes, bytes]]  # state -> encoded key -> encoded value


# ---- Trees


def tree_of(value: Any) -> Tree:
    """A Python value as a tree."""
    if isinstance(value, list):
        return [tree_of(item) for item in value]
    if isinstance(value, dict):
        return {msgpack.packb(key): tree_of(item) for key, item in value.items()}
    return msgpack.packb(value)


def encode_tree(tree: Tree) -> bytes:
    """The MessagePack of a tree, heads in their shortest form."""
    if isinstance(tree, bytes):
        return tree
    packer = msgpack.Packer()
    if isinstance(tree, list):
        return packer.pack_array_header(len(tree)) + b"".join(map(encode_tree, tree))
    pairs = b"".join(key + encode_tree(item) for key, item in tree.items())
    return packer.pack_map_header(len(tree)) + pairs


def array_body(packed: bytes) -> tuple[int, bytes]:
    """The number of an array's elements, and their bytes one after the other."""
    first = packed[0]
    if first >> 4 == 9:
        return first & 15, packed[1:]
    width = {0xDC: 2, 0xDD: 4}[first]
    return int.from_bytes(packed[1 : 1 + width], "big"), packed[1 + width :]


# ---- Operations on trees, as csrc/statekit.h ("Containers") describes them


class Missing(Exception):
    """There is no such path: the call does nothing, and its answer says so."""


class BadPath(Exception):
    """A step does not fit the container, or the container does not fit the operation."""


class BadValue(Exception):
    """The argument does not fit, or the root would not fit afterwards."""


def _position(step: bytes, length: int) -> int:
    value = msgpack.unpackb(step, strict_map_key=False)
    if isinstance(value, bool) or not isinstance(value, int) or not I64_MIN <= value <= I64_MAX:
        raise BadPath
    at = value + length if value < 0 else value
    if not 0 <= at < length:
        raise Missing
    return at


def _child(tree: Tree, step: bytes) -> Tree:
    if isinstance(tree, list):
        return tree[_position(step, len(tree))]
    if isinstance(tree, dict):
        if step not in tree:
            raise Missing
        return tree[step]
    raise BadPath


def read_tree(tree: Tree | None, path: list[bytes]) -> Tree:
    """What lies at the path."""
    if tree is None:
        raise Missing
    for step in path:
        tree = _child(tree, step)
    return tree


class Edit:
    """One write: see write_tree."""

    def __init__(
        self, op: str, path: list[bytes], shape: str, arg: Tree = b"", i: int = 0, j: int = 0
    ) -> None:
        self.op, self.path, self.shape, self.arg, self.i, self.j = op, path, shape, arg, i, j
        names_last = op in ("set", "delete") and bool(path)
        self.depth = len(path) - names_last
        self.name = path[-1] if names_last else b""
        self.taken: bytes | None = None

    def created(self, level: int) -> Tree:
        """What the shape says to create where nothing is, from this level down."""
        if len(self.shape) <= self.depth or self.op in ("delete", "pop", "take"):
            raise Missing
        steps = [*self.path[level : self.depth], *([self.name] if self.op == "set" else [])]
        for letter, step in zip(self.shape[level:], steps, strict=False):
            if letter == "l":
                _position(step, 0)  # a new list has no element to step to
        is_list = self.shape[self.depth] == "l"
        if self.op == "clear":
            made: Tree = [] if is_list else {}
        elif is_list == (self.op in ("set", "update")):
            raise BadPath
        elif self.op == "set":
            made = {self.name: self.arg}
        else:
            made = [self.arg] if self.op in ("append", "insert") else self.arg
        for step in reversed(self.path[level : self.depth]):
            made = {step: made}
        return made

    def apply(self, tree: Tree, step: int) -> Tree:
        """The tree with the edit made below this step."""
        if step == self.depth:
            if isinstance(tree, bytes):
                raise BadPath
            return self.on_list(tree) if isinstance(tree, list) else self.on_map(tree)
        name = self.path[step]
        try:
            child = _child(tree, name)
        except Missing:
            if isinstance(tree, list):
                raise
            return {**tree, name: self.created(step + 1)}
        child = self.apply(child, step + 1)
        if isinstance(tree, list):
            at = _position(name, len(tree))
            return [*tree[:at], child, *tree[at + 1 :]]
        return {**tree, name: child}

    def on_list(self, tree: list[Any]) -> Tree:
        new = list(tree)
        if self.op == "set":
            new[_position(self.name, len(new))] = self.arg
        elif self.op == "delete":
            del new[_position(self.name, len(new))]
        elif self.op == "append":
            new.append(self.arg)
        elif self.op == "extend":
            new.extend(self.arg)
        elif self.op == "insert":
            new.insert(self.i, self.arg)
        elif self.op == "pop":
            if not -len(new) <= self.i < len(new):
                raise Missing
            self.taken = encode_tree(new.pop(self.i))
        elif self.op == "splice":
            start, stop, _ = slice(self.i, self.j).indices(len(new))
            new[start : max(start, stop)] = self.arg
        elif self.op == "clear":
            new = []
        else:
            raise BadPath
        return new

    def on_map(self, tree: dict[bytes, Any]) -> Tree:
        new = dict(tree)
        if self.op == "set":
            new[self.name] = self.arg
        elif self.op == "update":
            new.update(self.arg)
        elif self.op == "delete":
            if self.name not in new:
                raise Missing
            del new[self.name]
        elif self.op == "take":
            if self.arg not in new:
                raise Missing
            self.taken = encode_tree(new.pop(self.arg))
        elif self.op == "clear":
            new = {}
        else:
            raise BadPath
        return new


def fits_kind(kind: str, tree: Tree) -> bool:
    return kind == "nested" or isinstance(tree, list if kind == "list" else dict)


def write_tree(kind: str, tree: Tree | None, edit: Edit) -> Tree:
    """The value after the edit; tree is None if there is none yet."""
    if edit.op == "update" and not isinstance(edit.arg, dict):
        raise BadValue
    if edit.op in ("extend", "splice") and not isinstance(edit.arg, list):
        raise BadValue
    new = edit.created(0) if tree is None else edit.apply(tree, 0)
    if not fits_kind(kind, new):
        raise BadValue
    return new


# ---- Values and images


def encode_number(kind: str, value: Any) -> bytes:
    """As the store encodes it; all NaNs alike, because adding may change a NaN's bits."""
    if kind == "i64":
        return struct.pack("<q", value)
    return struct.pack("<d", math.nan if math.isnan(value) else value)


def encode_value(kind: str, value: Any) -> bytes:
    if kind in ("i64", "f64"):
        return encode_number(kind, value)
    return value if kind == "bytes" else encode_tree(value)


def image_of_model(model: dict[str, dict[Any, Any]]) -> Image:
    return {
        name: {
            CODECS[name].encode(key): encode_value(SPECS[name][0], value)
            for key, value in entries.items()
        }
        for name, entries in model.items()
    }


def entries_of(blocks: bytes) -> list[tuple[str, bytes, bytes | None]]:
    """(state, encoded key, encoded value or None for a deletion) of all blocks. The blocks are
    checked: sorted, whole, and of states that the store should have."""
    found = []
    for block in Block.each(blocks):
        block.check()
        kind, key_type = SPECS[block.name]
        assert (block.kind, block.codec) == (kind, key_codec(key_type))
        for key, value in block:
            if value is not None and kind in ("i64", "f64"):
                value = encode_number(kind, value)
            found.append((block.name, key, value))
    return found


def apply_blocks(image: Image, blocks: bytes) -> None:
    """Applies blocks to an image: later ones win, deletions delete."""
    for name, key, value in entries_of(blocks):
        if value is None:
            image[name].pop(key, None)
        else:
            image[name][key] = value


def image_of_store(store: Store) -> Image:
    """All that a store has, by encoding every leaf."""
    image: Image = {name: {} for name in SPECS}
    for leaf in range(store.leaves):
        apply_blocks(image, store.encode_leaf(leaf))
    return image


def declare(store: Store) -> dict[str, Any]:
    """The handles of all states."""
    return {name: store.state(name, kind, key_type) for name, (kind, key_type) in SPECS.items()}


class Stranger:
    """An object that cannot be stored. Its repr is the same in every process."""

    def __repr__(self) -> str:
        return "stranger"


STRANGER = Stranger()
