"""A function of a key as an operator, on batches of any size. The oracle is a dict and a loop."""

import random
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest

import statekit as sk
from statekit.engine.job import Job
from statekit.engine.on_key import on_key
from statekit.engine.records import Key
from statekit.errors import StatefulOpError
from statekit.spark import Timers

OUTPUT = pa.schema([("user", pa.string()), ("visits", pa.int64()), ("pages", pa.int64())])


def visits(user: str, rows: Any, st: Any) -> Any:
    """The function of docs/spark.md."""
    n = st.count.add(len(rows))
    for row in rows:
        st.pages[row.page].append(row.ms)
    yield user, n, len(st.pages)


def operator_of(make: Any, kv: Any, key: Key) -> Any:
    operator = make()
    operator.key = key
    operator.open(kv)
    return operator


@pytest.mark.parametrize("seed", range(5))
def test_the_function_of_the_spark_guide_runs_here_unchanged(seed: int) -> None:
    rng = random.Random(seed)
    make = on_key(visits, state={"count": int, "pages": dict[str, list[float]]}, output=OUTPUT)
    counts: dict[str, int] = defaultdict(int)
    pages: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with sk.open("memory:") as kv:
        operator = operator_of(make, kv, Key(("user",), str, 128))
        for _ in range(20):
            rows = [
                (f"u{rng.randrange(6)}", f"/{rng.randrange(3)}", rng.random())
                for _ in range(rng.randint(1, 12))
            ]
            for user, page, ms in rows:
                counts[user] += 1
                pages[user][page].append(ms)
            columns = dict(
                zip(("user", "page", "ms"), map(list, zip(*rows, strict=True)), strict=True)
            )
            given = operator.process(pa.record_batch(columns))
            assert {tuple(row.values()) for row in given.to_pylist()} == {
                (user, counts[user], len(pages[user])) for user, _, _ in rows
            }
        found = kv["pages"]
        assert {user: found[user].copy() for user in pages} == pages


def test_timers_fire_in_order_when_time_comes() -> None:
    def remind(key: int, rows: Any, st: Any) -> None:
        for at in rows["at"]:
            st.due.set(at)

    def fired(key: int, timer: Any, st: Any) -> Any:
        return [(key, timer.due)]

    output = pa.schema([("key", pa.int64()), ("due", pa.int64())])
    make = on_key(remind, state={"due": Timers}, output=output, on_timer=fired)
    with sk.open("memory:") as kv:
        operator = operator_of(make, kv, Key(("k",), int, 128))
        assert operator.process(pa.record_batch({"k": [1, 2, 1], "at": [30, 20, 40]})) is None
        assert operator.advance(10) is None
        assert operator.advance(39).to_pylist() == [{"key": 2, "due": 20}, {"key": 1, "due": 30}]
        assert operator.advance(40).to_pylist() == [{"key": 1, "due": 40}]


def test_rows_that_do_not_fit_and_errors_name_the_key() -> None:
    def wrong(key: str, rows: Any, st: Any) -> Any:
        return [(key, "no number", 1)]

    def broken(key: str, rows: Any, st: Any) -> Any:
        raise ZeroDivisionError

    batch = pa.record_batch({"user": ["alice"]})
    with sk.open("memory:") as kv:
        key = Key(("user",), str, 128)
        with pytest.raises(StatefulOpError, match="visits"):
            operator_of(on_key(wrong, state={}, output=OUTPUT), kv, key).process(batch)
        with pytest.raises(ZeroDivisionError) as caught:
            operator_of(on_key(broken, state={}, output=OUTPUT), kv, key).process(batch)
        assert caught.value.__notes__ == ["This was broken of key 'alice'."]


def test_it_is_what_process_takes() -> None:
    job = Job("j").source(lambda a, b, c: iter(())).key_by("user")
    job.process(on_key(visits, state={"count": int}, output=OUTPUT)).sink("unused").check()
