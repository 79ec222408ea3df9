"""Statistics of real sensors on Spark: history, then a stream, rescaled and killed on the way.

    python examples/spark/demo.py            all 45,626 readings: `make spark-demo`
    python examples/spark/demo.py --quick    the first ones of each sensor

A batch job makes the state of each sensor from the first part of its series. A streaming job goes
on from there: with 2 tasks, then 5, then 3. Half-way its process is killed (SIGKILL), and another
one goes on. Every row that came out, and the state as Spark reads it back, must be exactly what
oracle.py computes from the whole series.
"""

import argparse
import csv
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import oracle

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "spark"))
from session import prepare  # noqa: E402 - finds a Java, also one that pip installed

HISTORY = 0.6  # of each series
PARALLELISM_MARKS = {2: "#9ecae1", 5: "#08519c", 3: "#4292c6"}


class Sizes(NamedTuple):
    readings_max: int = 1_000_000  # of a sensor
    files: int = 24  # of the stream: each is a batch


QUICK = Sizes(200, 6)
Series = dict[str, list[oracle.READING]]


def read_series(sizes: Sizes) -> Series:
    found = {}
    for path in sorted((HERE / "data").glob("*.csv")):
        with path.open(newline="") as file:
            rows = [*csv.reader(file)][1:][: sizes.readings_max]
        found[path.stem] = [(seq, at, float(value)) for seq, (at, value) in enumerate(rows)]
    return found


def write_inputs(series: Series, place: Path, files: int) -> None:
    """The first part of each series as history, the rest as files of the stream."""
    parts: dict[str, list[tuple[Any, ...]]] = {}
    for sensor, readings in series.items():
        start = int(len(readings) * HISTORY)
        for at, (seq, when, value) in enumerate(readings):
            turn = (at - start) * files // (len(readings) - start)
            name = "history/all.csv" if at < start else f"live/{turn:03d}.csv"
            parts.setdefault(name, []).append((sensor, seq, when, repr(value)))
    for at, name in enumerate(sorted(parts)):
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(parts[name])
        os.utime(path, (1_000_000 + at,) * 2)  # Spark reads the oldest first


# ---- The job, in a process of its own


