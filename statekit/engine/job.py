"""Job: what a user writes. Sources, keyed stages and a sink, and their functions.

    job = Job("wordcount").source(lines).map(words).key_by("word").process(Count).sink(folder)

A stage with two inputs comes after two branches, each with its source and its key:

    Job("join").source(orders, name="orders").key_by("user")
        .source(visits, name="visits").key_by("visitor").process(Join).sink(folder)

A job is a value of a module or a file: every process imports it by that name, so that functions
need not be sent (loading.py). It says nothing of processes; coordinator.py makes these of it.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from statekit.engine.event_time import EventTime
from statekit.engine.items import Watermark
from statekit.engine.operators import KeyedOperator as KeyedOperator  # users find it here
from statekit.engine.records import Key
from statekit.engine.settings import Settings
from statekit.engine.windows import Aggregate, Spans, window_operator
from statekit.errors import ArgumentError, EngineError, shorten
from statekit.keys import KeyType, key_type_text


class Until(NamedTuple):
    """A source has nothing before this moment of time.monotonic(). The task listens meanwhile."""

    moment: float


class Placed(NamedTuple):
    """A batch, and where its source goes on after it: any value that JSON can hold."""

    batch: pa.RecordBatch
    position: Any


#: read(task, tasks, start): the batches of this task from number `start` on. It must give the same
#: batches whenever it is asked: after a failure it is asked again. It may give watermarks between.
#: A source that does not count batches gives Placed ones; `start` is 0 or such a position then.
Read: TypeAlias = Callable[[int, int, Any], Iterator["pa.RecordBatch | Placed | Watermark | Until"]]
Map: TypeAlias = Callable[[pa.RecordBatch], "pa.RecordBatch | None"]

KEY_GROUPS = 128
NAME_MAX = 60


@dataclass
class Stage:
    """Tasks that do the same: of a source, a keyed stage or the sink."""

    name: str
    parallelism: int
    inputs: dict[str, Key | None] = field(default_factory=dict)  # stages, and the key of each
    read: Read | None = None  # of a source
    event_time: EventTime | None = None  # of a source that is told a column
    operator: Callable[[], KeyedOperator] | None = None
    maps: list[Map] = field(default_factory=list)  # on what goes on
    folder: str | None = None  # of a sink
    due: str | None = None  # a column that a sink measures latencies from

    @property
    def key(self) -> Key | None:
        """Of a keyed stage; of its first input, if these name their columns differently."""
        return next(iter(self.inputs.values()), None)

    @property
    def kind(self) -> str:
        return "source" if self.read else "keyed" if self.key else "sink"

    def tasks(self) -> list[str]:
        return [f"{self.name}-{index}" for index in range(self.parallelism)]


class Job:
    """Stages, each after its inputs. Each has one stage after it, and the sink has none."""

    def __init__(self, name: str) -> None:
        self.name = _check_name(name)
        self.stages: list[Stage] = []
        self.settings = Settings()
        self._open: dict[str, Key | None] = {}  # stages with nothing after them yet, and their keys

    def source(self, read: Read, *, parallelism: int = 1, name: str = "source") -> "Job":
        """Where records come from; see Read."""
        if self._open and None in self._open.values():
            raise ArgumentError(
                f"job {self.name!r} has a source already. Another one comes after key_by() of the "
                "first: then both are inputs of what process() adds."
            )
        return self._add(Stage(name, parallelism, read=read))

    def event_time(
        self, column: str, *, grace_ms: int | None = None, interval_ms: int | None = None
    ) -> "Job":
        """Watermarks from a column of what the source gives: milliseconds, in any order.

        grace_ms: how much earlier than the latest record a record may be, and not be late.
        interval_ms: between two watermarks; 0: after each batch. Unless told, Settings say both.
        """
        if not self._open or self.stages[-1].kind != "source" or self._key:
            raise ArgumentError("event_time() comes after source(), and before key_by().")
        self.stages[-1].event_time = EventTime(column, grace_ms, interval_ms)
        return self

    def map(self, function: Map) -> "Job":
        """Changes each batch on its way, in the process that makes it."""
        if not self._open or self._key:
            raise ArgumentError("map() comes after source() or process(), and before key_by().")
        self.stages[-1].maps.append(function)
        return self

    def key_by(
        self,
        *columns: str,
        key: KeyType = str,
        key_groups: int = KEY_GROUPS,
    ) -> "Job":
        """The key of the stage that follows: a column, or several for a key that is a tuple."""
        if not self._open or self._key:
            raise ArgumentError(
                "key_by() comes after source() or process(), and once for each stage."
            )
        text = key_type_text(key)
        if not columns or len(columns) != len(text.strip("()")):
            raise ArgumentError(
                f"key_by() was given {len(columns)} columns for a key of type {text!r}. Name one "
                "column for each part of the key."
            )
        if key_groups < 1 or key_groups & (key_groups - 1):
            raise ArgumentError(f"{shorten(key_groups)} key-groups: pass a power of two.")
        made = Key(columns, key, key_groups)
        for other in self._open.values():
            if other and (other.type, other.key_groups) != (key, key_groups):
                raise ArgumentError(
                    "the inputs of a stage must have keys of one type, and as many key-groups."
                )
        self._open[self.stages[-1].name] = made
        return self

    def process(
        self,
        operator: Callable[[], KeyedOperator],
        *,
        parallelism: int = 2,
        name: str | None = None,
    ) -> "Job":
        """A keyed stage: a KeyedOperator class, or what makes one."""
        key = self._key
        if key is None:
            raise ArgumentError("process() needs a key. Call key_by() before it.")
        if not callable(operator):
            raise ArgumentError(f"{shorten(operator)} makes no KeyedOperator. Pass the class.")
        if parallelism > key.key_groups:
            raise ArgumentError(f"{parallelism} tasks cannot share {key.key_groups} key-groups.")
        keyed = sum(stage.kind == "keyed" for stage in self.stages)
        return self._add(Stage(name or f"stage{keyed + 1}", parallelism, operator=operator))

    def window(
        self,
        spans: Spans,
        *,
        time: str,
        aggregates: Mapping[str, Aggregate],
        lateness_ms: int = 0,
        emits_late: bool = False,
        parallelism: int = 2,
        name: str | None = None,
    ) -> "Job":
        """A keyed stage of aggregates by window; see windows.py. `time`: a column, milliseconds."""
        make = window_operator(spans, time, aggregates, lateness_ms, emits_late)
        return self.process(make, parallelism=parallelism, name=name)

    def sink(self, folder: "str | Path", *, name: str = "sink", due: str | None = None) -> "Job":
        """Where results go: Arrow files in a folder, which appear with the checkpoints.

        due: a column that says when a result was due, in nanoseconds of time.monotonic(). Results
        get a column `arrived` then, and latencies are in the metrics.
        """
        if self._key or len(self._open) != 1:
            raise ArgumentError("sink() comes last, after source() or process(), and once.")
        return self._add(Stage(name, 1, folder=str(folder), due=due))

    def _add(self, stage: Stage) -> "Job":
        _check_name(stage.name)
        if any(stage.name == other.name for other in self.stages):
            raise ArgumentError(f"job {self.name!r} has two stages named {stage.name!r}.")
        if type(stage.parallelism) is not int or not 1 <= stage.parallelism <= 256:
            raise ArgumentError(f"parallelism={shorten(stage.parallelism)}: pass 1 to 256.")
        if self.stages and self.stages[-1].kind == "sink":
            raise ArgumentError("nothing comes after sink().")
        if stage.read is None:
            stage.inputs, self._open = self._open, {}
        self.stages.append(stage)
        if stage.folder is None:
            self._open[stage.name] = None
        return self

    @property
    def _key(self) -> Key | None:
        """Of the stage that follows, if key_by() was called for it."""
        return self._open.get(self.stages[-1].name) if self.stages else None

    def before(self, stage: Stage) -> list[Stage]:
        """The inputs of a stage."""
        return [self.stage(name) for name in stage.inputs]

    def after(self, stage: Stage) -> Stage | None:
        """Where a stage sends what it makes."""
        return next((one for one in self.stages if stage.name in one.inputs), None)

    @property
    def sources(self) -> list[Stage]:
        return [stage for stage in self.stages if stage.kind == "source"]

    def stage(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        known = ", ".join(stage.name for stage in self.stages)
        raise EngineError(f"job {self.name!r} has no stage {name!r}. It has {known}.")

    def check(self) -> None:
        """EngineError if it cannot run."""
        if not self.stages or self.stages[-1].kind != "sink":
            raise EngineError(f"job {self.name!r} has no sink. End it with sink().")

    def plan(self) -> str:
        """What the user wrote, and what runs, as text."""
        self.check()
        lines = [f"job {self.name}", ""]
        lines += [self._drawn(self.stages[-1]), ""]
        for stage in self.stages:
            tasks = ", ".join(stage.tasks())
            after = self.after(stage)
            way = f"  ==[{_way(after)}]==> {after.name}" if after else ""
            lines.append(f"  {stage.name:<12} {stage.parallelism} process(es): {tasks}{way}")
        return "\n".join(lines)

    def _drawn(self, stage: Stage) -> str:
        """A stage and all before it."""
        inputs = [self._drawn(one) for one in self.before(stage)]
        before = inputs[0] if len(inputs) == 1 else "{ " + " ; ".join(inputs) + " }"
        return f"{before} -> {_shape(stage)}" if inputs else _shape(stage)


def _shape(stage: Stage) -> str:
    maps = "".join(f" | {getattr(one, '__name__', 'map')}" for one in stage.maps)
    if stage.key:
        columns = dict.fromkeys(", ".join(key.columns) for key in stage.inputs.values() if key)
        return f"[{stage.name} by {' or '.join(columns)}{maps}]"
    return f"({stage.name}{maps})"


def _way(stage: Stage) -> str:
    return f"{stage.key.key_groups} key-groups" if stage.key else "all"


def _check_name(name: str) -> str:
    """Names are parts of file names and of messages."""
    if not isinstance(name, str) or not name.isidentifier() or len(name) > NAME_MAX:
        raise ArgumentError(
            f"{shorten(name)} is no name of a job or stage. Use letters, digits and _, up to "
            f"{NAME_MAX}."
        )
    return name
