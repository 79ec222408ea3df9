"""Timers of a provider, against a plain set of (due, key)."""

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import statekit as sk
from statekit.errors import ArgumentError, KeyTypeError

KEYS = st.sampled_from(["a", "b", "c", "a key that is too long to lie in its slot"])
DUES = st.sampled_from([-(2**63) + 1, -5, 0, 1, 2, 3, 50, 51, 2**63 - 1])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["set", "cancel", "move"]), KEYS, DUES),
        st.tuples(st.just("cancel all"), KEYS, st.just(0)),
        st.tuples(st.sampled_from(["pop", "pop two"]), st.just(""), DUES),
        st.tuples(st.sampled_from(["spill", "reopen", "split"]), st.just(""), st.just(0)),
    ),
    max_size=30,
)


@pytest.mark.parametrize("home", ["memory", "rocksdb"])
@settings(max_examples=60)
@given(steps=STEPS)
def test_timers_fire_in_order_and_once(
    home: str, steps: list[Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("timers")
    url = "memory:" if home == "memory" else f"rocksdb:{path}/db?memory=64KiB"
    kv = sk.open(url)
    timers = kv.timers("timers")
    model: set[tuple[int, str]] = set()
    for op, key, due in steps:
        match op:
            case "set":
                timers.set(key, due)
                model.add((due, key))
            case "cancel":
                assert timers.cancel(key, due) == ((due, key) in model)
                model.discard((due, key))
            case "move":
                timers.move(key, due)
                model = {timer for timer in model if timer[1] != key} | {(due, key)}
            case "cancel all":
                assert timers.cancel(key) == any(timer[1] == key for timer in model)
                model = {timer for timer in model if timer[1] != key}
            case "pop" | "pop two":
                limit = None if op == "pop" else 2
                expected = sorted(timer for timer in model if timer[0] <= due)[:limit]
                assert timers.pop_due(due, limit) == expected
                model.difference_update(expected)
            case "spill":
                kv.flush()
                kv._residence._evict(1 << 40)
            case "reopen" if home == "rocksdb":
                kv.close()
                kv = sk.open(url)
                timers = kv.timers("timers")
            case "split":
                (part,) = kv.split([range(64, 128)])
                found = [timers.next_due, part["timers"].next_due]
                known = [next_due for next_due in found if next_due is not None]
                assert min(known, default=None) == min(model, default=(None,))[0]
                kv.merge(part)
                part.close()
        assert {(due, key) for key in "abc" for due in timers[key]} == {
            timer for timer in model if timer[1] in "abc"
        }
        assert timers.next_due == min(model, default=(None,))[0]
    assert sorted(timers.all()) == sorted(model)
    kv.close()


def test_each_timer_is_given_to_one_of_many_threads() -> None:
    timers = sk.open("memory:").timers("timers", key=int)
    for key in range(2_000):
        timers.set(key, key)
        timers.set(key, key + 1)
    taken: list[sk.Timer] = []
    start = threading.Barrier(4)

    def take(limit: int | None) -> None:
        start.wait()
        for watermark in range(0, 2_100, 50):
            taken.extend(timers.pop_due(watermark, limit))
        while more := timers.pop_due(10_000, limit):
            taken.extend(more)

    threads = [threading.Thread(target=take, args=(limit,)) for limit in (None, None, 7, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [(key, key) for key in range(2_000)] + [(key + 1, key) for key in range(2_000)]
    assert sorted(taken) == sorted(expected)


def test_due_times_may_be_datetimes() -> None:
    timers = sk.open("memory:").timers("timers")
    noon = datetime(2026, 11, 16, 12, tzinfo=UTC)
    timers.set("a", noon)
    assert timers["a"] == (int(noon.timestamp() * 1000),)
    assert timers.pop_due(noon)[0].key == "a"


@pytest.mark.parametrize("bad", [1.5, "soon", None, 2**63, datetime(2026, 11, 16)])
def test_impossible_due_times_are_refused(bad: Any) -> None:
    timers = sk.open("memory:").timers("timers")
    with pytest.raises(ArgumentError, match="due time"):
        timers.set("a", bad)
    with pytest.raises(ArgumentError, match="watermark"):
        timers.pop_due(bad)
    with pytest.raises(KeyTypeError):
        timers.set(7, 1)
    assert list(timers.all()) == []


def test_timers_are_in_sight_after_reopening_without_being_touched(tmp_path: Path) -> None:
    with sk.open(f"rocksdb:{tmp_path}/db") as kv:
        timers = kv.timers("timers")
        for at in range(100):
            timers.set(f"k{at}", at)
    with sk.open(f"rocksdb:{tmp_path}/db") as kv:
        assert [timer.due for timer in kv.timers("timers").pop_due(1_000)] == list(range(100))
    with sk.open(f"rocksdb:{tmp_path}/db") as kv:
        assert kv.timers("timers").pop_due(1_000) == []


def test_current_key_has_timers() -> None:
    kv = sk.open("memory:")
    timers = kv.timers("timers")
    with kv.key("alice"):
        timers.current.set(5)
        timers.current.move(7)
        assert timers.current.get() == (7,)
    assert kv.keyed("alice").timers.cancel(7)
    assert timers["alice"] == ()
