"""The kinds of the native store: what Python must know of each (csrc/kind.h is C's side).

A new kind is a row here. If it has no handle of its own in statekit/native/store.py, it uses the
handle of bytes: encoded values go in and come out, and C checks them.
"""

from typing import Literal, NamedTuple, TypeAlias

from statekit._native import lib

Kind: TypeAlias = Literal["i64", "f64", "bytes", "list", "map", "nested", "timers"]
ContainerKind: TypeAlias = Literal["list", "map", "nested"]
EncodedKind: TypeAlias = Literal["bytes"]  # those with the handle of bytes


class KindRow(NamedTuple):
    number: int  # in C, and in blocks
    type: str = ""  # value states of this type (schema.py) have this kind; all others have bytes
    code: Literal["q", "d", ""] = ""  # of a number: its letter in struct and memoryview
    head: int = 0  # of a number: the MessagePack byte before it in a row of a home
    may_expire: bool = True


KINDS: dict[str, KindRow] = {
    "i64": KindRow(lib.SK_I64, type="int", code="q", head=0xD3),
    "f64": KindRow(lib.SK_F64, type="float", code="d", head=0xCB),
    "bytes": KindRow(lib.SK_BYTES),
    "list": KindRow(lib.SK_LIST),
    "map": KindRow(lib.SK_MAP),
    "nested": KindRow(lib.SK_NESTED),
    "timers": KindRow(lib.SK_TIMERS, may_expire=False),
}

KIND_NAMES: dict[int, str] = {row.number: name for name, row in KINDS.items()}
VALUE_KINDS: dict[str, str] = {row.type: name for name, row in KINDS.items() if row.type}
