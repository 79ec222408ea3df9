"""A whole provider, all kinds of states in it, against plain dicts, step by step and on every home.

Homes with a memory budget have a tiny one, and everything clean is evicted now and then, so that
most operations find their entry at home. Splitting shares the key-groups out; every operation is
then sent to the key's owner, as an engine would do it.
"""

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from servers import HOST, RedisServer, redis_server

import statekit as sk
from statekit import KVProvider
from statekit.errors import NotOwnedError, OverflowStateError

I64_MAX = 2**63 - 1
GROUPS = 4


@dataclass
class Click:
    url: str
    at: int
    note: str | None = None


# Few keys, so that operations meet. Long texts fill the budget.
STRS = [f"k{at}" for at in range(8)] + ["", "ключ", "k" * 40]
INTS = [0, 1, -1, I64_MAX, -I64_MAX - 1, *range(100, 106)]
PAIRS = [("a", 1), ("a", 2), ("", -1), ("k" * 30, 7)]
KEYS: dict[str, list[Any]] = {
    "counts": STRS,
    "clicks": INTS,
    "logs": STRS,
    "prefs": PAIRS,
    "deep": [key.encode() for key in STRS],
    "tags": STRS,
}
TEXTS = st.sampled_from(["", "a", "ä", "x" * 50, "y" * 900])
NUMBERS = st.integers(-5, 5) | st.sampled_from([2**40, -(2**40), I64_MAX])
CLICKS = st.builds(Click, TEXTS, NUMBERS, st.none() | TEXTS)
FLOATS = st.sampled_from([0.0, -0.5, 1e300, 2.5])
NAMES = st.sampled_from(["a", "b", "c", "n" * 40])
LISTS = st.lists(NUMBERS, max_size=4) | st.sampled_from([64, 65, 90]).map(lambda n: list(range(n)))
MAPS = st.dictionaries(NAMES, FLOATS, max_size=3) | st.just({str(n): n / 2 for n in range(70)})
DEEP = st.dictionaries(NAMES, LISTS, max_size=3)
SETS = st.sets(NAMES | st.integers(0, 99).map(str), max_size=6)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "counts": NUMBERS, "clicks": CLICKS, "logs": LISTS, "prefs": MAPS, "deep": DEEP, "tags": SETS,
}  # fmt: skip
STATES = st.sampled_from(list(VALUES))
INDEX = st.integers(-4, 4)


def declare(kv: KVProvider) -> None:
    kv.value("counts", int, default=0)
    kv.value("clicks", Click, key=int)
    kv.list("logs", int)
    kv.map("prefs", str, float, key=tuple[str, int])
    kv.state("deep", dict[str, list[int]], key=bytes)
    kv.state("tags", set[str])


def key_of(data: st.DataObject, name: str) -> Any:
    return data.draw(st.sampled_from(KEYS[name]), "key")


def keys_of(data: st.DataObject, name: str) -> list[Any]:
    return data.draw(st.lists(st.sampled_from(KEYS[name]), max_size=12), "keys")


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list | set):
        return type(value)(value)
    return value


