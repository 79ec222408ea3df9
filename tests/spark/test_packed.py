"""All states of a key as one value, and the worker that calls a function with them. No Spark."""

import random
from collections import defaultdict
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pytest

import statekit as sk
from statekit.errors import SchemaError, StatefulOpError
from statekit.spark import State, Timers
from statekit.spark.packed import Scratch
from statekit.spark.processor import Outcome, Plan, Worker
from statekit.spark.task import Functions

OUTPUT = pa.schema([("key", pa.string()), ("n", pa.int64())])


@dataclass
class Order:
    id: str
    lines: list[int] = field(default_factory=list)


def scratch(**states: Any) -> Scratch:
    return Scratch({n: s if isinstance(s, State | Timers) else State(s) for n, s in states.items()},
                   "s")  # fmt: skip


def test_a_key_is_packed_and_unpacked_with_all_it_has() -> None:
    kinds: dict[str, Any] = {
        "n": int, "f": float, "text": str, "order": Order, "orders": list[Order], "seen": set[int],
        "deep": dict[str, dict[str, list[float]]], "end": Timers(),
    }  # fmt: skip
    one = scratch(**kinds)
    kv = one.kv
    kv["n"]["a"] = -(2**63)
    kv["f"]["a"] = 0.1
    kv["text"]["a"] = "zoë"
    kv["order"]["a"] = Order("x", [1])
    kv["orders"]["a"].append(Order("y"))
    kv["seen"]["a"].add(5)
    kv["deep"]["a"]["p"]["q"].extend([1.0, 2.5])
    kv["end"].set("a", 7)
    kv["end"].set("a", 3)
    value = one.pack(2)
    assert value is not None
    one.clear("a")
    assert one.pack(None) is None
    two = scratch(**kinds)
    assert two.load("a", value) == 2
    kv = two.kv
    assert (kv["n"]["a"], kv["f"]["a"], kv["text"]["a"]) == (-(2**63), 0.1, "zoë")
    assert kv["order"]["a"] == Order("x", [1])
    assert kv["orders"]["a"].copy() == [Order("y")]
    assert kv["seen"]["a"].copy() == {5}
    assert kv["deep"]["a"].copy() == {"p": {"q": [1.0, 2.5]}}
    assert two.next_due("a") == 3
    assert two.pack(2) == value  # equal states are equal bytes


def test_what_another_version_of_the_program_stored_is_read_or_refused_as_anywhere() -> None:
    old = scratch(n=int, gone=str, values=list[int])
    old.kv["n"]["a"] = 3
    old.kv["gone"]["a"] = "x"
    old.kv["values"]["a"].append(4)
    value = old.pack(None)
    new = scratch(more=int, values=list[float], n=float)
    new.load("a", value)
    assert (new.kv["n"]["a"], new.kv["values"]["a"].copy()) == (3.0, [4.0])
    assert new.kv["more"].get("a") is None
    with pytest.raises(SchemaError, match=r"'n' is stored as .*int.*asked for was .*str"):
        scratch(n=str).load("a", value)


@pytest.mark.parametrize("value", [b"", b"\xff", b"\x93\x01\x02\x03", b"\x94\x02\x90\x90\xc0"])
def test_a_value_that_is_none_is_refused(value: bytes) -> None:
    with pytest.raises(StatefulOpError, match="stored value of key 'a' is none that"):
        scratch(n=int).load("a", value)


def test_a_damaged_value_is_an_error_of_statekit_or_reads_as_something_valid() -> None:
    """Whatever Spark's store gives back, nothing crashes."""
    one = scratch(n=int, deep=dict[str, list[int]], end=Timers())
    one.kv["n"]["a"] = 5
    one.kv["deep"]["a"]["x"].append(1)
    one.kv["end"].set("a", 9)
    value = one.pack(4)
    assert value is not None
    dice = random.Random(3)
    for _ in range(500):
        data = bytearray(value)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        if dice.random() < 0.3:
            del data[dice.randrange(len(data)) :]
        fresh = scratch(n=int, deep=dict[str, list[int]], end=Timers())
        try:
            fresh.load("a", bytes(data))
        except sk.StateKitError:
            continue
        fresh.pack(None)


# ---- The worker


def worker(functions: Functions, **states: Any) -> Worker:
    specs = {n: s if isinstance(s, State | Timers) else State(s) for n, s in states.items()}
    return Worker(Plan(functions, specs, "s", [], OUTPUT, None, "drop", True))


def rows(n: int) -> pa.Table:
    return pa.table({"v": list(range(n))})


class Store:
    """Spark's part: keeps the value of each key, and wakes keys before the watermark."""

    def __init__(self, one: Worker) -> None:
        self.worker = one
        self.values: dict[str, bytes] = {}
        self.wakes: dict[str, int] = {}
        self.output: list[tuple[Any, ...]] = []

    def batch(self, counts: dict[str, int], watermark: int) -> None:
        for key, n in counts.items():
            self._keep(key, self.worker.call(key, rows(n), self.values.get(key), watermark))
        for key, at in sorted(self.wakes.items(), key=lambda item: item[1]):
            if at < watermark:
                self._keep(key, self.worker.call(key, rows(0), self.values.get(key), watermark))

    def _keep(self, key: str, outcome: Outcome) -> None:
        assert outcome.woken == self.wakes.get(key)
        self.output += [tuple(row.values()) for row in outcome.rows.to_pylist()]
        self.wakes.pop(key, None)
        self.values.pop(key, None)
        if outcome.value is not None:
            self.values[key] = outcome.value
            if outcome.wake is not None:
                self.wakes[key] = outcome.wake


