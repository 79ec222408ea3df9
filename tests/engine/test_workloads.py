"""Workloads: in real jobs that are scaled while they run, and their oracles, which notice what is
wrong.
"""

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from statekit.engine.running import start
from statekit.engine.sink import read_results
from statekit.engine.strategies import RESTART, STRATEGIES
from statekit.engine.workloads import WORKLOADS, workload
from statekit.engine.workloads.draws import Ranks, below, mixed, uniform
from statekit.errors import ArgumentError, EngineError

TIMEOUT_S = 300
SMALL: dict[str, dict[str, Any]] = {
    "key_count": {"rate": 5_000, "keys": 2_000, "zipf": 1.0, "is_filled": True},
    "word_count": {"sources": 1, "rate": 400, "rows": 20, "vocabulary": 500},
    "server_count": {"sources": 1, "rate": 2_000, "servers": 50, "users": 2_000},
    "windowed_sum": {"sources": 1, "rate": 2_000, "keys": 50, "size_ms": 500, "slide_ms": 200},
}


def toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def write_job(folder: Path, name: str, parameters: dict[str, Any], settings: str = "") -> Path:
    lines = [f'job = "statekit.engine.workloads:{name}"', "[parameters]"]
    lines += [f"{key} = {toml(value)}" for key, value in parameters.items()]
    path = folder / "job.toml"
    path.write_text("\n".join([*lines, f"folder = '{folder / 'results'}'", settings]))
    return path


