"""Keys: their encoding and routing, against the independent `xxhash` package.

tests/vectors/routing.json is for other languages too. Make it again with
`python tests/test_keys.py`; a test checks that it is what xxhash says.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from statekit import key_hash, leaf_of
from statekit.errors import ArgumentError, KeyTypeError
from statekit.keys import decode_key, encode_key, key_codec, key_type_text

VECTORS = Path(__file__).parent / "vectors" / "routing.json"
SEED = 42
LEAVES = 128 * 16

INT_MIN, INT_MAX = -(2**63), 2**63 - 1

KEYS: list[tuple[str, Any]] = [
    *(
        ("s", text)
        for text in ("", "a", "alice", "user-0000042", "ünïcödé", "ключ", "日本語", "🙂")
    ),
    *(("s", "x" * length) for length in (3, 4, 7, 8, 31, 32, 33, 255, 1000)),
    *(("b", bytes(range(length))) for length in (0, 1, 15, 16, 31, 32, 63, 64, 65, 256)),
    ("b", b"\xff\xfe\x00"),
    *(("i", number) for number in (0, 1, -1, 42, 127, -128, 2**31, -(2**31) - 1, 2**53 + 1)),
    *(("i", number) for number in (INT_MAX, INT_MIN)),
    ("(si)", ("alice", 7)),
    ("(si)", ("", 0)),
    ("(is)", (-1, "ключ")),
    ("(ss)", ("ab", "c")),
    ("(ss)", ("a", "bc")),
    ("(s)", ("alice",)),
    ("(i)", (42,)),
    ("(sbi)", ("日本", b"\x00\xff", INT_MIN)),
    ("(iiiiiiiiiiiiiiii)", tuple(range(16))),
]


def parts_of(key_type: str, key: Any) -> list[tuple[str, Any]]:
    if not key_type.startswith("("):
        return [(key_type, key)]
    return list(zip(key_type.strip("()"), key, strict=True))


def part_bytes(letter: str, part: Any) -> bytes:
    if letter == "i":
        return struct.pack("<q", part)
    return part.encode() if letter == "s" else bytes(part)


def expected_hash(key_type: str, key: Any) -> int:
    seed = SEED
    for letter, part in parts_of(key_type, key):
        seed = xxhash.xxh64_intdigest(part_bytes(letter, part), seed)
    return seed


def make_vectors() -> list[dict[str, Any]]:
    vectors = []
    for key_type, key in KEYS:
        digest = expected_hash(key_type, key)
        parts = [
            part.hex() if letter == "b" else str(part) for letter, part in parts_of(key_type, key)
        ]
        vectors.append(
            {
                "key_type": key_type,
                "parts": parts,  # s: as it is, b: hexadecimal, i: decimal
                "hash": f"{digest:016x}",
                "leaf_of_2048": digest >> 53,
            }
        )
    return vectors


def key_from(vector: dict[str, Any]) -> Any:
    read: dict[str, Callable[[str], Any]] = {"s": str, "b": bytes.fromhex, "i": int}
    letters = vector["key_type"].strip("()")
    key = tuple(read[x](part) for x, part in zip(letters, vector["parts"], strict=True))
    return key if vector["key_type"].startswith("(") else key[0]


def test_vectors_are_what_xxhash_says() -> None:
    assert json.loads(VECTORS.read_text()) == make_vectors()


@pytest.mark.parametrize("at", range(len(KEYS)))
def test_routing_agrees_with_the_vectors(at: int) -> None:
    vector = json.loads(VECTORS.read_text())[at]
    key = key_from(vector)
    assert key_hash(vector["key_type"], key) == int(vector["hash"], 16)
    assert leaf_of(vector["key_type"], key) == vector["leaf_of_2048"]


part_strategies: dict[str, st.SearchStrategy[Any]] = {
    "s": st.text(max_size=80),
    "b": st.binary(max_size=80),
    "i": st.integers(INT_MIN, INT_MAX),
}


@st.composite
def typed_keys(draw: st.DrawFn) -> tuple[str, Any]:
    letters = draw(st.text(alphabet="sbi", min_size=1, max_size=16))
    if len(letters) == 1 and draw(st.booleans()):
        return letters, draw(part_strategies[letters])
    return f"({letters})", tuple(draw(part_strategies[letter]) for letter in letters)


@given(typed_keys())
def test_any_key_is_routed_as_xxhash_says_and_decodes_to_itself(typed: tuple[str, Any]) -> None:
    key_type, key = typed
    assert key_hash(key_type, key) == expected_hash(key_type, key)
    assert decode_key(key_type, encode_key(key_type, key)) == key


@given(st.text(), st.integers(0, 12), st.integers(0, 7))
def test_leaves_are_hash_prefixes_so_regrouping_moves_no_key(key: str, g: int, s: int) -> None:
    leaf = leaf_of(str, key, key_groups=2**g, subgroups=2**s)
    assert 0 <= leaf < 2 ** (g + s)
    if s:
        assert leaf_of(str, key, key_groups=2 ** (g + 1), subgroups=2 ** (s - 1)) == leaf
    assert leaf_of(str, key, key_groups=2**g, subgroups=2 ** (s + 1)) >> 1 == leaf


def test_python_types_and_texts_name_the_same_key_type() -> None:
    assert key_type_text(str) == "s"
    assert key_type_text(bytes) == "b"
    assert key_type_text(int) == "i"
    assert key_type_text(tuple[str, int]) == "(si)"
    assert key_codec(tuple[str, int]).python == "tuple[str, int]"
    assert key_codec("(b)").python == "tuple[bytes]"


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "x",
        "ss",
        "()",
        "(",
        "s)",
        "(sx)",
        float,
        list,
        tuple,
        tuple[float],
        "(" + "i" * 17 + ")",
    ],
)
def test_what_is_no_key_type_is_refused(wrong: Any) -> None:
    with pytest.raises(KeyTypeError, match="is no key type"):
        key_codec(wrong)


@pytest.mark.parametrize(
    ("key_type", "key", "says"),
    [
        (str, 5, "is of type int, not str"),
        (str, b"x", "is of type bytes, not str"),
        (str, "\ud800", "no UTF-8"),
        (bytes, "x", "is of type str, not bytes"),
        (bytes, 5, "is of type int, not bytes"),
        (int, "5", "is of type str, not int"),
        (int, 1.0, "is of type float, not int"),
        (int, 2**63, "64 bits"),
        (int, -(2**63) - 1, "64 bits"),
        (tuple[str, int], ("a",), "does not fit tuple"),
        (tuple[str, int], ("a", 1, 2), "does not fit tuple"),
        (tuple[str, int], (1, "a"), "does not fit tuple"),
        (tuple[str, str], "ab", "is of type str"),
        (tuple[str, str], ["a", "b"], "is of type list"),
    ],
)
def test_a_key_that_does_not_fit_is_refused_with_what_was_expected(
    key_type: Any, key: Any, says: str
) -> None:
    with pytest.raises(KeyTypeError, match=says) as caught:
        encode_key(key_type, key)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("key_type", "data"),
    [("s", b"\xff"), ("i", b"1234567"), ("(s)", b"\x05\x00\x00\x00abc"), ("(i)", b"123456789")],
)
def test_bytes_that_are_no_encoded_key_are_refused(key_type: str, data: bytes) -> None:
    with pytest.raises(KeyTypeError, match="is not an encoded key"):
        decode_key(key_type, data)


@pytest.mark.parametrize(("groups", "subgroups"), [(0, 1), (3, 1), (1, 6), (2**20, 2), (-4, -4)])
def test_leaf_of_refuses_a_geometry_that_no_store_has(groups: int, subgroups: int) -> None:
    with pytest.raises(ArgumentError, match="powers of two"):
        leaf_of(str, "a", key_groups=groups, subgroups=subgroups)


if __name__ == "__main__":
    VECTORS.parent.mkdir(exist_ok=True)
    VECTORS.write_text(json.dumps(make_vectors(), indent=1, ensure_ascii=False) + "\n")
