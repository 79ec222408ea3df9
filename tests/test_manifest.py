"""Manifests: what is written is read again, and nothing else is."""

import json
import random
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import format_oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from statekit.errors import ArgumentError, CheckpointError, DamagedError
from statekit.format.description import plain_metadata
from statekit.format.manifest import (
    FORMAT_LATEST,
    FORMAT_READABLE,
    FORMAT_WRITABLE,
    NUMBER_MAX,
    Manifest,
    PackRef,
    Segment,
    Segments,
    arrange,
    manifest_name,
    number_of,
)
from statekit.native.digest import crc32c
from statekit.schema import StateSchema, show

SEED = 4
MUTANTS = 10_000
NAME = "dir/000000000009.manifest"
ROW = ["row", "Point", {"y": ["int", True], "x": ["float", False]}]  # not in alphabetical order


def sample(**changes: Any) -> Manifest:
    parts: dict[str, Any] = {
        "number": 9,
        "key_groups": 8,
        "subgroups": 2,
        "owned": (range(2), range(3, 8)),
        "schemas": (
            StateSchema("visits", "value", "s", "int"),
            StateSchema("püncte", "map", "(si)", ["dict", "str", ROW], "event"),
            StateSchema("due", "timers", "i", "none"),
        ),
        "base": 8,
        "compression": "zstd",
        "watermark": -5,
        "metadata": {"note": "ä", "offsets": [1, 2, {"b": None, "a": 1.5}]},
        "packs": (
            PackRef(bytes(range(16)), 64 + 800, 7),
            PackRef(bytes(range(1, 17)), 64 + 80, 9),
            PackRef(bytes(range(2, 18)), 64 + 160, 9),
        ),
        "segments": [
            Segment(0, 0, 64, 400, False),
            Segment(3, 0, 464, 400, False),
            Segment(3, 2, 64, 80, True),
            Segment(3, 2, 144, 80, True),
            Segment(15, 1, 64, 80, False),
        ],
    }
    return Manifest(**{**parts, **changes})


def sealed(data: bytes | bytearray) -> bytes:
    """The data with the right checksum."""
    return bytes(data[:8]) + crc32c(bytes(data[12:])).to_bytes(4, "little") + bytes(data[12:])


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = sample()
    again = Manifest.decode(manifest.encode(), NAME)
    assert again == manifest
    assert again.encode() == manifest.encode()
    assert again.schemas == manifest.schemas
    assert list(again.schemas[1].type[2][2]) == ["y", "x"]  # the order of a NamedTuple's fields
    assert again.bytes == 400 + 400 + 80 + 80 + 80
    assert again.new_bytes == 64 + 80 + 64 + 160


def test_the_oracle_reads_the_same() -> None:
    manifest = sample()
    found = format_oracle.read_manifest("000000000009.manifest", manifest.encode())
    assert found["segments"] == [(*s[:4], int(s.is_delta), 0) for s in manifest.segments]
    assert found["packs"] == list(manifest.packs)
    assert found["states"] == [schema._asdict() for schema in manifest.schemas]
    assert found["key_groups"] == [[0, 2], [3, 8]]
    assert (found["base"], found["watermark"], found["compression"]) == (8, -5, "zstd")
    assert found["metadata"] == manifest.metadata
    assert (found["number"], found["key_group_count"], found["subgroups"]) == (9, 8, 2)


def test_chains_are_found_by_leaf() -> None:
    manifest = Manifest.decode(sample().encode(), NAME)
    assert [(leaf, len(chain)) for leaf, chain in manifest.chains()] == [(0, 1), (3, 3), (15, 1)]
    for leaf in range(17):
        expected = [segment for segment in sample().segments if segment.leaf == leaf]
        assert list(manifest.chain(leaf)) == expected
        assert dict(manifest.chains()).get(leaf, Segments(b"")) == manifest.chain(leaf)


def test_a_manifest_without_anything_is_one() -> None:
    empty = Manifest(number=1, key_groups=1, subgroups=1, owned=())
    again = Manifest.decode(empty.encode(), "000000000001.manifest")
    assert again == empty
    assert list(again.chains()) == []
    assert list(again.chain(0)) == []
    assert (again.bytes, again.new_bytes, again.leaves) == (0, 0, 1)


