"""The pictures of bench_migration.py: how long records waited, and what callers waited for."""

from pathlib import Path
from typing import Any

from handover import SLOT_S, WAITS

_STYLES = {
    "stop_restore": ("stop, checkpoint, restore", "#d95f0e", 1.3),
    "all_at_once": ("all_at_once", "#756bb1", 1.3),
    "order_unaware": ("order_unaware", "#31a354", 1.3),
    "prioritised": ("prioritised", "#3182bd", 1.6),
    "batched": ("batched", "#e7969c", 1.3),
    "fluid": ("fluid", "#ad494a", 1.6),
    "seamless": ("seamless", "#08306b", 2.2),
}
_LATE_MS = 20.0  # beyond this a record was held up by the hand-over, not by the machine
_FLOOR_MS = 0.1  # of the axis
_BEFORE_S = 2.0  # that is shown of the stretch before


def plot(flow: dict[str, Any], path: Path) -> None:
    """flow: as handover_rows.py has it, with slots. The middle run of each strategy is shown."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 6.4), dpi=130)
    end = 0.0
    for name, (label, color, width) in _STYLES.items():
        runs = sorted(flow["runs"][name], key=lambda run: run["longest"])
        run = runs[len(runs) // 2]
        times = _times(run, "slots_moved")
        told = f"{label}: longest {_ms(run['longest'])}, p99 {_ms(run['p99'])}"
        axes.plot(times, run["slots_moved"], color=color, linewidth=width, label=told)
        late = [at for at, wait in zip(times, run["slots_moved"], strict=True) if wait > _LATE_MS]
        end = max(end, late[-1] if late else 0.0, run["seconds"])
        if name == "seamless":
            stayed = (
                f"keys that stay, in the same run: longest {_ms(run['stayed_longest'])}, "
                f"p99 {_ms(run['stayed_p99'])}"
            )
            axes.plot(
                _times(run, "slots_stayed"), run["slots_stayed"], color="#fdae61", linewidth=1.1,
                label=stayed, zorder=5,
            )  # fmt: skip
            axes.axvspan(0, run["seconds"], color="#08306b", alpha=0.06, linewidth=0)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yscale("log")
    axes.set_ylim(bottom=_FLOOR_MS)
    axes.set_xlim(-_BEFORE_S, 1.05 * end + 0.5)
    axes.set_xlabel("when the record was due, seconds from the call that begins the hand-over")
    axes.set_ylabel(f"longest wait per {1000 * SLOT_S:.0f} ms, in ms")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title(
        f"Handing over half of {flow['bytes'] / 1e6:,.0f} MB of counters to another process, under "
        f"{flow['records_per_second']:,.0f} records/s (Zipf 1.0)\n"
        "lines: keys that move, unless told (shaded: while seamless copies and takes over)",
        loc="left",
        fontsize=11,
    )
    axes.grid(alpha=0.3, which="major")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.11), ncols=2
    )
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    print(f"plotted to {path}")


_COLORS = ("#7f7f7f", "#8c6bb1", "#d95f0e", "#fec44f", "#3182bd", "#31a354")  # of WAITS


def plot_waits(flow: dict[str, Any], path: Path) -> None:
    """Seconds that callers waited, by what for; the middle run of each strategy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.2), dpi=130)
    names = [*_STYLES]
    runs = []
    for name in names:
        some = sorted(flow["runs"][name], key=lambda run: sum(run["waits"].values()))
        runs.append(some[len(some) // 2])
    left = [0.0] * len(names)
    for what, color in zip(WAITS, _COLORS, strict=True):
        widths = [run["waits"][what] for run in runs]
        axes.barh(names, widths, left=left, color=color, label=what)
        left = [at + width for at, width in zip(left, widths, strict=True)]
    for at, total in enumerate(left):
        axes.text(total, at, f" {_ms(1000 * total)}", va="center", fontsize=9)
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel(
        "seconds that callers waited (two at the same time count twice; shut: mean of key-groups)"
    )
    axes.set_title(
        f"What callers waited for: half of {flow['bytes'] / 1e6:,.0f} MB of counters, "
        f"{flow['records_per_second']:,.0f} records/s",
        loc="left",
        fontsize=11,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, -0.32), ncols=6)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
    print(f"plotted to {path}")


def _times(run: dict[str, Any], of: str) -> list[float]:
    return [run["slots_from"] + at * SLOT_S for at in range(len(run[of]))]


def _ms(wait: float) -> str:
    return f"{wait / 1000:.2g} s" if wait >= 1000 else f"{wait:.0f} ms"
