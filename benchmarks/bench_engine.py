"""The demo engine: what a rescale costs with each strategy, and what the engine itself costs.

    python benchmarks/bench_engine.py [--quick] [--only WORD] [--strategies NAMES]
        what is promised beside what was measured; writes results/engine.json and pictures.
        --quick: small sizes, into engine_quick.*. --only: the parts with the word in their name;
        the other results stay as they were.

Every run is a job in real processes, whose results are compared with an oracle. Contenders take
turns, and medians are reported. The load of a rescale is half of what the job can take, as measured
at the start.
"""

import argparse
import os
import signal
import statistics
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from compare import RESULTS, Report, Row

from statekit.engine.experiment.figures import Figures
from statekit.engine.experiment.report import middle, plot, plot_times, table
from statekit.engine.experiment.run import (
    Load,
    Plan,
    best_of,
    chosen,
    parse_strategies,
    run_all,
    write_job,
)
from statekit.engine.running import start
from statekit.engine.sink import read_results
from statekit.engine.strategies import How

HERE = Path(__file__).resolve().parent
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Sizes:
    keys: int = 800_000
    value_bytes: int = 256  # so 205 MB of values
    flood: int = 4_000_000  # records of a job that goes as fast as it can
    capacity: int = 1_000_000
    rounds: int = 5
    steady_rounds: int = 9
    before_s: float = 6.0
    after_s: float = 8.0
    checkpoints: int = 3


QUICK = Sizes(4_000, 64, 60_000, 20_000, 1, 1, 1.0, 1.0, 1)


