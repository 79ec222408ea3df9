"""Report: what an experiment has shown: a table, JSON, and pictures.

If a strategy ran several times, its middle run is shown, by the longest latency.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from statekit.engine.experiment.figures import SLOT_S, Figures
from statekit.engine.experiment.run import Plan

_COLORS = {"moved": "#c1440e", "stayed": "#08519c"}
_FLOOR_MS = 1.0  # of the axis


def middle(figures: Iterable[Figures]) -> list[Figures]:
    """The middle run of each strategy."""
    by_name: dict[str, list[Figures]] = {}
    for one in figures:
        by_name.setdefault(one.strategy, []).append(one)
    return [sorted(some, key=lambda one: one.peak_ms)[len(some) // 2] for some in by_name.values()]


def table(figures: Sequence[Figures]) -> str:
    """All latencies in milliseconds."""
    head = (
        f"{'':<15}{'longest':>9}{'p99, keys that move':>27}{'p99, keys that stay':>27}"
        f"{'excess':>9}{'took':>8}{'worst':>8}{'state':>9}{'memory':>9}\n"
        f"{'ms':<15}{'during':>9}" + f"{'before':>9}{'during':>9}{'after':>9}" * 2
        + f"{'ms*s':>9}{'s':>8}{'second':>8}{'MB sent':>9}{'MiB':>9}"
    )  # fmt: skip
    lines = [head]
    for one in figures:
        line = f"{one.strategy:<15}{_number(one.peak_ms):>9}"
        for kind in (one.moved, one.stayed):
            line += "".join(
                f"{_number(kind[name].p99):>9}" for name in ("before", "during", "after")
            )
        sent = one.rescale.get("bytes")
        line += f"{_number(one.excess_ms_s):>9}{one.seconds:>8.2f}{one.worst_second:>8.2f}"
        line += f"{'-' if sent is None else _number(sent / 1e6):>9}{one.memory_mib:>9.0f}"
        lines.append(line)
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def write_json(
    plan: Plan, figures: Sequence[Figures], swept: Sequence[Figures], path: Path
) -> None:
    """swept: runs that found the best parameters."""
    path.parent.mkdir(parents=True, exist_ok=True)
    what = {
        "plan": msgspec.to_builtins(plan),
        "runs": [one.as_dict() for one in figures],
        "sweep": [one.as_dict() for one in swept],
    }
    path.write_text(json.dumps(what, indent=1) + "\n")


def plot(title: str, figures: Sequence[Figures], path: Path) -> bool:
    """The longest latency over time, a row for each strategy; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        len(figures), 1, sharex=True, sharey=True, squeeze=False, dpi=120,
        figsize=(10, 1.2 + 1.25 * len(figures)),
    )  # fmt: skip
    for axes, one in zip(rows[:, 0], figures, strict=True):
        _row(axes, one)
    end = max(one.timeline["at"][-1] for one in figures)
    first = max(one.timeline["at"][0] for one in figures)
    rows[0, 0].set_xlim(first, end)
    rows[0, 0].set_ylim(bottom=_FLOOR_MS)
    rows[-1, 0].set_xlabel("seconds since the rescale was asked for, by when a record was due")
    figure.supylabel(f"longest latency in {1000 * SLOT_S:.0f} ms, in ms", fontsize=10)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    handles, labels = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    return True


def plot_times(figures: Sequence[Figures], path: Path) -> bool:
    """What each rescale spent its time on, a bar for each strategy; False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 1.2 + 0.4 * len(figures)), dpi=120)
    names = [one.strategy for one in figures]
    ends = [0.0] * len(figures)
    for phase in dict.fromkeys(phase for one in figures for phase in one.rescale["seconds"]):
        seconds = [one.rescale["seconds"].get(phase, 0.0) for one in figures]
        axes.barh(names, seconds, left=ends, label=phase)
        ends = [end + more for end, more in zip(ends, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a rescale")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=7, loc="lower left", bbox_to_anchor=(0, 1))
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _row(axes: Any, one: Figures) -> None:
    for kind, color in _COLORS.items():
        shown = [max(ms, _FLOOR_MS) if ms else float("nan") for ms in one.timeline[kind]]
        axes.plot(
            one.timeline["at"], shown, color=color, linewidth=1.1, label=f"keys that {_VERBS[kind]}"
        )
    axes.axvspan(0, one.seconds, color="#dddddd", zorder=0, label="the rescale")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"{one.strategy}: longest {_number(one.peak_ms)} ms, took {one.seconds:.1f} s",
        loc="left", fontsize=9, pad=3,
    )  # fmt: skip


_VERBS = {"moved": "move", "stayed": "stay"}
