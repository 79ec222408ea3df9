"""A run: one job, one rescale in the middle of its load, and its results compared with the oracle.

Every run is a job of its own with new processes, so that nothing of one strategy is left for the
next. All runs have the same events at the same times.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import monotonic, monotonic_ns, sleep
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from statekit.engine.experiment.figures import Figures, measure
from statekit.engine.rescales import Rescale
from statekit.engine.running import start
from statekit.engine.sink import read_results
from statekit.engine.strategies import DEFAULT, RESTART, STRATEGIES, How
from statekit.engine.workloads import Workload, workload
from statekit.errors import ArgumentError, EngineError, shorten

ALL = tuple(dict.fromkeys([*STRATEGIES, RESTART]))
SWEPT = (4, 16, 64)  # key-groups of a step
Say = Callable[[str], None]
WARM_S = 1.0  # of the load: processes that have just begun are slow
_LOOK_S = 0.05
_SETTLED_MS, _SETTLE_S = 100.0, 30.0  # a latency that a job under load has; how long to wait for it
_START_S = 600.0  # for a job to start and to fill its state
_RECORDS_MAX = 1 << 40


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What every run does."""

    workload: str = "key_count"
    parameters: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    after_workers: int = 3
    before_s: float = 5.0
    after_s: float = 5.0

    def __post_init__(self) -> None:
        if self.before_s < 1 or self.after_s < 1:
            raise ValueError("a run needs at least a second before the rescale, and one after it")

    @property
    def work(self) -> Workload:
        parameters = {"rate": 5_000.0, **self.parameters, "records": _RECORDS_MAX}
        found = workload(self.workload, **parameters)
        if found.job("").stages[-1].due is None:
            raise ArgumentError(
                f"the results of {self.workload!r} have no moment at which they were due: its "
                "latency cannot be measured."
            )
        if not found.rate:
            raise ArgumentError("rate = 0: the experiment needs a load, in records a second.")
        return found


def parse_strategies(text: str) -> list[How]:
    """ "all", or strategies with commas between them, each with its parameters: batched:step=4."""
    found = {}
    for one in ALL if text == "all" else text.split(","):
        name, *parameters = one.strip().split(":")
        how = dict(map(parse_value, parameters))
        if wrong := [key for key in how if key not in How._fields[1:]]:
            raise ArgumentError(
                f"{shorten(one)}: there is no {wrong[0]!r}. There are {', '.join(How._fields[1:])}."
            )
        found[one] = How(name, **how)
        found[one].check()
    return [*found.values()]


def show(how: How) -> str:
    """As it is written."""
    usual = How(how.strategy)._asdict()
    return how.strategy + "".join(
        f":{key}={value}" for key, value in how._asdict().items() if value != usual[key]
    )


def best_of(plan: Plan, strategies: Iterable[How], folder: Path, say: Say) -> list[Figures]:
    """All runs of the others than ours that move in batches, each with several sizes of these."""
    found = []
    for how in strategies:
        is_swept = how.strategy not in (DEFAULT, RESTART) and how.row.step > 1
        for step in SWEPT if is_swept and how.step is None else ():
            one = how._replace(step=step)
            say(f"{show(one)} ...")
            found.append(run(plan, one, folder / f"sweep-{how.strategy}-{step}"))
    return found


def chosen(strategies: Iterable[How], swept: Iterable[Figures]) -> list[How]:
    """The same strategies, each at its best."""
    best: dict[str, Figures] = {}
    for one in sorted(swept, key=lambda one: one.peak_ms):
        best.setdefault(one.how.strategy, one)
    return [best[how.strategy].how if how.strategy in best else how for how in strategies]


def run_all(
    plan: Plan, strategies: Iterable[How], rounds: int, folder: Path, say: Say
) -> Iterator[Figures]:
    """The strategies take turns."""
    for number in range(rounds):
        for at, how in enumerate(strategies):
            say(f"{show(how)} ...")
            yield run(plan, how, folder / f"{number}-{at}")


def run(plan: Plan, how: How, folder: Path) -> Figures:
    """A job, from its start to the check of its results."""
    with Load(plan, folder) as load:
        load.rescale(plan.after_workers, how)
        load.rest(plan.after_s)
        return load.finish()[0]


