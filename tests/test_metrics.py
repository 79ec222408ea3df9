"""Metrics: what a provider counts agrees with what was done to it."""

import json
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

import statekit as sk
from statekit.metrics import BOUNDS_S, Latency, prometheus_collector


def test_latency_quantiles_are_bounds_of_the_observations() -> None:
    latency = Latency()
    assert latency.quantile(0.5) == 0.0
    for seconds in [1e-6] * 50 + [2e-3] * 49 + [100.0]:
        latency.observe(seconds)
    assert latency.quantile(0.5) == BOUNDS_S[0]
    assert latency.quantile(0.99) == 3e-3
    assert latency.quantile(1.0) == float("inf")
    assert latency.count == 100
    assert latency.buckets()[-1] == ("+Inf", 100.0)


def test_entries_operations_and_leaves_are_counted() -> None:
    kv = sk.open("memory:", owned=range(64))
    visits = kv.value("visits", int, default=0)
    mine = [f"k{i}" for i in range(200) if kv.key_group_of(f"k{i}") < 64]
    for key in mine:
        visits[key] = 1
    before = kv.metrics().states["visits"].operations
    for key in mine:
        visits.add(key)
    visits.add_many(mine)
    figures = kv.metrics()
    assert figures.states["visits"].entries == len(mine)
    assert figures.states["visits"].operations - before == 2 * len(mine)
    assert figures.states["visits"].hits == figures.states["visits"].operations
    assert figures.leaves == {"whole": 1024, "partial": 0, "absent": 0, "away": 1024}
    assert figures.bytes == sum(state.bytes for state in figures.states.values()) > 0


def test_fetches_and_spills_are_counted(tmp_path: Path) -> None:
    url = f"rocksdb:{tmp_path}/db"
    with sk.open(url) as kv:
        kv.value("visits", int).put_many([f"k{i}" for i in range(100)], range(100))
        kv.flush()
        assert kv.metrics().states["visits"].spills == 100
    with sk.open(url) as kv:
        visits = kv.value("visits", int)
        assert [visits[f"k{i}"] for i in range(100)] == list(range(100))
        visits.get_many([f"k{i}" for i in range(100)])
        figures = kv.metrics().states["visits"]
        assert figures.fetches == figures.fetch_latency.count == 100
        assert figures.spills == 0
        assert figures.batch_latency.count == 1


def test_metrics_are_plain_data_for_logs() -> None:
    kv = sk.open("memory:")
    kv.value("visits", int)["alice"] = 1
    found = json.loads(json.dumps(kv.metrics().as_dict()))
    assert found["states"]["visits"]["entries"] == 1
    assert found["states"]["visits"]["fetch_latency"] == {"count": 0, "p50_s": 0.0, "p99_s": 0.0}


def test_prometheus_reads_the_same_figures(tmp_path: Path) -> None:
    with sk.open(f"rocksdb:{tmp_path}/db") as kv:
        visits = kv.value("visits", int)
        visits.put_many(["alice", "bob"], [1, 2])
        kv.flush()
        registry = CollectorRegistry()
        registry.register(prometheus_collector(kv, worker="3"))
        text = generate_latest(registry).decode()
        assert 'statekit_entries{state="visits",worker="3"} 2.0' in text
        assert 'statekit_spills_total{state="visits",worker="3"} 2.0' in text
        assert 'statekit_leaves{residency="whole",worker="3"} 2048.0' in text
        assert 'statekit_batch_latency_seconds_count{state="visits",worker="3"} 1.0' in text
        assert 'statekit_home{name="rocksdb_keys",worker="3"}' in text