def test_timers_fire_at_the_watermark_that_reaches_them_once_and_in_order() -> None:
    fired: list[Any] = []

    def on_key(key: str, rows: Any, st: Any) -> Any:
        st.n.add(len(rows))
        st.end.set(10)
        st.end.set(20)
        yield key, st.n.get()

    def on_timer(key: str, timer: Any, st: Any) -> Any:
        fired.append((key, timer.due, st.n.get(), st.watermark))
        if timer.due == 20:
            st.n.clear()

    store = Store(worker(Functions(on_key=on_key, on_timer=on_timer), n=int, end=Timers()))
    store.batch({"a": 2, "b": 1}, 0)
    store.batch({}, 9)
    assert fired == []
    store.batch({}, 10)
    assert fired == [("a", 10, 2, 10), ("b", 10, 1, 10)]
    store.batch({"a": 1}, 19)  # 10 has passed: it is due in this batch
    assert fired[2:] == [("a", 10, 3, 19)]
    store.batch({"b": 1}, 25)
    assert fired[3:] == [("b", 10, 2, 25), ("b", 20, 2, 25), ("a", 20, 3, 25)]
    assert store.values == {}
    assert store.wakes == {}
    assert store.output == [("a", 2), ("b", 1), ("a", 3), ("b", 2)]


def test_a_timer_that_on_timer_sets_for_the_past_fires_when_the_watermark_moves() -> None:
    fired = []

    def on_timer(key: str, timer: Any, st: Any) -> Any:
        fired.append(st.watermark)
        if len(fired) < 3:
            st.end.set(1)

    functions = Functions(on_key=lambda key, rows, st: st.end.set(5), on_timer=on_timer)
    store = Store(worker(functions, end=Timers()))
    store.batch({"a": 1}, 2)
    for watermark in (5, 5, 6, 7, 7, 8):
        store.batch({}, watermark)
    assert fired == [5, 6, 7]


def test_entries_expire_by_the_watermark_and_the_key_is_forgotten() -> None:
    ttl = sk.TTL(timedelta(milliseconds=10), time="event")

    def on_key(key: str, rows: Any, st: Any) -> Any:
        yield key, st.n.add(len(rows))

    store = Store(worker(Functions(on_key=on_key), n=State(int, ttl=ttl)))
    store.batch({"a": 1}, 100)
    store.batch({"a": 1}, 109)
    store.batch({"a": 1, "b": 1}, 119)  # 109 + 10: it has expired
    assert store.output == [("a", 1), ("a", 2), ("a", 1), ("b", 1)]
    store.batch({}, 128)
    assert set(store.values) == {"a", "b"}
    store.batch({}, 129)
    assert store.values == {}


def test_values_are_independent_of_each_other_at_random() -> None:
    dice = random.Random(11)
    model: dict[str, list[int]] = defaultdict(list)

    def on_key(key: str, rows: Any, st: Any) -> Any:
        for value in rows["v"]:
            st.values.append(value)
            st.counts[str(value)] = st.counts.get(str(value), 0) + 1
        st.total.add(sum(rows["v"]))
        yield key, st.total.get()

    store = Store(worker(Functions(on_key=on_key), values=list[int], counts=dict[str, int],
                         total=int))  # fmt: skip
    for watermark in range(30):
        counts = {f"k{dice.randrange(8)}": dice.randrange(1, 6) for _ in range(3)}
        store.output.clear()
        store.batch(counts, watermark)
        for key, n in counts.items():
            model[key] += range(n)
        assert store.output == [(key, sum(model[key])) for key in counts]
    for key, value in store.values.items():
        fresh = scratch(values=list[int], counts=dict[str, int], total=int)
        fresh.load(key, value)
        assert fresh.kv["values"][key].copy() == model[key]
        assert fresh.kv["counts"][key].copy() == {
            str(v): model[key].count(v) for v in set(model[key])
        }


def test_an_error_of_the_function_leaves_the_worker_as_it_was() -> None:
    def on_key(key: str, rows: Any, st: Any) -> Any:
        st.n.add(1)
        if key == "b":
            raise ZeroDivisionError("of mine")
        yield key, st.n.get()

    one = worker(Functions(on_key=on_key), n=int)
    with pytest.raises(ZeroDivisionError) as caught:
        one.call("b", rows(1), None, 0)
    assert "on_key of key 'b'" in caught.value.__notes__[0]
    assert one.call("b2", rows(1), None, 0).rows.to_pylist() == [{"key": "b2", "n": 1}]
    wrong = worker(Functions(on_key=lambda key, rows, st: [(key, "x")]), n=int)
    with pytest.raises(StatefulOpError, match="column 'n' is 'x', of type str, and not int64"):
        wrong.call("a", rows(1), None, 0)
