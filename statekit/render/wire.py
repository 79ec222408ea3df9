"""What plain values share: MessagePack in pieces, and the error that knows its path."""

import json
from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple, TypeAlias

import msgpack
import msgspec

from statekit.errors import BadValueError, where
from statekit.schema import StateSchema

Read: TypeAlias = Callable[[Any], Any]  # from what MessagePack has to the plain value
Write: TypeAlias = Callable[[Any], bytes]  # from the plain value to MessagePack

_HEAD_16, _HEAD_32 = Struct(">BH"), Struct(">BI")

pack: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode


class Node(NamedTuple):
    read: Read
    write: Write


class PackedMap(list[tuple[Any, Any]]):
    """A map as MessagePack has it: its keys need not be hashable in Python."""


class MisfitError(Exception):
    """A plain value that is not of its type. Each level on the way out adds its step."""

    def __init__(self, value: Any, expected: str) -> None:
        super().__init__(expected)
        self.value = value
        self.expected = expected
        self.path: list[str] = []

    def at(self, step: str) -> "MisfitError":
        self.path.append(step)
        return self


class NoColumnError(BadValueError):
    """A value that the column of its type cannot hold. Read its type as text."""

    def __init__(self, value: Any, kind: str, why: str) -> None:
        super().__init__(f"{value!r} {why}")
        self.kind = kind  # the type in question: "datetime"

    def told(self, schema: StateSchema) -> None:
        """Adds what reading a value knows: which state this is about, and what to do."""
        self.state = schema.name
        self.args = (
            f"{self.args[0]}{where(schema.name)}. Have every {self.kind} as text: "
            f'text=["{self.kind}"].',
        )


def unpack(data: bytes) -> Any:
    return msgpack.unpackb(
        data, strict_map_key=False, object_pairs_hook=PackedMap, timestamp=3, use_list=True
    )


def _head(short: int, long: int, count: int) -> bytes:
    """The head of a MessagePack array or map."""
    if count < 16:
        return bytes([short | count])
    return _HEAD_16.pack(long, count) if count < 65536 else _HEAD_32.pack(long + 1, count)


def pack_array(items: list[bytes]) -> bytes:
    return _head(0x90, 0xDC, len(items)) + b"".join(items)


def pack_map(pairs: dict[bytes, bytes]) -> bytes:
    return _head(0x80, 0xDE, len(pairs)) + b"".join([key + value for key, value in pairs.items()])


def step(key: Any) -> str:
    return f"[{json.dumps(key, default=str)}]"


def write_at(at: int, write: Write, plain: Any) -> bytes:
    try:
        return write(plain)
    except MisfitError as misfit:
        raise misfit.at(f"[{at}]") from None


def write_items(plain: Any, write: Write, expected: str) -> list[bytes]:
    if not isinstance(plain, list | tuple):
        raise MisfitError(plain, expected)
    return [write_at(at, write, one) for at, one in enumerate(plain)]


def write_field(name: str, write: Write, plain: Any) -> bytes:
    try:
        return write(plain)
    except MisfitError as misfit:
        raise misfit.at(f".{name}") from None