def test_segments_are_a_sequence() -> None:
    rows = list(sample().segments)
    segments = Segments.of(rows)
    assert list(segments) == rows
    assert [segments[at] for at in range(-5, 5)] == [rows[at] for at in range(-5, 5)]
    for piece in (slice(1, 3), slice(3, 1), slice(None, None, -1), slice(0, 9, 2), slice(-2, None)):
        assert list(segments[piece]) == rows[piece]
    assert list(reversed(segments)) == rows[::-1]
    assert segments == Segments.of(iter(rows))
    assert segments != rows
    with pytest.raises(IndexError):
        segments[5]


def test_arranged_packs_and_segments_do_not_depend_on_the_order_of_writing() -> None:
    manifest = sample()
    packs = [PackRef(bytes(16), 1000, 3), *reversed(manifest.packs)]  # the first is not used
    place = {pack.id: at for at, pack in enumerate(packs)}
    rows = [s._replace(pack=place[manifest.packs[s.pack].id]) for s in manifest.segments]
    rows = rows[4:] + rows[:4]
    refs, segments = arrange(packs, rows)
    by_first_use = (manifest.packs[0], manifest.packs[2], manifest.packs[1])
    assert refs == by_first_use
    again = sample(packs=refs, segments=segments)
    assert Manifest.decode(again.encode(), NAME) == again
    for before, after in zip(manifest.segments, segments, strict=True):
        assert after._replace(pack=0) == before._replace(pack=0)
        assert refs[after.pack] == manifest.packs[before.pack]


def test_names_of_manifests() -> None:
    assert number_of(manifest_name(1)) == 1
    assert number_of(manifest_name(NUMBER_MAX)) == NUMBER_MAX
    for number in (0, -1, NUMBER_MAX + 1):
        with pytest.raises(ArgumentError, match="there is no checkpoint"):
            manifest_name(number)
    for name in ("000000000000.manifest", "1.manifest", "000000000001.manifest.tmp-1", "x", ""):
        assert number_of(name) is None
    assert number_of("٠٠٠٠٠٠٠٠٠٠٠١.manifest") is None


def test_metadata_are_what_json_can_hold() -> None:
    assert plain_metadata({"a": [1, 2], "b": None}) == {"a": [1, 2], "b": None}
    for changed in ({"a": (1, 2)}, {3: None}):  # would come back as something else
        with pytest.raises(ArgumentError, match="read back as something else"):
            plain_metadata(changed)
    assert plain_metadata(None) == {}
    nested: list[Any] = []
    nested.append(nested)
    bad: Any
    for bad in ({"a": float("nan")}, {"a": object()}, {"a": b""}, {"a": nested}, {1: 2}, [], 5):
        with pytest.raises(ArgumentError, match="metadata"):
            plain_metadata(bad)


def test_a_million_segments_are_read_and_written_in_bulk() -> None:
    count = 1 << 20
    size = 64 + 8 * count
    segments = Segments.of(Segment(leaf, 0, 64 + 8 * leaf, 8, False) for leaf in range(count))
    manifest = Manifest(
        number=1, key_groups=1 << 16, subgroups=16, owned=(range(1 << 16),),
        packs=(PackRef(bytes(16), size, 1),), segments=segments,
    )  # fmt: skip
    again = Manifest.decode(manifest.encode(), "000000000001.manifest")
    assert again.segments == segments
    assert again.bytes == 8 * count
    assert list(again.chain(777_777)) == [Segment(777_777, 0, 64 + 8 * 777_777, 8, False)]


# ---- The conditions, one by one


def header(at: int, code: str, value: int) -> Callable[[bytearray], None]:
    return lambda data: struct.pack_into(code, data, at, value)


def field(row: int, at: int, code: str, value: int) -> Callable[[bytearray], None]:
    """Changes one of the rows at the end: 3 packs, then 5 segments."""
    return lambda data: struct.pack_into(code, data, len(data) - 32 * (8 - row) + at, value)


def append(data: bytearray) -> None:
    data += bytes(8)


def twin(data: bytearray) -> None:
    at = len(data) - 32 * 8
    data[at + 32 : at + 48] = data[at : at + 16]


def unowned(data: bytearray) -> None:
    for row in (4, 5, 6):  # the chain of leaf 3
        field(row, 0, "<I", 5)(data)


