"""What a batch did, in figures: for a function of yours, for Prometheus, for a query listener.

    op.foreach_batch(..., on_progress=print)      called after each batch, where the sink is called
    metrics = BatchMetrics(op="orders")           such a function, which Prometheus can ask
    listener(path, call)                          a StreamingQueryListener: call(progress, event)

A task counts what it does and reports it; the driver adds the tasks up and measures its own phases.
What is known when the version is published is stored in the version, so whoever reaches the state
can read it later: a listener need not run where the batch ran, and no figure travels in memory.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from os import PathLike
from time import perf_counter
from typing import Any

from statekit.checkpoint.reader import list_numbers, read_checkpoint
from statekit.errors import NoCheckpointError, StateKitError
from statekit.metrics import Figures, FiguresCollector
from statekit.storage import open_storage

NOTE = "figures"  # the name of ours in what a version says of its batch

_log = logging.getLogger("statekit")


@dataclass(frozen=True)
class Progress:
    """A batch that was done."""

    batch_id: int
    version: int  # of the state, that the batch made
    parallelism: int
    is_replay: bool  # it was in the state already: its output was given again, nothing computed
    rows: int = 0
    keys: int = 0  # that had rows
    late: int = 0  # rows that were left out
    null_keys: int = 0  # rows that were left out
    timers: int = 0  # that were due
    output_rows: int = 0
    bytes_written: int = 0  # of state, by the tasks
    bytes_read: int = 0  # of state, by the tasks, from the storage or from copies on their hosts
    cache_hits: int = 0  # reads that were answered by such copies
    cache_misses: int = 0  # reads that were not; local storage has no copies
    seconds: dict[str, float] = field(default_factory=dict)  # by phase; "tasks_*" summed over tasks
    more: dict[str, float] = field(default_factory=dict)  # other figures of the tasks

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for logs and JSON."""
        return asdict(self)


# Figures of a task, and the fields that they are added up in. All others are seconds or `more`.
_FIELDS = {
    "rows": "rows",
    "keys": "keys",
    "late": "late",
    "null_keys": "null_keys",
    "timers": "timers",
    "output_rows": "output_rows",
    "bytes": "bytes_written",
    "bytes_read": "bytes_read",
    "cache_hits": "cache_hits",
    "cache_misses": "cache_misses",
}
_SECONDS = "_seconds"


class Measured:
    """The figures of a batch while it runs, in the driver."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - started

    def add_tasks(self, tasks: Iterable[Mapping[str, float]]) -> dict[str, Any]:
        """Adds up what the tasks counted. Returns what a version is to say of it."""
        counts: dict[str, int] = {}
        seconds: dict[str, float] = {}
        more: dict[str, float] = {}
        for figures in tasks:
            for name, figure in figures.items():
                if name in _FIELDS:
                    counts[_FIELDS[name]] = counts.get(_FIELDS[name], 0) + int(figure)
                elif name.endswith(_SECONDS):
                    phase = f"tasks_{name.removesuffix(_SECONDS)}"
                    seconds[phase] = round(seconds.get(phase, 0.0) + figure, 6)
                else:
                    more[name] = more.get(name, 0) + figure
        self.seconds.update(seconds)
        self.figures = {**counts, "more": more}
        before = {name: round(spent, 6) for name, spent in self.seconds.items()}
        return {**self.figures, "seconds": before}

    def progress(self, note: Mapping[str, Any], version: int, is_replay: bool) -> Progress:
        figures = dict(self.figures) if self.figures else dict(note.get(NOTE, {}))
        figures.pop("seconds", None)
        return Progress(
            batch_id=note["batch"],
            version=version,
            parallelism=note["parallelism"],
            is_replay=is_replay,
            seconds=dict(self.seconds),
            **figures,
        )


def tell(call: Callable[[Progress], object], progress: Progress) -> None:
    """Gives a batch's figures to a function. If that fails, the batch is done nevertheless."""
    try:
        call(progress)
    except Exception:
        _log.warning("on_progress failed for batch %d", progress.batch_id, exc_info=True)


def read_progress(path: "str | PathLike[str]", batch_id: int) -> Progress | None:
    """What the state in a place says of a batch; None if it has no version of it (any more)."""
    storage = open_storage(path)
    for number in sorted(list_numbers(storage), reverse=True):
        try:
            note = read_checkpoint(storage, number).metadata.get("spark")
        except NoCheckpointError:
            continue  # removed since we looked, or not finished
        if not isinstance(note, dict) or not note["query"] or note["batch"] < batch_id:
            return None
        if note["batch"] == batch_id:
            stored = dict(note.get(NOTE, {}))
            return Progress(batch_id, number, note["parallelism"], False, **stored)
    return None


def listener(path: "str | PathLike[str]", call: Callable[[Progress, Any], object]) -> Any:
    """A listener for spark.streams.addListener(): call(progress, event) after each batch.

    path: of the StatefulOp; batches of queries that have no state there are passed over. event is
    Spark's own QueryProgressEvent, with its rates and durations.
    """
    from pyspark.sql.streaming import StreamingQueryListener

    class Listener(StreamingQueryListener):  # type: ignore[misc]
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802
            pass

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            try:
                progress = read_progress(path, event.progress.batchId)
            except StateKitError as error:
                _log.warning("the figures of a batch cannot be read: %s", error)
                return
            if progress is not None:
                call(progress, event)

        def onQueryIdle(self, event: Any) -> None:  # noqa: N802
            pass

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            pass

    return Listener()


class BatchMetrics:
    """Adds batches up for Prometheus: on_progress=metrics, REGISTRY.register(metrics.collector)."""

    def __init__(self, **labels: str) -> None:
        self._figures: dict[str, float] = {}
        self.last: Progress | None = None
        self.collector = FiguresCollector(self._read, labels)

    def __call__(self, progress: Progress) -> None:
        found = dict(self._figures)
        if progress.is_replay:
            found["replays"] = found.get("replays", 0) + 1
        else:
            found["batches"] = found.get("batches", 0) + 1
            for name in dict.fromkeys(_FIELDS.values()):
                found[name] = found.get(name, 0) + getattr(progress, name)
            for name, figure in progress.more.items():
                found[name] = found.get(name, 0) + figure
        for phase, spent in progress.seconds.items():
            name = f"seconds:{phase}"
            found[name] = found.get(name, 0.0) + spent
        self.last, self._figures = progress, found

    def _read(self) -> Figures:
        last = self.last
        counters = {n: v for n, v in self._figures.items() if not n.startswith("seconds:")}
        phases = {
            n.removeprefix("seconds:"): v
            for n, v in self._figures.items()
            if n.startswith("seconds:")
        }
        gauges: dict[str, float] = {} if last is None else {
            "batch_id": last.batch_id, "version": last.version, "parallelism": last.parallelism
        }  # fmt: skip
        return Figures("statekit_spark", counters, gauges, phases)
