"""The picture of bench_migration.py: how long records waited, by when they arrived."""

from pathlib import Path
from typing import Any

_STYLES = {
    "stop, checkpoint, restore": ("#d95f0e", 1.6),
    "all_at_once": ("#756bb1", 1.6),
    "order_unaware": ("#31a354", 1.6),
    "on_demand": ("#9ecae1", 1.8),
    "prioritised": ("#08519c", 2.4),
}
_FLOOR_MS = 0.1  # of the axis


def plot(waits: dict[str, Any], path: Path) -> None:
    """waits: what bench_migration.py has in its results. The middle run of each is shown."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5.2), dpi=130)
    slot_s = waits["slot_s"]
    end = 0.0
    for name, (color, width) in _STYLES.items():
        runs = sorted(waits["runs"][name], key=lambda run: run["longest_ms"])
        run = runs[len(runs) // 2]
        times = [at * slot_s for at in range(len(run["slots"]))]
        label = f"{name}: longest {_ms(run['longest_ms'])}, p99 {_ms(run['p99_ms'])}"
        axes.plot(times, run["slots"], color=color, linewidth=width, label=label)
        late = [at for at, wait in zip(times, run["slots"], strict=True) if wait > _LATE_MS]
        end = max(end, late[-1] if late else 0.0, run["seconds"])
    axes.set_yscale("log")
    axes.set_ylim(bottom=_FLOOR_MS)
    axes.set_xlim(0, min(times[-1], 1.15 * end))
    axes.set_xlabel("arrival of the record, seconds after the hand-over")
    axes.set_ylabel(f"longest wait per {1000 * slot_s:.0f} ms, in ms")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title(
        f"Handing over {waits['bytes'] / 1e6:.0f} MB of counters to another process\n"
        f"under {waits['records_per_second']:,.0f} records/s (Zipf 1.0)",
        loc="left",
        fontsize=12,
    )
    axes.grid(alpha=0.3, which="major")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    print(f"plotted to {path}")


_LATE_MS = 20.0  # beyond this a record was held up by the hand-over, not by the machine


def _ms(wait: float) -> str:
    return f"{wait / 1000:.2g} s" if wait >= 1000 else f"{wait:.0f} ms"
