"""Job: what a user writes. A source, keyed stages and a sink in a row, and their functions.

    job = Job("wordcount").source(lines).map(words).key_by("word").process(Count).sink(folder)

A job is a value of a module or a file: every process imports it by that name, so that functions
need not be sent. It says nothing of processes; coordinator.py makes these of it.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from statekit.engine.items import Watermark
from statekit.engine.records import Key
from statekit.errors import ArgumentError, EngineError, shorten
from statekit.keys import KeyType, key_type_text

if TYPE_CHECKING:
    from statekit.provider.provider import KVProvider

#: read(task, tasks, start): the batches of this task from number `start` on. It must give the same
#: batches whenever it is asked: after a failure it is asked again. It may give watermarks between.
Read: TypeAlias = Callable[[int, int, int], Iterator["pa.RecordBatch | Watermark"]]
Map: TypeAlias = Callable[[pa.RecordBatch], "pa.RecordBatch | None"]

KEY_GROUPS = 128
NAME_MAX = 60


class KeyedOperator:
    """What a keyed stage does. Each task has one, with the state of its key-groups.

    A task calls these one after the other, never two at once.
    """

    key: Key  # of its stage; it is set before open() is called

    def open(self, kv: "KVProvider") -> None:
        """The task begins: declare states here, and change nothing."""

    def process(self, batch: pa.RecordBatch) -> "pa.RecordBatch | None":
        """Records of this task's key-groups, in order per key; what it gives goes on."""
        raise NotImplementedError

    def advance(self, time: int) -> "pa.RecordBatch | None":
        """Event time has come so far: no earlier record will come."""
        return None


@dataclass
class Stage:
    """Tasks that do the same. The first stage of a job is its source, the last one its sink."""

    name: str
    parallelism: int
    read: Read | None = None  # of a source
    key: Key | None = None  # of a keyed stage
    operator: Callable[[], KeyedOperator] | None = None
    maps: list[Map] = field(default_factory=list)  # on what goes on
    folder: str | None = None  # of a sink

    @property
    def kind(self) -> str:
        return "source" if self.read else "keyed" if self.key else "sink"

    def tasks(self) -> list[str]:
        return [f"{self.name}-{index}" for index in range(self.parallelism)]


class Job:
    """Stages in a row."""

    def __init__(self, name: str) -> None:
        self.name = _check_name(name)
        self.stages: list[Stage] = []
        self._key: tuple[tuple[str, ...], KeyType, int] | None = None

    def source(self, read: Read, *, parallelism: int = 1, name: str = "source") -> "Job":
        """Where records come from; see Read."""
        if self.stages:
            raise ArgumentError(f"job {self.name!r} has a source already. It has one.")
        return self._add(Stage(name, parallelism, read=read))

    def map(self, function: Map) -> "Job":
        """Changes each batch on its way, in the process that makes it."""
        if not self.stages or self._key or self.stages[-1].kind == "sink":
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
        if not self.stages or self._key or self.stages[-1].kind == "sink":
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
        self._key = (columns, key, key_groups)
        return self

    def process(
        self,
        operator: Callable[[], KeyedOperator],
        *,
        parallelism: int = 2,
        name: str | None = None,
    ) -> "Job":
        """A keyed stage: a KeyedOperator class, or what makes one."""
        if self._key is None:
            raise ArgumentError("process() needs a key. Call key_by() before it.")
        if not callable(operator):
            raise ArgumentError(f"{shorten(operator)} makes no KeyedOperator. Pass the class.")
        columns, key_type, groups = self._key
        if parallelism > groups:
            raise ArgumentError(f"{parallelism} tasks cannot share {groups} key-groups.")
        self._key = None
        keyed = sum(stage.kind == "keyed" for stage in self.stages)
        key = Key(columns, key_type, groups)
        return self._add(
            Stage(name or f"stage{keyed + 1}", parallelism, key=key, operator=operator)
        )

    def sink(self, folder: "str | Path", *, name: str = "sink") -> "Job":
        """Where results go: Arrow files in a folder, which appear with the checkpoints."""
        if self._key or not self.stages or self.stages[-1].kind == "sink":
            raise ArgumentError("sink() comes last, after source() or process(), and once.")
        return self._add(Stage(name, 1, folder=str(folder)))

    def _add(self, stage: Stage) -> "Job":
        _check_name(stage.name)
        if any(stage.name == other.name for other in self.stages):
            raise ArgumentError(f"job {self.name!r} has two stages named {stage.name!r}.")
        if type(stage.parallelism) is not int or not 1 <= stage.parallelism <= 256:
            raise ArgumentError(f"parallelism={shorten(stage.parallelism)}: pass 1 to 256.")
        if self.stages and self.stages[-1].kind == "sink":
            raise ArgumentError("nothing comes after sink().")
        self.stages.append(stage)
        return self

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
        lines.append(" -> ".join(_shape(stage) for stage in self.stages))
        lines.append("")
        for stage, after in zip(self.stages, [*self.stages[1:], None], strict=True):
            tasks = ", ".join(stage.tasks())
            way = f"  ==[{_way(after)}]==> {after.name}" if after else ""
            lines.append(f"  {stage.name:<12} {stage.parallelism} process(es): {tasks}{way}")
        return "\n".join(lines)


def _shape(stage: Stage) -> str:
    maps = "".join(f" | {getattr(one, '__name__', 'map')}" for one in stage.maps)
    if stage.key:
        return f"[{stage.name} by {', '.join(stage.key.columns)}{maps}]"
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


def load_job(reference: str) -> Job:
    """The job that "package.module:name" or "path/file.py:name" names; `job` unless told."""
    where, _, name = reference.partition(":")
    name = name or "job"
    try:
        if where.endswith(".py"):
            path = Path(where).resolve()
            spec = importlib.util.spec_from_file_location(f"statekit_job_{path.stem}", path)
            if spec is None or spec.loader is None or not path.is_file():
                raise EngineError(f"there is no file {where!r} to take a job from.")
            module = importlib.util.module_from_spec(spec)
            sys.modules[f"statekit_job_{path.stem}"] = module  # dataclasses look their module up
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name != where:
            raise
        raise EngineError(
            f"there is no module {where!r} to take a job from. Name a module or a .py file, such "
            "as jobs/wordcount.py:job."
        ) from None
    found = getattr(module, name, None)
    if not isinstance(found, Job):
        raise EngineError(f"{where!r} has no Job named {name!r}.")
    found.check()
    return found