class Load:
    """A job under load. It is measured when it has ended."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        """Returns when the load has run for a while."""
        self.work = plan.work
        self._plan = plan
        self._results = folder / "results"
        self._timetable = self.work.timetable(self._results)
        self._rescales: list[tuple[How, int, float, Any, Rescale]] = []
        self._ends: list[int] = []  # of what is measured of each rescale
        self._where = str(write_job(plan, folder)), folder / "job"
        self.job = start(*self._where)
        try:
            until = monotonic() + _START_S
            while not self._timetable.began:
                if monotonic() > until:
                    raise EngineError(f"the job has not begun its load after {_START_S:.0f} s.")
                self.rest(_LOOK_S)
            self._settle()
            self.job.checkpoint()  # as a job has that has run for a while
            self.rest(WARM_S + plan.before_s)
        except BaseException:
            self.job.stop()
            raise

    def _settle(self) -> None:
        """Until what was late because the job began is through, as the sink sees it."""
        until, sink = monotonic() + _SETTLE_S, self.job.stages[-1].tasks()[0]
        while monotonic() < until:
            late = self.job.figures.tasks.get(sink, {}).get("latency_p99_ms")
            if late is not None and late < _SETTLED_MS:
                return
            self.rest(_LOOK_S)

    def rest(self, seconds: float) -> None:
        """Lets it run. Ends early with the error of a job that has failed."""
        moment = monotonic() + seconds
        while (left := moment - monotonic()) > 0:
            sleep(min(left, _LOOK_S))
            if self.job.is_over:
                self.job.wait()
                raise EngineError("the job has ended before its load did.")

    def rescale(self, workers: int, how: How) -> None:
        stage = self.work.stage
        owners = self.job.owners(stage)
        asked = self.cut()
        rescale = self.job.scale(stage, workers, cause="experiment", **how._asdict())
        seconds = (monotonic_ns() - asked) / 1e9
        after = self.job.owners(stage)
        moved = np.array([old != new for old, new in zip(owners, after, strict=True)])
        self._rescales.append((how, asked, seconds, moved, rescale))

    def cut(self) -> int:
        """What comes from now on is not measured with what was before; now, in nanoseconds."""
        now = monotonic_ns()
        if len(self._ends) < len(self._rescales):
            self._ends.append(now)
        return now

    def restart(self) -> int:
        """Stops the job and starts it again from a checkpoint; when that began, in nanoseconds."""
        self.job.checkpoint()
        now = self.cut()
        self.job.stop()
        self.job = start(*self._where)
        self.job.checkpoint()
        return now

    def first_after(self, moment: int) -> float:
        """Seconds from a moment to the next result. (What a recovery took back never was one.)"""
        return float(self.arrived[self.arrived > moment].min() - moment) / 1e9

    def finish(self) -> list[Figures]:
        """Ends the load and checks the results; the figures of each rescale."""
        self.cut()
        stage = self.work.stage
        pids = [pid for name, pid in self.job.pids.items() if name.rpartition("-")[0] == stage]
        memory = sum(map(_memory_mib, pids))
        self.work.end(self._results)
        self.job.wait()
        fault = ""
        try:
            self.records = self.work.check(self._results)
        except EngineError as error:
            fault = str(error)
        due, self.arrived, groups = self._read()
        found = []
        before = 1e9 * self._plan.before_s
        for (how, asked, seconds, moved, rescale), end in zip(
            self._rescales, self._ends, strict=True
        ):
            these = (due >= asked - before) & (due < end)
            due_s, arrived_s = (due[these] - asked) / 1e9, (self.arrived[these] - asked) / 1e9
            one = measure(how, show(how), due_s, arrived_s, moved[groups[these]], seconds)
            one.memory_mib, one.rescale, one.fault = memory, rescale.as_dict(), fault
            found.append(one)
        return found

    def _read(self) -> tuple[Any, Any, Any]:
        """When each record was due, and arrived, and its key-group."""
        found = pa.Table.from_batches(read_results(self._results)).combine_chunks()
        (key,) = [one.key for one in self.job.stages if one.name == self.work.stage]
        assert key is not None
        groups = key.groups_of(found.select([self.work.key]).to_batches()[0])
        return found["due"].to_numpy(), found["arrived"].to_numpy(), groups

    def __enter__(self) -> "Load":
        return self

    def __exit__(self, *_: object) -> None:
        self.job.stop()


def write_job(plan: Plan, folder: Path) -> Path:
    """The job as a TOML file, which all processes read."""
    folder.mkdir(parents=True, exist_ok=True)
    work = msgspec.to_builtins(plan.work) | {"folder": str(folder / "results")}
    tables = {"parameters": work, "settings": plan.settings}
    lines = [f'job = "statekit.engine.workloads:{plan.workload}"']
    for title, table in tables.items():
        lines.append(f"[{title}]")
        lines += [f"{key} = {msgspec.json.encode(value).decode()}" for key, value in table.items()]
    path = folder / "job.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def _memory_mib(pid: int) -> float:
    """The most memory that a process had at once; 0 if it has gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = [line.split()[1] for line in text.splitlines() if line.startswith("VmHWM:")]
    return int(found[0]) / 1024 if found else 0.0


def parse_value(text: str) -> tuple[str, Any]:
    """ "keys=1000": a parameter of a workload, or a setting."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ArgumentError(f"{shorten(text)} sets nothing: write NAME=VALUE.")
    try:
        return name, msgspec.json.decode(value.replace("_", "") if value[:1].isdigit() else value)
    except msgspec.DecodeError:
        return name, value
