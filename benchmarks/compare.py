"""Measures contenders side by side on a noisy machine.

Contenders of one comparison take turns, round by round, so that a slow spell of the machine
hits all of them. Each round gives one ratio; the median over rounds is reported.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass
class Contender:
    """`run` is timed; `prepare`, if given, makes its argument before each round, untimed."""

    name: str
    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    count: int = 1  # operations per run


@dataclass
class Row:
    """One line of the report: `value` is compared with `floor`."""

    what: str
    value: float
    unit: str
    floor: float | None  # None: the value is reported, and not compared
    at_most: bool = False  # the floor is really a ceiling
    figures: dict[str, float] = field(default_factory=dict)  # what the value was made from

    @property
    def holds(self) -> bool:
        if self.floor is None:
            return True
        return self.value <= self.floor if self.at_most else self.value >= self.floor

    def __str__(self) -> str:
        bound = "at most" if self.at_most else "at least"
        made_of = ", ".join(f"{name} {_short(figure)}" for name, figure in self.figures.items())
        verdict = "ok  " if self.holds else "MISS"
        told = f"{self.what}: {_short(self.value)}{self.unit}"
        if self.floor is None:
            return f"     {told}   [{made_of}]"
        return f"{verdict} {told} ({bound} {_short(self.floor)}{self.unit})   [{made_of}]"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:.3g}"


def measure(contenders: list[Contender], rounds: int) -> dict[str, list[float]]:
    """Nanoseconds per operation of each contender in each round."""
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            argument = contender.prepare()
            gc.collect()
            gc.disable()
            began = time.perf_counter_ns()
            result = contender.run(argument)
            took = time.perf_counter_ns() - began
            gc.enable()
            times[contender.name].append(took / contender.count)
            del argument, result
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times faster `fast` is: the median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(times[slow], times[fast], strict=True))


def arguments(doc: str) -> argparse.Namespace:
    """What most benchmarks take: --quick, and --only WORD ("" unless given)."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="")
    return parser.parse_args()


class Report:
    """Prints rows as they come and writes them as JSON, with the machine they were measured on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[Row] = []
        self.series: dict[str, Any] = {}

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(row, flush=True)

    def write(self, keep: bool = False) -> Path:
        """Writes results/<name>.json. keep: rows that were not measured now stay as they were."""
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.name}.json"
        rows = [asdict(row) | {"holds": row.holds} for row in self.rows]
        if keep and path.exists():
            before = json.loads(path.read_text())
            now = {row["what"]: row for row in rows}
            rows = [now.pop(row["what"], row) for row in before["rows"]] + list(now.values())
            self.series = before["series"] | self.series
        machine = {
            "python": sys.version.split()[0],
            "platform": platform.platform(),
            "cores": os.cpu_count(),
        }
        document = {"machine": machine, "rows": rows, "series": self.series}
        path.write_text(json.dumps(document, indent=2) + "\n")
        missed = sum(not row["holds"] for row in rows)
        print(f"{len(rows) - missed} of {len(rows)} figures hold; written to {path}")
        return path
