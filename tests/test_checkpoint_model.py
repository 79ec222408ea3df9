"""Random lives of a provider, with checkpoints and restores in between, against plain dicts."""

import os
import tempfile
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import statekit as sk

NIGHTLY = bool(os.environ.get("STATEKIT_NIGHTLY"))
KEYS = [f"k{i}" for i in range(24)]
keys = st.sampled_from(KEYS)
numbers = st.integers(-5, 5)
texts = st.text(max_size=3)


class Lives(RuleBasedStateMachine):
    """One provider at a time. It always holds what the dicts hold."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.taken: dict[str, list[dict[str, Any]]] = {"a": [], "b": []}  # by directory
        self.counts: dict[str, int] = {}
        self.lists: dict[str, list[str]] = {}
        self.maps: dict[str, dict[str, int]] = {}
        self.timers: set[tuple[int, str]] = set()

    def place(self, name: str) -> str:
        return os.path.join(self.folder.name, name)

    @initialize(shape=st.sampled_from([(4, 2), (1, 1), (2, 8)]))
    def begin(self, shape: tuple[int, int]) -> None:
        self.use(sk.open("memory:", key_groups=shape[0], subgroups=shape[1]))

    def use(self, kv: sk.KVProvider) -> None:
        self.kv = kv
        kv.value("counts", int)
        kv.list("lists", str)
        kv.map("maps", str, int)
        kv.timers("timers")

    # ---- Changes

    @rule(key=keys, value=numbers)
    def put(self, key: str, value: int) -> None:
        self.kv["counts"][key] = self.counts[key] = value

    @rule(key=keys, amount=numbers)
    def add(self, key: str, amount: int) -> None:
        self.counts[key] = self.counts.get(key, 0) + amount
        assert self.kv["counts"].add(key, amount) == self.counts[key]

    @rule(some=st.lists(st.tuples(keys, numbers), max_size=8))
    def put_many(self, some: list[tuple[str, int]]) -> None:
        self.kv["counts"].put_many([key for key, _ in some], [value for _, value in some])
        self.counts.update(some)

    @rule(key=keys)
    def discard(self, key: str) -> None:
        assert self.kv["counts"].discard(key) == (self.counts.pop(key, None) is not None)

    @rule(key=keys)
    def drop_containers(self, key: str) -> None:
        self.kv["lists"].discard(key)
        self.kv["maps"].discard(key)
        self.lists.pop(key, None)
        self.maps.pop(key, None)

    @rule(key=keys, item=texts)
    def append(self, key: str, item: str) -> None:
        self.kv["lists"][key].append(item)
        self.lists.setdefault(key, []).append(item)

    @rule(key=keys, field=texts, value=numbers)
    def set_field(self, key: str, field: str, value: int) -> None:
        self.kv["maps"][key][field] = value
        self.maps.setdefault(key, {})[field] = value

    @rule(key=keys, due=st.integers(0, 50))
    def set_timer(self, key: str, due: int) -> None:
        self.kv["timers"].set(key, due)
        self.timers.add((due, key))

    @rule(watermark=st.integers(0, 60))
    def fire(self, watermark: int) -> None:
        due = sorted(timer for timer in self.timers if timer[0] <= watermark)
        assert [(t.due, t.key) for t in self.kv["timers"].pop_due(watermark)] == due
        self.timers -= set(due)

    @rule(name=st.sampled_from(["counts", "lists"]))
    def clear(self, name: str) -> None:
        self.kv[name].clear()
        getattr(self, name).clear()

    @rule()
    def split_and_merge(self) -> None:
        half = self.kv.key_group_count // 2
        if half:
            (other,) = self.kv.split([range(half, 2 * half)])
            self.kv.merge(other)
            other.close()

    # ---- Checkpoints

    @rule(
        name=st.sampled_from(["a", "b"]),
        full=st.booleans(),
        compression=st.sampled_from([None, None, "zstd"]),
    )
    def checkpoint(self, name: str, full: bool, compression: str | None) -> None:
        base = None if full else "auto"
        taken = self.kv.checkpoint(self.place(name), base=base, compression=compression)
        self.taken[name].append(self.now())
        assert taken.number == len(self.taken[name])

    def now(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "lists": {key: list(items) for key, items in self.lists.items()},
            "maps": {key: dict(fields) for key, fields in self.maps.items()},
            "timers": set(self.timers),
        }

    @precondition(lambda self: self.taken["a"] or self.taken["b"])
    @rule(data=st.data(), lazy=st.booleans(), regroup=st.sampled_from([None, None, 1, 2, 16, 64]))
    def restore(self, data: Any, lazy: bool, regroup: int | None) -> None:
        name = data.draw(st.sampled_from([name for name, taken in self.taken.items() if taken]))
        at = data.draw(st.integers(1, len(self.taken[name])))
        self.kv.close()
        self.use(sk.restore(self.place(name), at=at, lazy=lazy, regroup=regroup))
        state = self.taken[name][at - 1]
        self.counts = dict(state["counts"])
        self.lists = {key: list(items) for key, items in state["lists"].items()}
        self.maps = {key: dict(fields) for key, fields in state["maps"].items()}
        self.timers = set(state["timers"])

    @precondition(lambda self: self.taken["a"])
    @rule(data=st.data())
    def look_at_an_older_one(self, data: Any) -> None:
        at = data.draw(st.integers(1, len(self.taken["a"])))
        with sk.restore(self.place("a"), at=at) as kv:
            assert dict(kv.value("counts", int).items()) == self.taken["a"][at - 1]["counts"]

    # ---- What must hold

    @rule(key=keys)
    def one_key(self, key: str) -> None:
        assert self.kv["counts"].get(key) == self.counts.get(key)
        assert (key in self.kv["lists"]) == (key in self.lists)
        assert dict(self.kv["maps"][key]) == self.maps.get(key, {})

    @rule()
    def everything(self) -> None:
        assert dict(self.kv["counts"].items()) == self.counts
        assert len(self.kv["counts"]) == len(self.counts)
        assert {key: list(items) for key, items in self.kv["lists"].items()} == self.lists
        assert {key: dict(fields) for key, fields in self.kv["maps"].items()} == self.maps

    @invariant()
    def next_timer(self) -> None:
        if hasattr(self, "kv"):
            assert self.kv["timers"].next_due == min((due for due, _ in self.timers), default=None)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            self.everything()
            self.kv.close()
        self.folder.cleanup()


def test_state_survives_any_sequence_of_changes_checkpoints_and_restores() -> None:
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=3000 if NIGHTLY else 150,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