FAULTS: dict[str, tuple[Callable[[bytearray], None], str]] = {
    "magic": (header(0, "<B", 0), "does not begin"),
    "zero": (header(56, "<Q", 1), "zero"),
    "size": (header(16, "<Q", 1000), "not what its header says"),
    "longer": (append, "not what its header says"),
    "more packs than bytes": (header(40, "<I", 2**32 - 1), "not what its header says"),
    "more segments than bytes": (header(44, "<I", 2**32 - 1), "not what its header says"),
    "more description than bytes": (header(48, "<Q", 2**64 - 1), "not what its header says"),
    "other number": (header(24, "<Q", 8), "under another name"),
    "no number": (header(24, "<Q", 0), "under another name"),
    "key-groups not a power": (header(32, "<I", 7), "no store has"),
    "no key-groups": (header(32, "<I", 0), "no store has"),
    "too many leaves": (header(36, "<I", 1 << 18), "no store has"),
    "pack twice": (twin, "named twice"),
    "pack without frames": (field(0, 16, "<Q", 64), "no pack has"),
    "pack of a crooked size": (field(0, 16, "<Q", 65 + 800), "no pack has"),
    "pack of no checkpoint": (field(0, 24, "<Q", 0), "out of order"),
    "pack of the future": (field(2, 24, "<Q", 10), "out of order"),
    "packs fall": (field(1, 24, "<Q", 6), "out of order"),
    "leaves fall": (field(3, 0, "<I", 4), "ascending"),
    "leaf not owned": (unowned, "not in the key-groups"),
    "leaf beyond": (field(7, 0, "<I", 16), "not in the key-groups"),
    "pack index": (field(7, 4, "<I", 3), "not one of 3"),
    "segment in header": (field(3, 8, "<Q", 56), "header of its pack"),
    "segment at crooked offset": (field(3, 8, "<Q", 68), "multiple of 8"),
    "segment of crooked length": (field(3, 16, "<Q", 396), "multiple of 8"),
    "empty segment": (field(3, 16, "<Q", 0), "is empty"),
    "segment beyond its pack": (field(7, 16, "<Q", 88), "behind the end"),
    "segment that overflows": (field(7, 16, "<Q", 2**64 - 8), "behind the end"),
    "first is a delta": (field(3, 24, "<I", 1), "delta"),
    "other first is a delta": (field(4, 24, "<I", 1), "wrong flag"),
    "second is full": (field(5, 24, "<I", 0), "wrong flag"),
    "unknown flag": (field(5, 24, "<I", 3), "wrong flag"),
    "zero of a segment": (field(5, 28, "<I", 1), "wrong flag"),
    "chain not by age": (field(6, 4, "<I", 0), "age"),
    "chain overlaps": (field(6, 8, "<Q", 136), "age"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_condition_is_checked(fault: str) -> None:
    data = bytearray(sample().encode())
    change, message = FAULTS[fault]
    change(data)
    with pytest.raises(DamagedError, match=message) as caught:
        Manifest.decode(sealed(data), NAME)
    assert caught.value.file == NAME
    assert caught.value.offset is not None
    assert 0 <= caught.value.offset <= len(data)
    assert NAME in str(caught.value)
    assert "at=N" in str(caught.value)


def described(**changes: Any) -> bytes:
    """A manifest with another description."""
    data = sample().encode()
    length = struct.unpack_from("<Q", data, 48)[0]
    found = json.loads(data[64 : 64 + length])
    found.update(changes)
    return with_text(json.dumps({k: v for k, v in found.items() if v is not ...}).encode())


def with_text(text: bytes, padding: bytes = b"\0") -> bytes:
    data = sample().encode()
    length = struct.unpack_from("<Q", data, 48)[0]
    tail = data[64 + length + -length % 8 :]
    out = bytearray(data[:64] + text + padding * (-len(text) % 8) + tail)
    struct.pack_into("<Q", out, 16, len(out))
    struct.pack_into("<Q", out, 48, len(text))
    return sealed(out)


def state(**changes: Any) -> list[dict[str, Any]]:
    found = {"name": "a", "form": "value", "key": "s", "type": "int", "clock": ""}
    found.update(changes)
    return [{k: v for k, v in found.items() if v is not ...}]


def deep(depth: int) -> Any:
    found: Any = "int"
    for _ in range(depth):
        found = ["list", found]
    return found


BAD_DESCRIPTIONS: list[dict[str, Any]] = [
    *({key: ...} for key in ("base", "compression", "key_groups", "metadata", "states")),
    {"watermark": ...},
    {"base": 9},
    {"base": 0},
    {"base": "8"},
    {"base": True},
    {"compression": "gzip"},
    {"compression": ["zstd"]},
    {"watermark": 1.5},
    {"watermark": 2**63},
    {"watermark": False},
    {"metadata": []},
    {"key_groups": {}},
    {"key_groups": [[0]]},
    {"key_groups": [[0, 9]]},
    {"key_groups": [[3, 3]]},
    {"key_groups": [[-1, 3]]},
    {"key_groups": [[3, 8], [0, 2]]},
    {"key_groups": [[0, 4], [3, 8]]},
    {"key_groups": [[0, True]]},
    {"states": {}},
    {"states": ["a"]},
    {"states": state() * 2},
    {"states": state() * 1025},
    *({"states": state(**{part: ...})} for part in ("name", "form", "key", "type")),
    *({"states": state(name=name)} for name in ("", "a\0", "é" * 128, "\ud800", 5, None)),
    *({"states": state(form=form)} for form in ("", "queue", None, ["value"])),
    *({"states": state(key=key)} for key in ("", "x", "()", "(s", "si", None)),
    *({"states": state(clock=clock)} for clock in ("wall", None, 1)),
    {"states": state(form="timers", clock="event")},
    *(
        {"states": state(type=type_)}
        for type_ in (
            "integer", None, 5, [], {}, ["list"], ["list", "int", "int"], ["dict", "str"],
            ["set", "x"], ["tuple*"], ["union"], ["ref"], ["ref", 5], ["record", "R"],
            ["record", "R", []], ["record", "R", {"a": "int"}], ["record", "R", {"a": ["int", 1]}],
            ["enum", "E"], ["enum", "E", {}], [["list"], "int"], [{}, "int"], deep(100),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("changes", BAD_DESCRIPTIONS, ids=lambda changes: str(changes)[:60])
def test_a_description_is_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(DamagedError, match="description"):
        Manifest.decode(described(**changes), NAME)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"{", b"[]", b"5", b"\xff", b"{} ", b'{"base":1,"base":2}', b"[" * 100_000,
        b'{"a":' * 100_000, b"9" * 10_000, b'{"metadata":NaN}', b"\xef\xbb\xbf{}", b"{}\0",
    ],
)  # fmt: skip
def test_a_description_is_json(text: bytes) -> None:
    with pytest.raises(DamagedError, match="description"):
        Manifest.decode(with_text(text), NAME)


def test_what_a_later_version_adds_to_the_description_is_passed_over() -> None:
    states = state(later=[1])
    found = Manifest.decode(described(later={"a": 1}, states=states), NAME)
    assert found.schemas == (StateSchema("a", "value", "s", "int"),)


def test_padding_is_zero() -> None:
    data = sample().encode()
    length = struct.unpack_from("<Q", data, 48)[0]
    text = data[64 : 64 + length] + b" " * (1 - length % 8)  # whitespace behind JSON is JSON
    text += b" " * (3 - len(text) % 8)
    with pytest.raises(DamagedError, match="padding"):
        Manifest.decode(with_text(text, padding=b" "), NAME)


def test_every_form_of_a_state_is_known() -> None:
    for form in ("value", "list", "map", "set", "timers"):
        (schema,) = Manifest.decode(described(states=state(form=form)), NAME).schemas
        assert schema.form == form
        assert schema.kind  # schema.py knows the same forms


def test_constants_of_the_format() -> None:
    assert (FORMAT_READABLE, FORMAT_WRITABLE, FORMAT_LATEST) == (1, 1, 1)


@pytest.mark.parametrize("version", [0, FORMAT_LATEST + 1, 2**32 - 1])
def test_another_version_is_refused_and_not_called_damaged(version: int) -> None:
    data = bytearray(sample().encode())
    struct.pack_into("<I", data, 12, version)
    with pytest.raises(CheckpointError, match="Update statekit") as caught:
        Manifest.decode(sealed(data), NAME)
    assert not isinstance(caught.value, DamagedError)
    with pytest.raises(DamagedError):  # not sealed: a flipped bit, not another version
        Manifest.decode(bytes(data), NAME)


def test_the_name_of_the_file_is_the_number() -> None:
    for name in ("000000000008.manifest", "x.manifest", "", "000000000009.manifest.tmp-1"):
        with pytest.raises(DamagedError, match="under another name"):
            Manifest.decode(sample().encode(), name)


@pytest.mark.parametrize(
    "changes",
    [
        {"base": 9},
        {"owned": (range(9),)},
        {"segments": [Segment(4, 0, 64, 80, False)]},
        {"packs": ()},
        {"schemas": (StateSchema("a", "queue", "s", "int"),)},
        {"key_groups": 3},
    ],
)
def test_what_is_not_valid_is_never_written(changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="not valid"):
        sample(**changes).encode()


# ---- Anything at all


@given(st.binary(max_size=300))
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    for text in (data, b"SKMANIF1" + data):
        with pytest.raises(DamagedError):
            Manifest.decode(text, NAME)


def check_rules(manifest: Manifest) -> None:
    """The conditions once more, written independently."""
    assert manifest.number == 9
    owned = {group for part in manifest.owned for group in part}
    assert all(0 <= group < manifest.key_groups for group in owned)
    assert len(owned) == sum(map(len, manifest.owned))
    assert len({pack.id for pack in manifest.packs}) == len(manifest.packs)
    numbers = [pack.number for pack in manifest.packs]
    assert numbers == sorted(numbers)
    assert all(1 <= number <= 9 for number in numbers)
    before: Segment | None = None
    for segment in manifest.segments:
        assert segment.leaf // manifest.subgroups in owned
        pack = manifest.packs[segment.pack]
        assert 64 <= segment.offset < segment.offset + segment.length <= pack.size
        assert segment.offset % 8 == segment.length % 8 == 0
        follows = before is not None and before.leaf == segment.leaf
        assert segment.is_delta == follows
        if before is not None:
            assert segment.leaf >= before.leaf
            if follows:
                assert pack.number >= manifest.packs[before.pack].number
        before = segment
    for schema in manifest.schemas:
        assert str(schema)
        assert show(schema.type)
    assert Manifest.decode(manifest.encode(), NAME) == manifest


def check_refusal(error: CheckpointError, length: int) -> None:
    if isinstance(error, DamagedError):
        assert error.offset is not None
        assert 0 <= error.offset <= length
    else:
        assert "Update statekit" in str(error)


def mutate(data: bytearray, rng: random.Random) -> None:
    """A few changes of the kinds that find mistakes: bits, bytes, words, pieces moved or cut."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(12, len(data)) if len(data) > 12 else 0
        kind = rng.randrange(6)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice((0, 1, 7, 8, 127, 128, 255, ord('"'), ord("["), ord("9")))
        elif kind == 2:
            word = rng.choice((0, 1, 8, 63, 64, 2**31, 2**32 - 1, 2**63, 2**64 - 8, 2**64 - 1))
            at -= at % 8
            data[at : at + 8] = struct.pack("<Q", word)
        elif kind == 3:
            other = rng.randrange(12, len(data))
            data[at : at + 8] = data[other : other + 8]
        elif kind == 4:
            del data[at : at + rng.choice((1, 8, 32))]
        else:
            data[at:at] = data[at : at + rng.choice((1, 8, 32))]
        if rng.random() < 0.5 and len(data) >= 64:
            struct.pack_into("<Q", data, 16, len(data))


def test_mutants_with_right_checksums_are_refused_or_valid() -> None:
    rng = random.Random(SEED)
    good = 0
    original = sample().encode()
    tracemalloc.start()
    try:
        for _ in range(MUTANTS):
            data = bytearray(original)
            mutate(data, rng)
            try:
                found = Manifest.decode(sealed(data), NAME)
            except CheckpointError as error:
                check_refusal(error, len(data))
            else:
                good += 1
                check_rules(found)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 0 < good < MUTANTS  # if not both happen, the mutants are no good
    assert peak < 4 << 20  # whatever they claim
