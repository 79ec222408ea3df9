"""Kinds (statekit/kinds.py, csrc/kind.h): the same in Python and in C, told apart by their rows."""

import re
import typing
from pathlib import Path

import pytest

from statekit import Store
from statekit.kinds import KIND_NAMES, KINDS, Kind
from statekit.schema import StateSchema, value_kind

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
HEADER = (CSRC / "statekit.h").read_text()

# Files that ask for a kind though they have no row of their own, and why they may.
ASKING = {
    "statekit.h": "the numbers",
    "kind.c": "the table",
    "batch.c": "loops that are compiled for i64 and f64, where the kind is a constant",
    "node.c": "list, map and nested tell it which root a value must have",
}


def code_of(path: Path) -> str:
    return re.sub(r"/\*.*?\*/|//[^\n]*", " ", path.read_text(), flags=re.DOTALL)


def constants() -> dict[str, int]:
    """The kinds of the header: SK_I64 and so on."""
    (body,) = re.findall(r"typedef enum sk_kind \{(.*?)\}", HEADER, re.DOTALL)
    return {name: int(number) for name, number in re.findall(r"(SK_\w+) = (\d+)", body)}


def sources() -> list[Path]:
    return sorted([*CSRC.glob("*.c"), *CSRC.glob("*.h")])


def test_python_has_the_kinds_of_the_header() -> None:
    assert {f"SK_{name.upper()}": row.number for name, row in KINDS.items()} == constants()
    assert typing.get_args(Kind) == tuple(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_can_be_declared_and_is_found_again(kind: str) -> None:
    with Store() as store:
        state = store.state("s", kind)  # type: ignore[call-overload]
        assert state.kind == kind
        assert store.states() == (state,)


@pytest.mark.parametrize("kind", KINDS)
def test_native_store_and_rows_agree_on_what_expires(kind: str) -> None:
    with Store() as store:
        if KINDS[kind].may_expire:
            store.state("s", kind, timed=True)  # type: ignore[call-overload]
        else:
            with pytest.raises(ValueError, match="do not expire"):
                store.state("s", kind, timed=True)  # type: ignore[call-overload]


@pytest.mark.parametrize("kind", KINDS)
def test_type_of_a_value_state_gives_its_kind(kind: str) -> None:
    row = KINDS[kind]
    assert KIND_NAMES[row.number] == kind
    assert bool(row.code) == bool(row.head)
    if row.type:
        assert StateSchema("s", "value", "s", row.type).kind == kind
        assert value_kind(row.type) == (kind if row.code else "bytes")


def test_no_file_asks_which_kind_a_value_is_of_but_those_of_the_kinds() -> None:
    """So a new kind is a file and a line in the table, and nobody has to look for other places."""
    kinds = "|".join(constants())
    own = {path.name for path in sources() if "const sk_kind_ops sk_" in path.read_text()}
    assert {"number.c", "bytes.c", "container.c", "timers.c"} <= own
    asking = {path.name for path in sources() if re.search(rf"\b({kinds})\b", code_of(path))}
    assert asking - own == {*ASKING}


def test_no_file_compares_the_numbers_of_kinds() -> None:
    for path in sources():
        found = re.findall(r"switch \([^)]*kind\)|\bkind\s*(?:<=?|>=?)(?!>)\s*\w+", code_of(path))
        # These ask only whether there is such a kind.
        allowed = ["kind > 0", "kind < SK_KINDS_MAX"] if path.name == "kind.h" else []
        assert found == allowed, path.name


def test_adding_a_kind_touches_at_most_six_files() -> None:
    """The list in kind.h, which CONTRIBUTING.md repeats, is short and names what there is."""
    listed = re.findall(
        r"^ \*   ((?:csrc|statekit|tests|docs)/\S+)", (CSRC / "kind.h").read_text(), re.M
    )
    assert 0 < len(listed) <= 6
    asked = (ROOT / "CONTRIBUTING.md").read_text().partition("## A new value kind")[2]
    for name in listed:
        assert f"`{name}`" in asked
        assert "<kind>" in name or (ROOT / name).is_file()