class TypedMachine(RuleBasedStateMachine):
    """make_url: a new place for each run. has_home: what is closed can be opened again."""

    def __init__(self, make_url: Callable[[], str], has_home: bool, splits: bool) -> None:
        super().__init__()
        self.url = make_url()
        self.has_home = has_home
        self.splits = splits
        self.model: dict[str, dict[Any, Any]] = {name: {} for name in KEYS}
        self.parts: list[KVProvider] = []
        self.open()

    def open(self) -> None:
        kv = sk.open(self.url, key_groups=GROUPS, subgroups=1)
        declare(kv)
        self.parts = [kv]

    def state(self, name: str, key: Any) -> Any:
        owner = self.parts[0].owner_of(key)
        assert owner in self.parts
        return owner[name]

    def by_owner(self, name: str, keys: list[Any]) -> Iterator[tuple[Any, list[int]]]:
        """Each owner's state, and the positions of its keys."""
        for part in self.parts:
            mine = [at for at, key in enumerate(keys) if part.owner_of(key) is part]
            if mine:
                yield part[name], mine

    # ---- Any state

    @rule(data=st.data(), name=STATES)
    def put(self, data: st.DataObject, name: str) -> None:
        key, value = key_of(data, name), data.draw(VALUES[name], "value")
        self.state(name, key)[key] = value
        self.model[name][key] = copied(value)

    @rule(data=st.data(), name=STATES)
    def read(self, data: st.DataObject, name: str) -> None:
        key = key_of(data, name)
        state, entries = self.state(name, key), self.model[name]
        assert (key in state) == (key in entries)
        found = state.get(key, "missing")
        assert found == entries.get(key, "missing")
        if name in ("logs", "prefs", "deep", "tags"):
            assert len(state[key]) == len(entries.get(key, ()))
            assert list(state[key]) == list(entries.get(key, ())) or name == "tags"

    @rule(data=st.data(), name=STATES)
    def delete(self, data: st.DataObject, name: str) -> None:
        key = key_of(data, name)
        was = self.model[name].pop(key, None)
        assert self.state(name, key).discard(key) == (was is not None)

    @rule(data=st.data(), name=STATES)
    def get_many(self, data: st.DataObject, name: str) -> None:
        keys, entries = keys_of(data, name), self.model[name]
        missing = 0 if name == "counts" else None
        for state, mine in self.by_owner(name, keys):
            batch = [keys[at] for at in mine]
            assert state.get_many(batch).to_list() == [entries.get(key, missing) for key in batch]
            assert state.contains_many(batch) == [key in entries for key in batch]

    @rule(data=st.data(), name=STATES)
    def put_many(self, data: st.DataObject, name: str) -> None:
        keys = keys_of(data, name)
        values = [data.draw(VALUES[name], "value") for _ in keys[:2]]
        column = [values[at % len(values)] for at in range(len(keys))]
        for state, mine in self.by_owner(name, keys):
            state.put_many([keys[at] for at in mine], [column[at] for at in mine])
        self.model[name].update((k, copied(v)) for k, v in zip(keys, column, strict=True))

    @rule(data=st.data(), name=STATES)
    def delete_many(self, data: st.DataObject, name: str) -> None:
        keys, gone = keys_of(data, name), 0
        for state, mine in self.by_owner(name, keys):
            gone += state.delete_many([keys[at] for at in mine])
        assert gone == sum(self.model[name].pop(key, None) is not None for key in keys)

    @rule(name=STATES)
    def clear(self, name: str) -> None:
        for part in self.parts:
            part[name].clear()
        self.model[name] = {}

    # ---- Numbers

    @rule(data=st.data(), amount=NUMBERS)
    def add(self, data: st.DataObject, amount: int) -> None:
        key, entries = key_of(data, "counts"), self.model["counts"]
        state, total = self.state("counts", key), entries.get(key, 0) + amount
        if -I64_MAX - 1 <= total <= I64_MAX:
            assert state.add(key, amount) == total
            entries[key] = total
        else:
            with pytest.raises(OverflowStateError):
                state.add(key, amount)
            assert state.get(key, None) == entries.get(key)

    @rule(data=st.data())
    def add_many(self, data: st.DataObject) -> None:
        keys, entries = keys_of(data, "counts"), self.model["counts"]
        if any(abs(entries.get(key, 0)) > 2**62 for key in keys):
            return
        amounts = np.arange(len(keys)) - 3
        for state, mine in self.by_owner("counts", keys):
            found = state.add_many([keys[at] for at in mine], amounts[mine], returning=True)
            for at, total in zip(mine, found, strict=True):
                entries[keys[at]] = entries.get(keys[at], 0) + int(amounts[at])
                assert total == entries[keys[at]]

    @rule(data=st.data(), op=st.sampled_from(["min", "max", "cas", "pop", "setdefault"]))
    def change_number(self, data: st.DataObject, op: str) -> None:
        key, entries = key_of(data, "counts"), self.model["counts"]
        state, number, now = self.state("counts", key), data.draw(NUMBERS), entries.get(key)
        if op == "min":
            entries[key] = number if now is None else min(now, number)
            assert state.min(key, number) == entries[key]
        elif op == "max":
            entries[key] = number if now is None else max(now, number)
            assert state.max(key, number) == entries[key]
        elif op == "cas":
            expected = data.draw(st.sampled_from([None, now, number]))
            assert state.compare_and_set(key, expected, number) == (now == expected)
            if now == expected:
                entries[key] = number
        elif op == "pop":
            assert state.pop(key, "none") == entries.pop(key, "none")
        else:
            assert state.setdefault(key, number) == entries.setdefault(key, number)

    # ---- Containers in place

    @rule(data=st.data(), op=st.sampled_from(["append", "extend", "pop", "set", "cut", "sort"]))
    def edit_list(self, data: st.DataObject, op: str) -> None:
        key, entries = key_of(data, "logs"), self.model["logs"]
        view, model = self.state("logs", key)[key], entries.get(key, [])
        number, at = data.draw(NUMBERS, "number"), data.draw(INDEX, "at")
        if op == "append":
            view.append(number)
            model.append(number)
        elif op == "extend":
            many = data.draw(LISTS, "many")
            view.extend(many)
            model.extend(many)
        elif op == "sort":
            view.sort(reverse=True)
            model.sort(reverse=True)
        elif op == "cut":
            view[at : at + 2] = [number]
            model[at : at + 2] = [number]
        elif -len(model) <= at < len(model):
            if op == "pop":
                assert view.pop(at) == model.pop(at)
            else:
                view[at] = model[at] = number
        else:
            with pytest.raises(IndexError):
                view.pop(at)
        assert view == model
        if model or key in entries:
            entries[key] = model

    @rule(data=st.data(), op=st.sampled_from(["set", "delete", "update", "pop", "popitem"]))
    def edit_map(self, data: st.DataObject, op: str) -> None:
        key, entries = key_of(data, "prefs"), self.model["prefs"]
        view, model = self.state("prefs", key)[key], entries.get(key, {})
        name = data.draw(NAMES, "name")
        if op == "set":
            view[name] = model[name] = data.draw(FLOATS, "value")
        elif op == "update":
            more = data.draw(MAPS, "more")
            view.update(more)
            model.update(more)
        elif op == "pop":
            assert view.pop(name, None) == model.pop(name, None)
        elif op == "popitem" and model:
            assert view.popitem() == model.popitem()
        elif op == "delete" and name in model:
            del view[name], model[name]
        assert list(view.items()) == list(model.items())
        if model or key in entries:
            entries[key] = model

    @rule(data=st.data(), op=st.sampled_from(["append", "set", "delete", "pop"]))
    def edit_deep(self, data: st.DataObject, op: str) -> None:
        key, entries = key_of(data, "deep"), self.model["deep"]
        view, model = self.state("deep", key)[key], entries.get(key, {})
        name, number = data.draw(NAMES, "name"), data.draw(NUMBERS, "number")
        if op == "append":
            view[name].append(number)
            model.setdefault(name, []).append(number)
        elif op == "set":
            many = data.draw(LISTS, "many")
            view[name] = many
            model[name] = list(many)
        elif op == "delete" and name in model:
            del view[name], model[name]
        elif op == "pop" and model.get(name):
            assert view[name].pop() == model[name].pop()
        assert view.copy() == model
        if model or key in entries:
            entries[key] = model

    @rule(data=st.data(), op=st.sampled_from(["add", "discard", "or", "and", "xor"]))
    def edit_set(self, data: st.DataObject, op: str) -> None:
        key, entries = key_of(data, "tags"), self.model["tags"]
        view, model = self.state("tags", key)[key], entries.get(key, set())
        some = data.draw(SETS, "some")
        if op == "or":
            view |= some
            model |= some
        elif op == "and":
            view &= some
            model &= some
        elif op == "xor":
            view ^= some
            model ^= some
        else:
            for item in some:
                getattr(view, op)(item)
                getattr(model, op)(item)
        assert view == model
        if model or key in entries:
            entries[key] = model

    @rule(data=st.data())
    def append_many(self, data: st.DataObject) -> None:
        keys, entries = keys_of(data, "logs"), self.model["logs"]
        for state, mine in self.by_owner("logs", keys):
            state.append_many([keys[at] for at in mine], mine)
            for at in mine:
                entries.setdefault(keys[at], []).append(at)

    @rule(data=st.data())
    def update_many(self, data: st.DataObject) -> None:
        keys, entries = keys_of(data, "prefs"), self.model["prefs"]
        for state, mine in self.by_owner("prefs", keys):
            names = [f"u{at % 3}" for at in mine]
            state.update_many([keys[at] for at in mine], names, [float(at) for at in mine])
            for at, name in zip(mine, names, strict=True):
                entries.setdefault(keys[at], {})[name] = float(at)

    # ---- Homes

    @precondition(lambda self: self.has_home)
    @rule()
    def flush(self) -> None:
        for part in self.parts:
            part.flush()

    @precondition(lambda self: self.has_home)
    @rule()
    def evict_all(self) -> None:
        for part in self.parts:
            part.flush()
            part._residence._evict(1 << 40)
            assert part._residence.store.stats().entries == 0

    @precondition(lambda self: self.has_home)
    @rule()
    def evict_clean(self) -> None:
        for part in self.parts:
            part._residence._evict(1 << 40)

    @precondition(lambda self: self.has_home)
    @rule()
    def reopen(self) -> None:
        for part in self.parts:
            part.close()
        self.open()

    # ---- Key-groups

    @precondition(lambda self: self.splits and len(self.parts) < 4)
    @rule(data=st.data())
    def split(self, data: st.DataObject) -> None:
        part = data.draw(st.sampled_from(self.parts), "part")
        groups = [group for r in part.key_groups for group in r]
        if groups:
            some = data.draw(st.lists(st.sampled_from(groups), unique=True, min_size=1), "groups")
            self.parts += part.split([some])

    @precondition(lambda self: len(self.parts) > 1)
    @rule(data=st.data())
    def merge(self, data: st.DataObject) -> None:
        giver, taker = data.draw(st.permutations(self.parts), "who")[:2]
        taker.merge(giver)
        self.parts.remove(giver)
        giver.close()

    @precondition(lambda self: len(self.parts) > 1)
    @rule(data=st.data(), name=STATES)
    def ask_the_wrong_one(self, data: st.DataObject, name: str) -> None:
        key = key_of(data, name)
        for part in self.parts:
            if part.owner_of(key) is not part:
                with pytest.raises(NotOwnedError):
                    assert key in part[name]

    # ---- Always

    @rule(name=STATES)
    def scan(self, name: str) -> None:
        found: dict[Any, Any] = {}
        for part in self.parts:
            entries = dict(part[name].items())
            assert not entries.keys() & found.keys()
            assert len(part[name]) == len(entries)
            assert set(part[name].keys()) == set(entries)
            found |= entries
        assert found == self.model[name]

    @invariant()
    def memory_is_within_the_budget(self) -> None:
        for part in self.parts:
            residence = part._residence
            if self.has_home and len(self.parts) == 1:
                assert residence.store.bytes_used <= residence.budget

    @invariant()
    def every_key_group_has_one_owner(self) -> None:
        groups = [group for part in self.parts for r in part.key_groups for group in r]
        assert sorted(groups) == list(range(GROUPS))

    def teardown(self) -> None:
        try:
            for name in self.model:
                self.scan(name)
            if self.has_home:
                self.reopen()
                for name in self.model:
                    self.scan(name)
        finally:
            for part in self.parts:
                part.close()


def run(make_url: Callable[[], str], has_home: bool, splits: bool, examples: int) -> None:
    profile = settings()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: TypedMachine(make_url, has_home, splits),
        settings=settings(
            max_examples=max(1, profile.max_examples * examples // 100), stateful_step_count=40
        ),
    )


def test_memory_is_the_model() -> None:
    run(lambda: "memory:", has_home=False, splits=True, examples=30)


@pytest.fixture
def directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="statekit"))
    yield path
    shutil.rmtree(path)


@pytest.mark.parametrize("splits", [False, True])
def test_rocksdb_is_the_model(splits: bool, directory: Path) -> None:
    def make_url() -> str:
        return f"rocksdb:{directory}/{uuid.uuid4().hex}?memory=128KiB&sync=0"

    run(make_url, has_home=True, splits=splits, examples=10)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as one:
        yield one


def test_redis_is_the_model(server: RedisServer) -> None:
    def make_url() -> str:
        return f"redis://{HOST}:{server.port}/0?memory=128KiB&prefix={uuid.uuid4().hex}"

    run(make_url, has_home=True, splits=True, examples=12)
