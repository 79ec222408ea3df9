"""What is promised of hand-overs that no record notices, beside what was measured.

Flows: waits while records flow (handover.py). Costs: the rest (handover_costs.py).
"""

import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from compare import RESULTS, Report, Row
from handover import STOP, STRATEGIES, Setting, hand_over
from handover_costs import copy, quiet, small
from plot_migration import plot, plot_waits

ROUNDS = 5
QUIET_ROUNDS = 9

FLOWS = {
    f"flow-{size}-{rate}k": Setting(state_bytes, 1000.0 * rate, before_s)
    for size, state_bytes, before_s in (("240MB", 240_000_000, 10.0), ("1GB", 1_000_000_000, 25.0))
    for rate in (50, 150, 300)
}
QUICK_FLOWS = {"flow-24MB-20k": Setting(24_000_000, 20_000.0, 2.0, seconds_max=40.0)}
PLOTTED = ("flow-1GB-50k", "flow-24MB-20k")
_NOT_KEPT = ("slots_moved", "slots_stayed", "slots_from")

# By rate: what the longest wait of seamless, with 1 GB, is promised to be of others'.
SHARES = {
    "50k": {"prioritised": 1 / 3, "fluid": 1 / 3, STOP: 1 / 80},
    "300k": {"prioritised": 1 / 4, "fluid": 1 / 2, STOP: 1 / 15},
}
NOTHING = 1e-3  # instead of 0, which a ratio cannot be made of
P99_RATES = ("50k", "150k")


class Flows:
    def __init__(self, report: Report, place: Path, rounds: int | None, adds: bool) -> None:
        self._report = report
        self._place = place
        self._rounds = rounds
        self._adds = adds

    def measure(self, name: str, setting: Setting) -> None:
        """All strategies by turns."""
        runs = self._earlier(name)
        shown: dict[str, list[dict[str, Any]]] = {strategy: [] for strategy in STRATEGIES}
        quick = 1 if name in QUICK_FLOWS else ROUNDS
        for _ in range(self._rounds or quick):
            seed = len(runs["seamless"])
            for strategy in STRATEGIES:
                outcome = hand_over(setting, strategy, seed, str(self._place))
                print(f"     {strategy}: {outcome}", flush=True)
                one = asdict(outcome)
                shown[strategy].append(one)
                kept = {key: value for key, value in one.items() if key not in _NOT_KEPT}
                runs[strategy].append(kept)
        told = {"records_per_second": setting.rate, "bytes": setting.state_bytes, "runs": runs}
        self._report.series[name] = told
        if name in PLOTTED:
            plot({**told, "runs": shown}, RESULTS / f"{self._report.name}.png")
            plot_waits({**told, "runs": shown}, RESULTS / f"{self._report.name}_waits.png")
        self._compare(name, runs)

    def _earlier(self, name: str) -> dict[str, list[dict[str, Any]]]:
        """Rounds that are in the results, if these are to be added to them."""
        path = RESULTS / f"{self._report.name}.json"
        if self._adds and path.exists():
            found = json.loads(path.read_text())["series"].get(name)
            if found is not None:
                runs: dict[str, list[dict[str, Any]]] = found["runs"]
                return runs
        return {strategy: [] for strategy in STRATEGIES}

    def _compare(self, name: str, runs: dict[str, list[dict[str, Any]]]) -> None:
        _, size, rate = name.split("-")
        ours = runs["seamless"]
        where = f"{size}, {rate} records/s"

        def middle(strategy: str, figure: str) -> float:
            return statistics.median(run[figure] for run in runs[strategy])

        def row(
            what: str, over: str, under: str, bound: float | None, at_most: bool = True
        ) -> None:
            ratios = [run[over] / max(run[under], NOTHING) for run in ours]
            figures = {
                "rounds": float(len(ours)),
                f"{over}": middle("seamless", over),
                f"{under}": middle("seamless", under),
                "best": min(ratios),
                "worst of rounds": max(ratios),
            }
            self._report.add(
                Row(
                    f"seamless, {where}: {what}", statistics.median(ratios), "x", bound,
                    at_most, figures,
                )
            )  # fmt: skip

        row("p99 of records whose keys move, vs stay", "moved_p99", "stayed_p99", 1.1)
        row(
            "longest wait of records whose keys move, vs stay",
            "moved_longest",
            "stayed_longest",
            1.3,
        )
        row("throughput of the worst 100 ms, vs before", "worst", "worst_before", 0.95, False)
        bound = 1.5 if rate in P99_RATES else None
        row("p99 during the whole move, vs before", "p99", "p99_before", bound)
        for other in STRATEGIES[1:]:
            share = SHARES.get(rate, {}).get(other) if size == "1GB" else None
            ratios = [
                one["longest"] / two["longest"]
                for one, two in zip(ours, runs[other], strict=True)
            ]  # fmt: skip
            figures = {
                "seamless ms": middle("seamless", "longest"),
                f"{other} ms": middle(other, "longest"),
            }
            self._report.add(
                Row(
                    f"{where}: longest wait, seamless vs {other}", statistics.median(ratios), "x",
                    share, True, figures,
                )
            )  # fmt: skip


