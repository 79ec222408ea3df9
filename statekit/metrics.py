"""Metrics: what a provider counts, and how Prometheus reads it.

Operations are counted in C, in memory that each of them touches anyway. Fetches, spills and batches
are counted here: they are so slow that counting in Python does not matter.

    from statekit.metrics import prometheus_collector
    prometheus_client.REGISTRY.register(prometheus_collector(kv, worker="3"))
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from statekit.errors import ClosedError

BOUNDS_S = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0)


class Latency:
    """A histogram of seconds with fixed bounds."""

    __slots__ = ("count", "counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.count = 0
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.count += 1
        self.sum_s += seconds

    def quantile(self, q: float) -> float:
        """The bound below which a share q of the observations lies; 0.0 if there are none."""
        wanted = q * self.count
        seen = 0
        for bound, count in zip((*BOUNDS_S, float("inf")), self.counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return bound
        return 0.0

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts, as Prometheus wants them."""
        total = 0
        found = []
        for bound, count in zip((*BOUNDS_S, float("inf")), self.counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(total)))
        return found


class StateCounters:
    """Counts of one state since the provider was opened."""

    __slots__ = ("batch_latency", "fetch_latency", "fetches", "spills")

    def __init__(self) -> None:
        self.fetches = 0  # entries asked of the home
        self.spills = 0  # rows written home
        self.fetch_latency = Latency()
        self.batch_latency = Latency()

    def fetched(self, entries: int, seconds: float) -> None:
        self.fetches += entries
        latency = self.fetch_latency  # its observe(), without the price of a call
        latency.counts[bisect_left(BOUNDS_S, seconds)] += 1
        latency.count += 1
        latency.sum_s += seconds

    def written_back(self, rows: int) -> None:
        self.spills += rows


@dataclass(frozen=True, slots=True)
class StateMetrics:
    """One state."""

    entries: int  # that are in memory
    bytes: int  # native memory
    dirty: int  # entries not yet written home
    operations: int
    hits: int  # operations that memory could answer
    fetches: int
    spills: int
    fetch_latency: Latency = field(repr=False)
    batch_latency: Latency = field(repr=False)


@dataclass(frozen=True, slots=True)
class MovedMetrics:
    """What came from other processes and went to them, since the provider was opened."""

    migrations: int = 0  # that are not done
    leaves_in: int = 0
    leaves_out: int = 0
    bytes_in: int = 0  # of blocks
    bytes_out: int = 0
    leaves_fetched: int = 0  # of leaves_in: those that came because somebody touched them
    shadow_bytes: int = 0  # native memory of copies that were not taken over; not in Metrics.bytes
    shadowed_by: int = 0  # shadows that other processes have of leaves here
    copied_in: int = 0  # bytes of blocks, for shadows
    copied_out: int = 0
    # Seconds of callers: two that wait at the same time for half a second make one.
    waited_aligning_s: float = 0.0  # in on_step
    waited_shut_s: float = 0.0  # for key-groups that were neither there nor here
    waited_queued_s: float = 0.0  # for leaves that somebody else brings, or the stream
    waited_wire_s: float = 0.0  # for answers of the old owner
    waited_decode_s: float = 0.0  # while what has come was taken in


