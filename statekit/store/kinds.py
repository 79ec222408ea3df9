"""The kinds of state: their names in Python and their numbers in C."""

from typing import Literal, TypeAlias

from statekit._native import lib

Kind: TypeAlias = Literal["i64", "f64", "bytes", "list", "map", "nested"]

KIND_NUMBERS: dict[str, int] = {
    name: getattr(lib, f"SK_{name.upper()}")
    for name in ("i64", "f64", "bytes", "list", "map", "nested")
}
KIND_NAMES: dict[int, str] = {number: name for name, number in KIND_NUMBERS.items()}