def run(
    folder: Path, name: str, parameters: dict[str, Any], settings: str = "", workers: Any = (3,)
) -> Any:
    """Scales a workload while it runs, and checks it: itself, its results, how many events."""
    parameters = {**parameters, "records": 1 << 40}
    work = workload(name, **parameters)
    results = folder / "results"
    with start(str(write_job(folder, name, parameters, settings)), folder / "job") as job:
        for number in workers:
            job.scale(work.stage, number)
            job.checkpoint()
        work.end(results)
        job.wait(TIMEOUT_S)
    assert work.check(results) > 0
    records = work.timetable(results).records(work.records)
    return work, pa.Table.from_batches(read_results(results)), records


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_exact_though_it_is_scaled_and_its_oracle_sees_faults(
    name: str, tmp_path: Path
) -> None:
    work, results, records = run(tmp_path, name, SMALL[name])
    if "due" in results.schema.names:
        assert (results["arrived"].to_numpy() >= results["due"].to_numpy()).all()
    at = results.num_rows // 2
    assert work.wrong(results.slice(1), records), "a record is lost"
    assert work.wrong(pa.concat_tables([results, results.slice(at, 1)]), records), (
        "one is counted twice"
    )
    for column in results.schema.names:
        if column in ("due", "arrived"):
            continue
        values = results[column].to_pylist()
        was = values[at]
        values[at] = f"{was}x" if isinstance(was, str) else not was if was is False else was + 1
        spoilt = results.set_column(results.schema.names.index(column), column, pa.array(values))
        spoilt = spoilt.cast(results.schema)
        assert work.wrong(spoilt, records), f"{column} is wrong"


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", [*STRATEGIES, RESTART])
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_exact_with_every_strategy_out_in_and_overlapping(
    name: str, strategy: str, tmp_path: Path
) -> None:
    parameters = {**SMALL[name], "records": 1 << 40}
    work, results = workload(name, **parameters), tmp_path / "results"
    with (
        start(str(write_job(tmp_path, name, parameters)), tmp_path / "job") as job,
        ThreadPoolExecutor() as threads,
    ):
        job.scale(work.stage, 3, strategy)
        job.scale(work.stage, 1, strategy)
        first = threads.submit(job.scale, work.stage, 2, strategy)
        second = threads.submit(job.scale, work.stage, 3, strategy)
        for one in (first, second):  # one may be superseded by the other, which says so
            assert one.exception() is None or "supersede" in str(one.exception())
        work.end(results)
        job.wait(TIMEOUT_S)
    assert work.check(results) > 0


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_exact_though_processes_are_killed_at_random(
    name: str, seed: int, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    parameters = {**SMALL[name], "records": 1 << 40}
    work, results = workload(name, **parameters), tmp_path / "results"
    with (
        start(str(write_job(tmp_path, name, parameters)), tmp_path / "job") as job,
        ThreadPoolExecutor() as threads,
    ):
        job.checkpoint()
        for _ in range(3):
            scaling = threads.submit(job.scale, work.stage, rng.randint(1, 4))
            wait([scaling], rng.random() * 2)
            pids = job.pids
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(pids[rng.choice(sorted(pids))], signal.SIGKILL)
            job.checkpoint()
            scaling.exception(TIMEOUT_S)  # the kill may have cut it off
        work.end(results)
        job.wait(TIMEOUT_S)
    assert work.check(results) > 0


@pytest.mark.nightly
def test_values_may_be_large_and_the_load_heavy(tmp_path: Path) -> None:
    small = {"rate": 800, "keys": 300, "value_bytes": 1024, "rounds": 2, "is_filled": True}
    work, results, records = run(tmp_path, "key_count", small)
    assert results.num_rows == records
    assert work.wrong(results.slice(1), records)


def test_a_value_that_is_torn_is_noticed() -> None:
    import statekit as sk

    operator = workload("key_count", value_bytes=64)._operator()  # type: ignore[attr-defined]
    with sk.open("memory:") as kv:
        operator.open(kv)
        one = pa.record_batch({"key": [7], "seq": [0], "due": [0]})
        assert operator.process(one)["count"].to_pylist() == [1]
        torn = bytearray(kv["values"][7])
        torn[20] ^= 1
        kv["values"][7] = bytes(torn)
        with pytest.raises(EngineError, match="torn"):
            operator.process(one)


# ---- Generators


def test_events_depend_on_their_number_only() -> None:
    for name, kind in WORKLOADS.items():
        work = workload(name, records=1000)
        whole = work.events(np.arange(1000))
        for first in (0, 1, 999):
            part = work.events(np.arange(first, 1000))
            for column, values in part.items():
                assert list(values) == list(whole[column][first:]), (name, column)
        other = workload(name, records=1000, seed=43).events(np.arange(1000))
        assert any(list(other[column]) != list(whole[column]) for column in whole), kind


def test_draws_are_those_of_splitmix64() -> None:
    """In plain Python, as it was published."""
    mask = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    for number in (0, 1, 12345, 2**63):
        assert int(mixed(np.uint64(number))) == mix(number)
        state = 42 ^ (number * 0x9E3779B97F4A7C15 & mask)
        for draw in range(3):
            z = mix((state + (draw + 1) * 0x9E3779B97F4A7C15) & mask)
            assert float(uniform(42, np.uint64(number), draw)) == (z >> 11) * 2.0**-53
            assert int(below(42, np.uint64(number), draw, 10)) == int((z >> 11) * 2.0**-53 * 10)


@pytest.mark.parametrize(
    ("exponent", "top", "ten"), [(0.8, 3.7, 13.2), (1.0, 10.2, 29.9), (1.5, 38.6, 77.0)]
)
def test_frequent_keys_have_their_share(exponent: float, top: float, ten: float) -> None:
    """The shares of ten thousand keys, in percent, as the sums of the series say."""
    ranks = Ranks(10_000, exponent).of(42, np.arange(200_000), 0)
    assert ranks.max() < 10_000
    assert 100 * (ranks == 0).mean() == pytest.approx(top, abs=0.5)
    assert 100 * (ranks < 10).mean() == pytest.approx(ten, abs=0.7)


@pytest.mark.parametrize(
    ("name", "parameters", "match"),
    [
        ("none", {}, "There are key_count, word_count, server_count, windowed_sum"),
        ("key_count", {"colour": 1}, "unknown field `colour`. It has records, rate"),
        ("key_count", {"keys": 0}, "pass keys >= 1"),
        ("key_count", {"keys": "many"}, "Expected `int`"),
        ("key_count", {"value_bytes": 12}, "in eights"),
        ("key_count", {"rows": 0}, "rows = 0: pass 1 or more"),
        ("word_count", {"vocabulary": 0}, "pass 1 to"),
        ("server_count", {"users": 0}, "users >= 1"),
    ],
)
def test_parameters_that_cannot_be_say_what_there_is(
    name: str, parameters: dict[str, Any], match: str
) -> None:
    with pytest.raises(ArgumentError, match=match):
        workload(name, **parameters)