class Bench:
    def __init__(self, sizes: Sizes, folder: Path, report: Report, strategies: str) -> None:
        self.sizes = sizes
        self.folder = folder
        self.report = report
        self.strategies = parse_strategies(strategies)
        self._runs = 0

    def place(self) -> Path:
        self._runs += 1
        return self.folder / str(self._runs)

    # ---- Rescales

    def plan(self) -> Plan:
        sizes = self.sizes
        parameters = {
            "keys": sizes.keys, "value_bytes": sizes.value_bytes, "zipf": 0.8, "is_filled": True,
            "rows": 100,
        }  # fmt: skip
        took = self.flood("key_count", {**parameters, "records": sizes.capacity})["seconds"]
        rate = round(0.5 * sizes.capacity / took)
        print(f"capacity: {sizes.capacity / took:,.0f} records/s; the load is {rate:,}", flush=True)
        return Plan(
            parameters={**parameters, "rate": rate},
            before_s=sizes.before_s,
            after_s=sizes.after_s,
        )

    def strategies_side_by_side(self) -> None:
        plan = self.plan()
        swept = best_of(plan, self.strategies, self.place(), print)
        hows = chosen(self.strategies, swept)
        found = list(run_all(plan, hows, self.sizes.rounds, self.place(), print))
        shown = middle(found)
        print(table(shown), flush=True)
        self.report.series["strategies"] = {
            "plan": msgspec.to_builtins(plan),
            "runs": [one.as_dict() for one in found],
            "sweep": [one.as_dict() for one in swept],
        }
        exact = sum(not one.fault for one in [*swept, *found])
        runs = len(swept) + len(found)
        self.report.add(
            Row("runs with exact results", exact / runs, "", 1.0, figures={"runs": runs})
        )
        self.compare(found)
        title = f"Key-count, {plan.parameters['rate']:,} records/s, 2 to 3 workers"
        RESULTS.mkdir(exist_ok=True)
        if plot(title, shown, RESULTS / f"{self.report.name}.png"):
            plot_times(shown, RESULTS / f"{self.report.name}_times.png")

    def compare(self, found: Sequence[Figures]) -> None:
        by_name: dict[str, list[Figures]] = {}
        for one in found:
            by_name.setdefault(one.how.strategy, []).append(one)
        ours = by_name.get("seamless", [])
        if not ours:
            return

        def row(what: str, values: list[float], bound: float | None, at_most: bool = True) -> None:
            figures = {f"run {at}": value for at, value in enumerate(values)}
            self.report.add(Row(what, statistics.median(values), "", bound, at_most, figures))

        row(
            "seamless: p99 during the rescale, against before",
            [one.all["during"].p99 / one.all["before"].p99 for one in ours], 2.0,
        )  # fmt: skip
        row(
            "seamless: p99 of keys that move, against keys that stay",
            [one.moved["during"].p99 / one.stayed["during"].p99 for one in ours], 1.2,
        )  # fmt: skip
        row(
            "seamless: throughput of the worst second, against before",
            [one.worst_second for one in ours], 0.97, at_most=False,
        )  # fmt: skip
        bounds = {"restart": 1 / 50, "pause": 1 / 20, "fluid": 1 / 2}
        for name, theirs in by_name.items():
            if name != "seamless":
                ratios = [a.peak_ms / b.peak_ms for a, b in zip(ours, theirs, strict=True)]
                row(f"seamless: longest latency, against {name}", ratios, bounds.get(name))

    # ---- Without rescales

    def flood(
        self, function: str, parameters: dict[str, Any], settings: dict[str, Any] | None = None
    ) -> dict[str, float]:
        """A job that goes as fast as it can: seconds, and seconds of CPU of one worker."""
        folder = self.place()
        plan = Plan(parameters={"rate": 1.0, **parameters}, settings=settings or {})
        path = write_job(plan, folder)
        job = function if ":" in function else f"statekit.engine.workloads:{function}"
        lines = [f'job = "{job}"', *path.read_text().splitlines()[1:]]
        flooded = ("rate = ", "records = ")
        lines = [line for line in lines if not line.startswith(flooded)]
        at = lines.index("[parameters]") + 1
        lines[at:at] = [f"records = {parameters['records']}", "rate = 0"]
        path.write_text("\n".join(lines))
        cpu = 0.0
        with start(str(path), folder / "job") as running:
            while not running.is_over:
                pid = running.pids.get("count-0")
                cpu = max(cpu, cpu_seconds(pid) if pid else 0.0)
                threading.Event().wait(0.02)
            running.wait()
        results = pa.Table.from_batches(read_results(folder / "results"))
        assert results.num_rows == parameters["records"], "records are lost"
        arrived = np.sort(results["arrived"].to_numpy())
        seconds = (arrived[-1] - arrived[len(arrived) // 5]) / 0.8 / 1e9  # without the start
        return {"seconds": float(seconds), "cpu": cpu}

    def fixed(self) -> None:
        """The same job, with and without all that is there for rescales."""
        flood = {"keys": 100_000, "records": self.sizes.flood, "rows": 1000, "sources": 1}
        ratios = []
        for _ in range(self.sizes.steady_rounds):
            ours = self.flood("key_count", flood)["seconds"]
            theirs = self.flood("key_count", flood, {"is_fixed": True})["seconds"]
            ratios.append(theirs / ours)
        figures = {
            "least": min(ratios), "most": max(ratios), "rounds": len(ratios)
        }  # fmt: skip
        median = statistics.median(ratios)
        self.report.add(
            Row("steady state, against fixed routing", median, "", 0.98, figures=figures)
        )

    def moving(self) -> None:
        """CPU of a worker that counts, beside one that only takes batches and sends them on."""
        flood = {
            "keys": 100_000, "records": self.sizes.flood, "rows": 1000, "sources": 1, "workers": 1,
        }  # fmt: skip
        bare_job = f"{HERE / 'engine_jobs.py'}:move"
        ratios, counts, bares = [], [], []
        for _ in range(self.sizes.rounds):
            idle = {**flood, "records": 1000}
            floor = self.flood(bare_job, idle)["cpu"]  # of a process that starts
            counts.append(self.flood("key_count", flood)["cpu"] - floor)
            bares.append(self.flood(bare_job, flood)["cpu"] - floor)
            ratios.append(bares[-1] / max(counts[-1], 1 / TICKS))
        per = 1e9 / self.sizes.flood
        self.report.add(
            Row(
                "key-count per worker, against moving the batches only (CPU)",
                statistics.median(ratios), "", 0.5,
                figures={
                    "ns a record": statistics.median(counts) * per,
                    "ns bare": statistics.median(bares) * per,
                },
            )
        )  # fmt: skip

    # ---- Checkpoints and recovery

    def checkpoints(self) -> None:
        """How long a checkpoint takes during a rescale, and before."""
        plan, ratios = self.plan(), []
        for _ in range(self.sizes.rounds):
            before, during = [], []
            with Load(plan, self.place()) as load:
                for _ in range(self.sizes.checkpoints):
                    before.append(timed(load.job.checkpoint))
                    load.rest(1.0)
                scaling = threading.Thread(target=load.rescale, args=(3, How("seamless")))
                scaling.start()
                during.append(timed(load.job.checkpoint))
                while scaling.is_alive():
                    during.append(timed(load.job.checkpoint))
                scaling.join()
                load.finish()
            ratios.append(statistics.median(during) / statistics.median(before))
        self.report.add(
            Row(
                "a checkpoint during a rescale, against before",
                statistics.median(ratios),
                "",
                1.5,
                True,
            )
        )

    def recovery(self) -> None:
        """A worker is killed; the job is stopped and started: seconds until the next result."""
        plan, ratios, figures = self.plan(), [], {}
        for at in range(self.sizes.rounds):
            with Load(plan, self.place()) as load:
                load.job.checkpoint()
                killed = monotonic_ns()
                os.kill(load.job.pids["count-0"], signal.SIGKILL)
                load.job.checkpoint()
                load.rest(plan.after_s)
                stopped = load.restart()
                load.rest(plan.after_s)
                load.finish()
                one, other = load.first_after(killed), load.first_after(stopped)
            figures |= {f"killed {at}": one, f"restarted {at}": other}
            ratios.append(one / other)
        self.report.add(
            Row(
                "recovery of a killed worker, against starting the job again",
                statistics.median(ratios), "", 0.5, True, figures,
            )
        )  # fmt: skip


def timed(call: Any) -> float:
    began = monotonic()
    call()
    return monotonic() - began


def cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--only", default="", help="the parts with this word in their name")
    parser.add_argument("--strategies", default="all", help="as statekit experiment has them")
    options = parser.parse_args()
    report = Report("engine_quick" if options.quick else "engine")
    with tempfile.TemporaryDirectory(prefix="statekit-") as folder:
        sizes = QUICK if options.quick else Sizes()
        bench = Bench(sizes, Path(folder), report, options.strategies)
        parts = (
            bench.strategies_side_by_side, bench.fixed, bench.moving, bench.checkpoints,
            bench.recovery,
        )  # fmt: skip
        for part in parts:
            if options.only in part.__name__:
                part()
    report.write(keep=bool(options.only))


if __name__ == "__main__":
    main()
