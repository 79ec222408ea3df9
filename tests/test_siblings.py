"""Siblings on one home: what one of them gives away, and another takes back, is never lost.

Rows of leaves that went elsewhere are deleted at home; a leaf may have come back by then, to
whichever sibling.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from test_residence import DictHome

import statekit as sk
from statekit.errors import ArgumentError, MemoryLimitError
from statekit.homes import register_home

register_home("testapart", DictHome.open)

KEYS = [f"key-{i}" for i in range(100)]
MODEL = {key: at for at, key in enumerate(KEYS)}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def filled(url: str) -> sk.KVProvider:
    kv = sk.open(url, key_groups=8, subgroups=2)
    kv.value("v", int).put_many(KEYS, range(100))
    return kv


def contents(*providers: sk.KVProvider) -> dict[str, int]:
    found: dict[str, int] = {}
    for kv in providers:
        for key, value in kv.value("v", int).items():
            assert key not in found, f"{key} is in two providers"
            found[key] = value
    return found


def at_home(url: str) -> dict[str, int]:
    with sk.open(url) as kv:
        return contents(kv)


def test_what_a_sibling_merges_back_from_memory_is_not_deleted(
    tmp_path: Path, stack: ExitStack
) -> None:
    url = f"rocksdb:{tmp_path}/db"
    a = filled(url)
    (b,) = a.split([range(4, 8)])
    memory = stack.enter_context(sk.open("memory:", key_groups=8, subgroups=2, owned=()))
    memory.fetch_from(a.serve().address).wait(60)
    b.merge(memory)
    assert contents(b) == MODEL
    b.close()
    a.close()
    assert at_home(url) == MODEL


@pytest.mark.parametrize("by", ["merge", "fetch"])
def test_what_came_back_and_is_split_off_is_not_deleted(
    by: str, tmp_path: Path, stack: ExitStack
) -> None:
    url = f"rocksdb:{tmp_path}/db"
    a = filled(url)
    memory = stack.enter_context(sk.open("memory:", key_groups=8, subgroups=2, owned=()))
    if by == "fetch":
        memory.fetch_from(a.serve().address).wait(60)
    else:
        memory.merge(a)
    a.merge(memory)
    (b,) = a.split([range(3)])
    a.flush()
    assert contents(a, b) == MODEL
    a.close()
    b.close()
    assert at_home(url) == MODEL


def test_what_went_away_for_good_is_deleted_by_whichever_sibling_flushes(
    tmp_path: Path, stack: ExitStack
) -> None:
    url = f"rocksdb:{tmp_path}/db"
    a = filled(url)
    (b,) = a.split([range(4, 8)])
    memory = stack.enter_context(sk.open("memory:", key_groups=8, subgroups=2, owned=()))
    memory.merge(b)
    gone = contents(memory)
    a.close()
    b.close()
    assert {**at_home(url), **gone} == MODEL
    assert not at_home(url).keys() & gone.keys()


def test_a_budget_that_was_split_often_still_holds_an_entry(tmp_path: Path) -> None:
    kv = sk.open(f"rocksdb:{tmp_path}/db?memory=128KiB", key_groups=64, subgroups=2)
    texts = kv.value("t", str)
    texts.update(dict.fromkeys(KEYS, "x" * 5000))
    parts = kv.split([range(i, i + 1) for i in range(64)])
    for key in KEYS:
        owner = kv.owner_of(key)
        assert owner is not None
        owner["t"][key] = "y" * 5_000
        assert owner["t"][key] == "y" * 5_000
        owner["t"][key] = "w" * 60_000  # which the whole budget has room for
        assert owner["t"][key] == "w" * 60_000
        owner["t"][key] = "y" * 5_000
        with pytest.raises(MemoryLimitError):
            owner["t"][key] = "z" * (1 << 20)
    for part in parts:
        kv.merge(part)
        part.close()
    assert dict(texts.items()) == dict.fromkeys(KEYS, "y" * 5000)
    kv.close()


def test_providers_that_opened_one_home_apart_are_not_merged() -> None:
    # Needs a home that two providers can open: it would delete the rows that it was just given.
    name = f"{random.randrange(10**9)}"
    a = sk.open(f"testapart:{name}", key_groups=4, subgroups=1, owned=range(2))
    b = sk.open(f"testapart:{name}", key_groups=4, subgroups=1, owned=range(2, 4))
    for kv in (a, b):
        state = kv.value("v", int)
        for key, value in MODEL.items():
            if kv.key_group_of(key) in kv.key_groups[0]:
                state[key] = value
    with pytest.raises(ArgumentError, match="both providers have the home"):
        a.merge(b)
    assert contents(a, b) == MODEL
    a.close()
    b.close()
    assert at_home(f"testapart:{name}") == MODEL
