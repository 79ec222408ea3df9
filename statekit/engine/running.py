"""Running: a job that runs, for programs. The command line and the API use nothing else.

with start("jobs/wordcount.py:job", folder) as running:
    running.scale("count", workers=4)       # while records flow
    running.drain("count-0")
    running.checkpoint()
    running.wait()
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

from statekit.assignment import KeyGroups, group_ranges
from statekit.engine.coordinator import Coordinator
from statekit.engine.job import Stage
from statekit.engine.metrics import Figures
from statekit.engine.rescales import Rescale
from statekit.engine.scaling import Goal
from statekit.engine.settings import Settings
from statekit.engine.strategies import How
from statekit.errors import EngineError


class Running:
    """A job that runs. Any thread may call this."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._thread = threading.Thread(target=coordinator.run, daemon=True)
        self._thread.start()

    def scale(
        self,
        stage: str,
        workers: int,
        strategy: str | None = None,
        *,
        cause: str = "asked",
        **how: Any,
    ) -> Rescale:
        """Gives a keyed stage so many tasks, while records flow; waits until that is done.

        strategy: that of the job's settings unless told.
        how: step=, gap_s= and pace=, see How. Another number of workers that is asked for
        meanwhile supersedes this one: EngineError, as for one that was aborted or has failed.
        """
        return self._rescale(stage, Goal(workers), self._how(strategy, how), cause)

    def drain(
        self, worker: str, strategy: str | None = None, *, cause: str = "asked", **how: Any
    ) -> Rescale:
        """Gives all key-groups of a task to the others of its stage, and ends it."""
        stage = worker.rpartition("-")[0] or worker
        return self._rescale(stage, Goal(without=worker), self._how(strategy, how), cause)

    def move(
        self,
        stage: str,
        key_groups: KeyGroups,
        to: str,
        strategy: str | None = None,
        *,
        cause: str = "asked",
        **how: Any,
    ) -> Rescale:
        """Gives key-groups to a task of one's choice."""
        groups = frozenset(group for part in group_ranges(key_groups) for group in part)
        return self._rescale(stage, Goal(groups=groups, to=to), self._how(strategy, how), cause)

    def _how(self, strategy: str | None, how: dict[str, Any]) -> How:
        return How(strategy or self._coordinator.job.settings.strategy, **how)

    def abort_rescale(self, number: int | None = None) -> Rescale:
        """Cuts a rescale short: what has moved goes back. Waits until the stage is as it was."""
        found: Rescale = self._ask(lambda future: self._coordinator.ask_abort(number, future))
        return found

    def _rescale(self, stage: str, goal: Goal, how: How, cause: str) -> Rescale:
        found: Rescale = self._ask(
            lambda future: self._coordinator.ask_rescale(stage, goal, how, cause, future)
        )
        return found

    def checkpoint(self) -> int:
        """Takes a checkpoint of the whole job; its number."""
        number: int = self._ask(self._coordinator.ask_checkpoint)
        return number

    def wait(self, timeout: float | None = None) -> None:
        """Until the job has ended. What it failed with is raised."""
        self._coordinator.done.result(timeout)
        self._thread.join(timeout)

    def stop(self) -> None:
        """Ends all processes, at once. The job can be started again from its last checkpoint."""
        self._coordinator.events.put(
            lambda: self._coordinator.fail(EngineError("the job was stopped."))
        )
        self._thread.join()

    @property
    def pids(self) -> dict[str, int]:
        """The processes, by task."""
        return {
            name: p.popen.pid
            for name, p in self._coordinator.processes.copy().items()
            if not p.is_finished
        }

    @property
    def spares(self) -> list[int]:
        """Processes that wait to be needed."""
        return [one.popen.pid for one in [*self._coordinator.idle] if one.control is not None]

    @property
    def address(self) -> str:
        """Where a process that is started by hand joins: statekit worker --join."""
        return self._coordinator.address

    def workers(self, stage: str) -> int:
        """How many tasks a stage has."""
        return self._coordinator.parallelism[self._coordinator.job.stage(stage).name]

    def owners(self, stage: str) -> list[str]:
        """The task of each key-group of a keyed stage."""
        return [*self._coordinator.owners[self._coordinator.job.stage(stage).name]]

    @property
    def settings(self) -> Settings:
        return self._coordinator.job.settings

    @property
    def stages(self) -> list[Stage]:
        """As the job was written."""
        return self._coordinator.job.stages

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or failed: wait() says which."""
        return self._coordinator.done.done()

    @property
    def rescales(self) -> list[Rescale]:
        """All that were asked for, the oldest first; those that are not over have no `end`."""
        return [*self._coordinator.rescales]

    @property
    def figures(self) -> Figures:
        """What all tasks count."""
        known, rescale = self._coordinator, self._coordinator.rescale
        now = (
            {
                "rescale_progress": rescale.progress,
                "rescale_moved_key_groups": rescale.moved,
                "rescale_bytes": rescale.bytes,
            }
            if rescale
            else {}
        )
        counts = {
            "checkpoints": known.last,
            "rescales": len(known.rescales),
            "recoveries": known.recoveries,
        }
        return Figures(known.job.name, known.figures, {**known.parallelism}, counts, now)

    def _ask(self, call: "Callable[[Future[Any]], None]") -> Any:
        future: Future[Any] = Future()
        self._coordinator.events.put(lambda: call(future))
        while True:
            with suppress(TimeoutError):
                return future.result(0.1)
            if not self._thread.is_alive() and not future.done():
                raise EngineError("the job has ended.")

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start(reference: str, folder: "str | Path", *, spares: int = 0) -> Running:
    """Starts a job, from its newest checkpoint if the folder has one.

    reference: "package.module:name" or "path/file.py:name". folder: where its checkpoints are.
    spares: processes that wait, with all imported: for a new worker, or until one is lost.
    """
    return Running(Coordinator(reference, Path(folder), spares))
