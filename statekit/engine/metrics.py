"""Metrics: what every task counts, at the coordinator, and as Prometheus wants to have it.

A task says its figures once a second. They are the sum of its life, or how it is now; a task that
is started anew begins at 0, as Prometheus expects of what was restarted.
"""

from collections.abc import Mapping
from time import monotonic
from typing import Any, NamedTuple

SECONDS = 1.0  # between two messages of a task

_SUMS = {
    "records_in": "Records that were taken from channels",
    "records_out": "Records that were sent on",
    "state_bytes_in": "Bytes of state that came from other tasks, copies too",
    "state_bytes_out": "Bytes of state that went to other tasks, copies too",
}
_NOW = {
    "queued_bytes": "Bytes that were sent to the next stage, and not taken there yet",
    "parked_bytes": "Bytes of records that wait for a hand-over or a barrier",
    "watermark_ms": "Event time, in milliseconds",
    "state_bytes": "Native memory of the state",
    "state_entries": "Entries in memory",
    "shadow_bytes": "Native memory of copies of other tasks' state",
    "migrations": "Hand-overs that are not done",
    "latency_p50_ms": "Latency of results: the median since it said so last",
    "latency_p99_ms": "Latency of results: the 99th percentile since it said so last",
    "latency_max_ms": "Latency of results: the longest since it said so last",
    "records_per_second": "Records taken, or sent by a source, since it said so last",
}
_RESCALE = {
    "rescale_progress": "Share of the key-groups that have moved, of the rescale under way",
    "rescale_moved_key_groups": "Key-groups that have moved, of the rescale under way",
    "rescale_bytes": "Bytes of state that were sent, of the rescale under way",
}


class Due:
    """When figures are to be said again."""

    def __init__(self) -> None:
        self._at = monotonic() + SECONDS

    @property
    def left(self) -> float:
        """Seconds until then."""
        return max(0.0, self._at - monotonic())

    def is_now(self) -> bool:
        """Whether it is time; the next time is later then."""
        if monotonic() < self._at:
            return False
        self._at = monotonic() + SECONDS
        return True


class Figures(NamedTuple):
    """Of a job, as it is."""

    job: str
    tasks: Mapping[str, Mapping[str, float]]
    parallelism: Mapping[str, int]
    counts: Mapping[str, int]  # of checkpoints, rescales and recoveries
    rescale: Mapping[str, float]  # nothing while none is under way


def told(before: Mapping[str, float], message: Mapping[str, Any], now: float) -> dict[str, float]:
    """A task's figures, with what they were as it said them last."""
    found = {name: float(value) for name, value in message.items() if name != "kind"}
    kind = "records_in" if "records_in" in found else "records_out"
    spent = now - before.get("at", now)
    done = found[kind] - before.get(kind, 0.0)
    found["records_per_second"] = done / spent if spent > 0 else 0.0
    return {**found, "at": now}


def exposition(figures: Figures) -> str:
    """In the text format of Prometheus."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, samples: list[tuple[str, float]]) -> None:
        if samples:
            lines.append(f"# HELP statekit_engine_{name} {text}")
            lines.append(f"# TYPE statekit_engine_{name} {kind}")
            for labels, value in samples:
                labels = f'job="{figures.job}"' + (f",{labels}" if labels else "")
                lines.append(f"statekit_engine_{name}{{{labels}}} {value:.17g}")

    for kind, some in (("counter", _SUMS), ("gauge", _NOW)):
        for name, text in some.items():
            samples = [
                (f'stage="{task.rpartition("-")[0]}",task="{task}"', known[name])
                for task, known in sorted(figures.tasks.items())
                if name in known
            ]
            family(name + ("_total" if kind == "counter" else ""), kind, text, samples)
    workers = [(f'stage="{stage}"', float(n)) for stage, n in figures.parallelism.items()]
    family("workers", "gauge", "Tasks of a stage", workers)
    for name, count in figures.counts.items():
        family(f"{name}_total", "counter", f"Number of {name}", [("", float(count))])
    for name, text in _RESCALE.items():
        if name in figures.rescale:
            family(name, "gauge", text, [("", figures.rescale[name])])
    return "\n".join(lines) + "\n"