class Costs:
    def __init__(self, report: Report, is_quick: bool, rounds: int | None) -> None:
        self._report = report
        self._state_bytes = 24_000_000 if is_quick else 1_000_000_000
        self._keys = 50_000 if is_quick else 1_000_000
        self._quick = 1 if is_quick else None
        self._rounds = rounds

    def _rounds_of(self, usual: int) -> int:
        return self._rounds or self._quick or usual

    def copy(self) -> None:
        found = [copy(self._state_bytes) for _ in range(self._rounds_of(ROUNDS))]
        figures = {key: statistics.median(one[key] for one in found) for key in found[0]}
        size = f"{self._state_bytes / 2e6:.0f} MB"
        sent = [one["seamless, wire"] / one["all_at_once, wire"] for one in found]
        self._report.add(
            Row(
                f"seamless, {size}, 1 % of the keys changing per second, pace 100 MB/s: bytes on "
                "the wire vs those of the state",
                statistics.median(sent), "x", 1.2, True, figures,
            )
        )  # fmt: skip
        peaks = [one["seamless, peak"] / one["seamless, state"] for one in found]
        self._report.add(
            Row(
                f"seamless, {size}: peak memory of the new owner during the move vs the state that "
                "it takes over",
                statistics.median(peaks), "x", 1.3, True,
                {
                    "peak MB": figures["seamless, peak"] / 1e6,
                    "state MB": figures["seamless, state"] / 1e6,
                    "resident after MB": figures["seamless, resident"] / 1e6,
                },
            )
        )  # fmt: skip

    def small(self) -> None:
        found = small(self._rounds_of(ROUNDS))
        ratios = [here / bare for here, bare in zip(found["here"], found["bare"], strict=True)]
        self._report.add(
            Row(
                "fetch_from of one small key-group on a warm channel, until everything is here, vs "
                "a bare gRPC call of as many bytes",
                statistics.median(ratios), "x", 3, True,
                {f"{name} us": statistics.median(took) for name, took in found.items()},
            )
        )  # fmt: skip

    def quiet(self) -> None:
        found = quiet(self._keys, self._rounds_of(QUIET_ROUNDS))
        low, high = _interval(found.ratios)
        self._report.add(
            Row(
                "two providers that serve each other and do not migrate: throughput of add_many "
                "vs one that does not serve",
                statistics.median(found.ratios), "x", 0.98, False,
                {"rounds": float(len(found.ratios)), "95 % from": low, "to": high},
            )
        )  # fmt: skip
        self._report.add(
            Row(
                "the same: bytes on the wire but for pings",
                float(found.said), " bytes", 0, True,
                {"with pings": float(found.bytes), "seconds": found.seconds},
            )
        )  # fmt: skip


def _interval(ratios: list[float]) -> tuple[float, float]:
    """Of the median, by drawing rounds anew (bootstrap)."""
    rng = np.random.default_rng(1)
    drawn = np.median(rng.choice(ratios, (10_000, len(ratios))), axis=1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)
