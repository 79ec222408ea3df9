"""Figures of a run: how long records took, before, while and after a stage was scaled.

A record's latency is the time from the moment at which it was due to the moment at which its result
came to the sink. So what waited anywhere counts, in the source, too: a job that stands still cannot
hide it. All times here are seconds since the rescale was asked for.

    before    what ran before that
    during    until the rescale was done and latency was back to normal: CALM_S seconds in which no
              record takes longer than records did before
    after     the rest
"""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from statekit.engine.strategies import How

SLOT_S = 0.05  # of the timeline
CALM_S = 0.5
_WORST_S = 1.0  # throughput is that of the worst second
_PHASES = ("before", "during", "after")


@dataclass
class Latencies:
    """Records of one kind in one phase, in milliseconds."""

    records: int
    p50: float
    p99: float
    longest: float


@dataclass
class Figures:
    how: How
    strategy: str  # with its parameters
    seconds: float  # until the rescale was done
    normal_after: float  # until latency was back to normal
    all: dict[str, Latencies]  # by phase
    moved: dict[str, Latencies]
    stayed: dict[str, Latencies]
    excess_ms_s: float  # area between the latencies and the median before, over the seconds during
    worst_second: float  # throughput in it, as a share of that before
    records_per_second: float  # before
    rescale: dict[str, Any] = field(default_factory=dict)  # what the engine says of it
    memory_mib: float = 0.0  # of the stage's processes, at most
    fault: str = ""  # what is wrong with the results; "": they are exact
    timeline: dict[str, list[float]] = field(default_factory=dict)  # by slot: longest, in ms

    @property
    def peak_ms(self) -> float:
        return self.all["during"].longest

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"how": self.how._asdict(), "peak_ms": self.peak_ms}


def measure(how: How, strategy: str, due: Any, arrived: Any, moved: Any, seconds: float) -> Figures:
    """due, arrived: of each record, in seconds. moved: whether its key-group got another owner."""
    latency = 1000 * (arrived - due)
    first, end = float(due.min()), float(due.max())
    before = due < 0
    edges = np.arange(first, end + SLOT_S, SLOT_S)
    longest = _longest(due, latency, edges)
    normal = float(np.percentile(latency[before], 99)) if before.any() else 0.0
    calm = _calm(edges, longest, max(seconds, 0.0), 2 * normal + 5.0)
    phases = dict(zip(_PHASES, (before, (due >= 0) & (due < calm), due >= calm), strict=True))
    usual = float(np.median(latency[before])) if before.any() else 0.0
    over = np.clip(latency[phases["during"]] - usual, 0, None)
    rate = before.sum() / -first
    return Figures(
        how=how,
        strategy=strategy,
        seconds=seconds,
        normal_after=calm,
        all=_by_phase(latency, phases, np.ones(len(due), bool)),
        moved=_by_phase(latency, phases, moved),
        stayed=_by_phase(latency, phases, ~moved),
        excess_ms_s=float(over.sum() / rate) if rate else 0.0,
        worst_second=_worst(arrived, first, calm),
        records_per_second=float(rate),
        timeline={
            "at": edges.round(3).tolist(),
            "moved": _longest(due[moved], latency[moved], edges).round(3).tolist(),
            "stayed": _longest(due[~moved], latency[~moved], edges).round(3).tolist(),
            "results": (np.histogram(arrived, [*edges, edges[-1] + SLOT_S])[0] / SLOT_S).tolist(),
        },
    )


def _longest(due: Any, latency: Any, edges: Any) -> Any:
    """The longest latency of the records that are due in each slot; 0 if there are none."""
    found = np.zeros(len(edges))
    which = np.searchsorted(edges, due, side="right") - 1
    np.maximum.at(found, which[which >= 0], latency[which >= 0])
    return found


def _calm(edges: Any, longest: Any, seconds: float, bound_ms: float) -> float:
    """From when on nothing took longer than it should, once the rescale was done."""
    need = round(CALM_S / SLOT_S)
    is_calm = longest <= bound_ms
    for at in range(len(edges) - need):
        if edges[at] >= seconds and is_calm[at : at + need].all():
            return float(edges[at])
    return float(edges[-1])


def _by_phase(latency: Any, phases: dict[str, Any], some: Any) -> dict[str, Latencies]:
    found = {}
    for name, when in phases.items():
        these = latency[when & some]
        p50, p99 = np.percentile(these, (50, 99)) if len(these) else (0.0, 0.0)
        most = float(these.max()) if len(these) else 0.0
        found[name] = Latencies(len(these), float(p50), float(p99), most)
    return found


def _worst(arrived: Any, first: float, calm: float) -> float:
    """The least results in a second that ends in the rescale, as a share of the mean before."""
    times = np.sort(arrived)
    usual = np.count_nonzero((times >= first) & (times < 0)) / -first * _WORST_S
    starts = np.arange(0.0, max(calm - _WORST_S, 0.0) + SLOT_S, SLOT_S)
    counts = np.searchsorted(times, starts + _WORST_S) - np.searchsorted(times, starts)
    return float(counts.min() / usual) if usual else 0.0
