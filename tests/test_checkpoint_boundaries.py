"""Checkpoints at the edges: sizes, geometries, extreme values, crafted keys; a dict as oracle."""

import math
from pathlib import Path
from typing import Any

import pytest
from test_flooding import hashes, key_with_hash

import statekit as sk

INT_MIN, INT_MAX = -(2**63), 2**63 - 1


def passed_through(place: Path, kv: sk.KVProvider, **options: Any) -> sk.KVProvider:
    """A provider restored from a checkpoint of this one."""
    kv.checkpoint(place, **options)
    kv.close()
    return sk.restore(place)


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_keys_and_values_of_every_size_come_back(tmp_path: Path, compression: str | None) -> None:
    kv = sk.open("memory:")
    sizes = (0, 1, 7, 8, 9, 255, 256, 4096, 65535, 65536)
    by_bytes = kv.value("by_bytes", bytes, key=bytes)
    oracle = {bytes([size % 251]) * size: bytes([7]) * size for size in sizes}
    oracle |= {b"large": bytes(range(256)) * 4096 * 5}
    for key, value in oracle.items():
        by_bytes[key] = value
    with passed_through(tmp_path, kv, compression=compression) as back:
        assert dict(back.value("by_bytes", bytes, key=bytes).items()) == oracle


@pytest.mark.parametrize(
    ("key_groups", "subgroups"), [(1, 1), (1, 16), (2, 1), (65536, 1), (65536, 16), (128, 16)]
)
def test_every_geometry_comes_back(tmp_path: Path, key_groups: int, subgroups: int) -> None:
    kv = sk.open("memory:", key_groups=key_groups, subgroups=subgroups)
    oracle = {number: number * 3 for number in range(300)}
    kv.value("counts", int, key=int).put_many(list(oracle), list(oracle.values()))
    kv.checkpoint(tmp_path)
    kv["counts"][7] = oracle[7] = -1
    with passed_through(tmp_path, kv) as back:
        assert (back.key_group_count, back.subgroups) == (key_groups, subgroups)
        assert back.value("counts", int, key=int)[7] == -1
        assert dict(back["counts"].items()) == oracle


def test_a_provider_without_states_entries_or_key_groups_comes_back(tmp_path: Path) -> None:
    for name, owned in (("all", None), ("some", [3]), ("none", [])):
        kv = sk.open("memory:", key_groups=8, subgroups=2, owned=owned)
        with passed_through(tmp_path / name, kv) as back:
            assert dict(back.value("counts", int).items()) == {}
            assert sum(map(len, back.key_groups)) == {"all": 8, "some": 1, "none": 0}[name]
    kv = sk.open("memory:")
    kv.value("empty", int)
    with passed_through(tmp_path / "declared", kv) as back:
        assert list(back.schemas) == ["empty"]


def test_extreme_numbers_and_empty_containers_come_back(tmp_path: Path) -> None:
    kv = sk.open("memory:")
    ints, floats = kv.value("ints", int), kv.value("floats", float)
    for number in (0, -1, 2**31 - 1, 2**31, -(2**31), 2**32, INT_MIN, INT_MAX):
        ints[str(number)] = number
    special = (0.0, -0.0, math.inf, -math.inf, 5e-324, 1.7976931348623157e308, math.nan)
    for at, number in enumerate(special):
        floats[str(at)] = number
    kv.list("lists", str)["empty"] = []
    kv.map("maps", str, int)["empty"] = {}
    kv.state("sets", set[int])["empty"] = set()
    kv.timers("timers").set("k", INT_MAX)
    kv["timers"].set("k", INT_MIN + 1)
    with passed_through(tmp_path, kv) as back:
        assert all(int(key) == value for key, value in back.value("ints", int).items())
        for at, number in enumerate(special):
            found = back.value("floats", float)[str(at)]
            assert found == number or (math.isnan(found) and math.isnan(number))
            assert math.copysign(1, found) == math.copysign(1, number)
        assert "empty" in back.list("lists", str)
        assert back["lists"]["empty"] == []
        assert back.map("maps", str, int)["empty"] == {}
        assert back.state("sets", set[int])["empty"] == set()
        assert back.timers("timers").get("k") == (INT_MIN + 1, INT_MAX)


def test_keys_that_share_hash_bits_come_back(tmp_path: Path) -> None:
    keys = [key_with_hash(hash_) for hash_ in hashes("high bits")]
    kv = sk.open("memory:")
    kv.value("crafted", int, key=int).put_many(keys, keys)
    with passed_through(tmp_path, kv) as back:
        assert dict(back.value("crafted", int, key=int).items()) == {key: key for key in keys}


def test_a_thousand_states_come_back(tmp_path: Path) -> None:
    kv = sk.open("memory:", key_groups=2, subgroups=1)
    for number in range(1000):
        kv.value(f"state-{number}", int)["k"] = number
    with passed_through(tmp_path, kv) as back:
        assert all(back.value(f"state-{n}", int)["k"] == n for n in range(1000))


def test_names_and_metadata_of_every_script_come_back(tmp_path: Path) -> None:
    kv = sk.open("memory:")
    name = "ключ/日本 \t\U0001f600" + "x" * 200
    kv.value(name, str)["é"] = "ü"
    metadata = {"é": ["日本", None, 1.5, {"": []}], "large": "x" * 100_000}
    with passed_through(tmp_path, kv, metadata=metadata) as back:
        assert back.value(name, str)["é"] == "ü"
        assert sk.checkpoints(tmp_path)[0].metadata == metadata