@dataclass(frozen=True, slots=True)
class CheckpointMetrics:
    """Checkpoints of this provider, since it was opened."""

    taken: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Metrics:
    """A provider."""

    states: dict[str, StateMetrics]
    bytes: int  # native memory
    bytes_max: int  # the budget; 0 for none
    leaves: dict[str, int]  # whole, partial, absent, away
    home: dict[str, float]  # the home's own figures
    moved: MovedMetrics = field(default_factory=MovedMetrics)
    checkpoints: CheckpointMetrics = field(default_factory=CheckpointMetrics)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for logs and JSON: latencies as count, p50 and p99 in seconds."""
        plain = asdict(self)
        for name, state in self.states.items():
            for latency in ("fetch_latency", "batch_latency"):
                seen: Latency = getattr(state, latency)
                plain["states"][name][latency] = {
                    "count": seen.count,
                    "p50_s": seen.quantile(0.5),
                    "p99_s": seen.quantile(0.99),
                }
        return plain


_PER_STATE = {
    "entries": ("gauge", "Entries in memory"),
    "bytes": ("gauge", "Native memory"),
    "dirty": ("gauge", "Entries not yet written home"),
    "operations": ("counter", "Operations and batch records"),
    "hits": ("counter", "Operations that memory could answer"),
    "fetches": ("counter", "Entries asked of the home"),
    "spills": ("counter", "Rows written home"),
}


_MOVED = {
    "migrations": "Hand-overs that are not done",
    "leaves_in": "Leaves that came from other processes",
    "leaves_out": "Leaves that went to other processes",
    "bytes_in": "Bytes of leaves that came from other processes",
    "bytes_out": "Bytes of leaves that were sent to other processes",
    "leaves_fetched": "Leaves that came because somebody touched them",
    "shadow_bytes": "Native memory of copies of leaves of other processes",
    "shadowed_by": "Shadows that other processes have of leaves here",
    "copied_in": "Bytes of leaves that came as copies",
    "copied_out": "Bytes of leaves that were sent as copies",
    "waited_aligning_s": "Seconds of callers: engines changing their routes",
    "waited_shut_s": "Seconds of callers: key-groups that were neither there nor here",
    "waited_queued_s": "Seconds of callers: leaves that somebody else brings",
    "waited_wire_s": "Seconds of callers: answers of the old owner",
    "waited_decode_s": "Seconds of callers: taking in what has come",
}


_MOVED_NOW = {"migrations", "shadow_bytes", "shadowed_by"}  # how it is now; the others only grow


_CHECKPOINTS = {
    "taken": "Checkpoints that were taken",
    "failed": "Checkpoints that could not be taken",
}


class PrometheusCollector:
    """Reads a provider's metrics whenever Prometheus asks. See prometheus_collector()."""

    def __init__(self, read: Callable[[], Metrics], labels: dict[str, str]) -> None:
        self._read = read
        self._labels = labels

    def describe(self) -> list[Any]:
        """Nothing: what there is to collect depends on the states, which are declared later."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        try:
            metrics = self._read()
        except ClosedError:  # a closed provider has no metrics
            return
        names, values = list(self._labels), list(self._labels.values())
        for name, (kind, text) in _PER_STATE.items():
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            found = family(f"statekit_{name}", text, labels=[*names, "state"])
            for state, figures in metrics.states.items():
                found.add_metric([*values, state], getattr(figures, name))
            yield found
        for name in ("fetch_latency", "batch_latency"):
            histogram = HistogramMetricFamily(
                f"statekit_{name}_seconds", f"{name} of a call", labels=[*names, "state"]
            )
            for state, figures in metrics.states.items():
                seen: Latency = getattr(figures, name)
                histogram.add_metric([*values, state], seen.buckets(), seen.sum_s)
            yield histogram
        leaves = GaugeMetricFamily("statekit_leaves", "Leaves", labels=[*names, "residency"])
        for residency, count in metrics.leaves.items():
            leaves.add_metric([*values, residency], count)
        yield leaves
        memory = GaugeMetricFamily("statekit_memory_bytes", "Native memory", labels=names)
        memory.add_metric(values, metrics.bytes)
        yield memory
        for name, text in _MOVED.items():
            family = GaugeMetricFamily if name in _MOVED_NOW else CounterMetricFamily
            full = f"{name}econds" if name.endswith("_s") else name
            moved = family(f"statekit_{full}", text, labels=names)
            moved.add_metric(values, getattr(metrics.moved, name))
            yield moved
        for name, text in _CHECKPOINTS.items():
            counter = CounterMetricFamily(f"statekit_checkpoints_{name}", text, labels=names)
            counter.add_metric(values, getattr(metrics.checkpoints, name))
            yield counter
        home = GaugeMetricFamily("statekit_home", "The home's own figures", labels=[*names, "name"])
        for name, figure in metrics.home.items():
            home.add_metric([*values, name], figure)
        yield home


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures that somebody else counts, by name, for a FiguresCollector."""

    prefix: str
    counters: dict[str, float]
    gauges: dict[str, float]
    phases: dict[str, float]  # seconds spent, by phase


class FiguresCollector:
    """Gives Prometheus figures that belong to no provider, such as those of batches on Spark."""

    def __init__(self, read: Callable[[], Figures], labels: dict[str, str]) -> None:
        self._read = read
        self._labels = labels

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self._read()
        names, values = list(self._labels), list(self._labels.values())
        for family, found in (
            (CounterMetricFamily, figures.counters),
            (GaugeMetricFamily, figures.gauges),
        ):
            for name, figure in found.items():
                text = name.replace("_", " ").capitalize()
                one = family(f"{figures.prefix}_{name}", text, labels=names)
                one.add_metric(values, figure)
                yield one
        spent = CounterMetricFamily(
            f"{figures.prefix}_seconds", "Seconds spent", labels=[*names, "phase"]
        )
        for phase, seconds in figures.phases.items():
            spent.add_metric([*values, phase], seconds)
        yield spent


def prometheus_collector(provider: Any, **labels: str) -> PrometheusCollector:
    """A collector to register with prometheus_client (extra "metrics")."""
    return PrometheusCollector(provider.metrics, labels)