class Job:
    def __init__(self, place: Path, files: int) -> None:
        path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
        self.errors = (place / "errors.txt").open("a")
        self.process = subprocess.Popen(
            [sys.executable, HERE / "job.py", place, str(files)],
            env=os.environ | {"PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,  # so that its JVM can be killed with it
        )

    def lines(self) -> Iterator[dict[str, Any]]:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            yield json.loads(text)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.close()


def run_until_killed(place: Path, files: int, last: int) -> list[dict[str, Any]]:
    """Runs the job, and kills it when it has done a batch that Spark has not noted as done."""
    job, found = Job(place, files), []
    try:
        for line in job.lines():
            if line["kind"] == "batch":
                found.append(line)
                if line["batch_id"] == last:
                    job.kill()
                    return found
    finally:
        job.close()
    raise SystemExit(f"the job ended before batch {last}:\n{(place / 'errors.txt').read_text()}")


def run_to_the_end(place: Path, files: int) -> list[dict[str, Any]]:
    job = Job(place, files)
    try:
        lines = [*job.lines()]
        if job.process.wait() != 0 or lines[-1]["kind"] != "end":
            raise SystemExit(f"the job failed:\n{(place / 'errors.txt').read_text()}")
    finally:
        job.close()
    return [line for line in lines if line["kind"] == "batch"]


# ---- What came out


def compare(series: Series, place: Path) -> int:
    """How many rows and states are not what the oracle says. Explains the first ones."""
    expected = {
        (sensor, row[0]): row[1:]
        for sensor, readings in series.items()
        for row in oracle.outputs(sensor, readings)
    }
    rows = duckdb.sql(
        'select sensor, seq, value, filtered, predicted, average, moment, "distinct" '
        f"from '{place}/result-readings/*.parquet'"
    ).fetchall()
    wrong = [
        f"{row[:2]}: {row[2:]}, not {expected.get(row[:2])}"
        for row in rows
        if expected.get(row[:2]) != row[2:]
    ]
    if len(rows) != len(expected):
        wrong.append(f"{len(rows):,} rows, not {len(expected):,}")
    states: dict[str, dict[str, Any]] = {}
    for name in oracle.sensors.STATE:
        table = duckdb.sql(f"select key, value from '{place}/result-{name}/*.parquet'").fetchall()
        states[name] = dict(table)
    for sensor, readings in series.items():
        for name, value in oracle.states(sensor, readings).items():
            if states[name].get(sensor) != value:
                wrong.append(f"state {name} of {sensor}: {states[name].get(sensor)}, not {value}")
    for line in wrong[:5]:
        print(line)
    return len(wrong)


def compare_with_duckdb(place: Path) -> float:
    """The largest relative difference of predictions and averages to DuckDB's own."""
    readings = duckdb.sql(f"select * from '{place}/result-readings/*.parquet'")  # noqa: F841
    theirs = duckdb.sql(oracle.SQL).fetchall()
    ours = duckdb.sql(
        "select sensor, seq, predicted, average from readings order by 1, 2"
    ).fetchall()
    largest = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine[:2] == other[:2]
        for a, b in zip(mine[2:], other[2:], strict=True):
            if (a is None) != (b is None):
                raise SystemExit(f"DuckDB has {other}, and we have {mine}")
            if a is not None:
                largest = max(largest, abs(a - b) / max(1.0, abs(b)))
    return largest


def show(series: Series, place: Path) -> None:
    last = duckdb.sql(
        'select sensor, arg_max(filtered, seq), arg_max(average, seq), arg_max("distinct", seq), '
        f"arg_max(moment, seq) from '{place}/result-readings/*.parquet' group by 1 order by 1"
    ).fetchall()
    print(
        f"{'sensor':36}{'readings':>9}{'filtered':>10}{'average':>9}"
        f"{'distinct':>9}{'exact':>7}{'moment':>12}{'exact':>12}"
    )
    for sensor, filtered, average, distinct, moment in last:
        kinds, squares = oracle.exact(series[sensor])
        print(
            f"{sensor:36}{len(series[sensor]):9,}{filtered:10.2f}{average:9.2f}"
            f"{distinct:9,}{kinds:7,}{moment // oracle.sensors.SLOTS:12,}{squares:12,}"
        )


def show_batches(batches: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'tasks':>5}{'batches':>9}{'rows':>8}{'median':>9}{'first':>8}")
    for tasks in dict.fromkeys(one["parallelism"] for one in batches):
        of_these = [one for one in batches if one["parallelism"] == tasks and not one["is_replay"]]
        spent = [one["seconds"]["total"] for one in of_these]
        rows = sum(one["rows"] for one in of_these)
        print(
            f"{tasks:5}{len(of_these):9}{rows:8,}{statistics.median(spent):8.2f}s{spent[0]:7.2f}s"
        )


def plot(place: Path, batches: Sequence[dict[str, Any]], killed: int, path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("There is no plot: matplotlib is not installed.")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        4, 1, figsize=(10, 10), dpi=120, gridspec_kw={"height_ratios": [3, 3, 1, 2]}
    )
    shown = ("machine_temperature_system_failure", "speed_7578")
    for upper, sensor in zip(axes, shown, strict=False):
        seqs, values, filtered = zip(*duckdb.sql(
            f"select seq, value, filtered from '{place}/result-readings/*.parquet' "
            f"where sensor = '{sensor}' order by seq"
        ).fetchall(), strict=True)  # fmt: skip
        upper.plot(seqs, values, color="#bdbdbd", linewidth=0.8, label="readings")
        upper.plot(seqs, filtered, color="#08519c", linewidth=0.9, label="filtered (Kalman)")
        start = int(len(seqs) * HISTORY)
        upper.axvspan(0, start, color="#f0f0f0", zorder=0)
        above = {"transform": upper.get_xaxis_transform(), "va": "bottom", "color": "#636363"}
        upper.text(start, 1.0, "history  ", ha="right", **above)
        upper.text(start, 1.0, "  stream", ha="left", **above)
        upper.set_title(sensor.replace("_", " "), loc="left", fontsize=10)
        upper.set_xlim(0, len(seqs))
        upper.set_xlabel("reading")
        upper.legend(frameon=False, loc="lower left", ncols=2)
    tasks, spent = axes[2:]
    done = [one for one in batches if not one["is_replay"]]
    numbers = [one["batch_id"] for one in done]
    colours = [PARALLELISM_MARKS.get(one["parallelism"], "#777777") for one in done]
    tasks.bar(numbers, [one["parallelism"] for one in done], color=colours, width=0.8)
    tasks.set_ylabel("tasks")
    tasks.set_ylim(0, 7.5)
    seconds = [one["seconds"]["total"] for one in done]
    warming = {numbers[0], killed + 1}  # the first ones of each process: Spark is starting
    top = 1.2 * max(t for number, t in zip(numbers, seconds, strict=True) if number not in warming)
    for number, t in zip(numbers, seconds, strict=True):
        if t > top:
            text = f"{t:.1f} s: Spark is starting"
            spent.text(number, top, text, ha="center", va="bottom", fontsize=9, color="#636363")
    spent.bar(numbers, seconds, color=colours, width=0.8)
    spent.set_ylim(0, top)
    spent.set_ylabel("seconds a batch")
    spent.set_xlabel("batch")
    for one in (tasks, spent):
        one.set_xlim(-0.6, max(numbers) + 0.6)
        one.axvline(killed + 0.5, color="#d95f0e", linestyle="--", linewidth=1)
    tasks.text(killed + 0.7, 5.9, "killed; another process goes on", color="#d95f0e", fontsize=9)
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
    print(f"The plot is in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the first readings of each sensor")
    default = ROOT / "build" / "spark-demo.png"
    parser.add_argument("--plot", type=Path, default=default, help="where the plot goes")
    options = parser.parse_args()
    sizes = QUICK if options.quick else Sizes()
    prepare()
    series = read_series(sizes)
    killed = sizes.files // 2
    with tempfile.TemporaryDirectory(prefix="spark-demo-") as name:
        place = Path(name)
        write_inputs(series, place, sizes.files)
        readings = sum(map(len, series.values()))
        print(f"{readings:,} readings of {len(series)} sensors, {HISTORY:.0%} of them history\n")
        batches = run_until_killed(place, sizes.files, killed)
        again = run_to_the_end(place, sizes.files)
        show(series, place)
        show_batches([*batches, *again])
        replays = [one["batch_id"] for one in again if one["is_replay"]]
        print(
            f"\nkilled after batch {killed}; the next process began with batch "
            f"{again[0]['batch_id']}"
            + (", which was in the state already: not computed again" if replays else "")
        )
        wrong = compare(series, place)
        print(f"against plain Python over whole series: {wrong} of {readings:,} rows differ")
        largest = compare_with_duckdb(place)
        print(f"against DuckDB: predictions and averages differ by at most {largest:.1e}")
        plot(place, [*batches, *again], killed, options.plot)
    if wrong or largest > 1e-9:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
