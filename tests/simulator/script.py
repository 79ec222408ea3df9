"""ScriptedRun: one migration with a checkpoint in it, and crashes at chosen events.

w0 has four leaves and a complete checkpoint; two of them go to w1 while records come and the next
checkpoint is taken. An event is that a process handles a message, or that something becomes
durable: a part of a checkpoint, the coordinator's record. Without faults the events are the same
every time, so every single crash can be tried, and every pair.
"""

from typing import Any, NamedTuple

from .run import Run
from .worker import Worker

ROLES = ("source", "target", "coordinator")
BEFORE, SILENT, AFTER = "before", "silent", "after"


class Crash(NamedTuple):
    event: int
    role: str
    when: str  # SILENT: after the event, but the messages that it caused are lost
    restarts: bool


class ScriptedRun(Run):
    def __init__(
        self,
        crashes: tuple[Crash, ...] = (),
        barrier_at: int = 4,
        trace: list[str] | None = None,
    ) -> None:
        super().__init__(0, trace=trace, workers=2, leaves=4, keys=2)
        self.barrier_at = barrier_at  # the event at which the checkpoint is asked for
        self.spares, self.large, self.streaming = True, True, 1.0
        self.crashes = crashes
        self.events = -1  # not counted yet

    def play(self) -> None:
        self.boot()
        for leaf in range(4):
            self.world.emit(leaf, 0)
        self.calm()
        self.events = 0
        chief = self.leader()
        assert chief is not None
        chief.act(chief.coordinator.rescale(["w0", "w0", "w1", "w1"]))
        self.calm()
        self.check_end()
        for leaf in range(4):
            self.world.emit(leaf, 0)
        self.calm()
        self.check_end()

    def boot(self) -> None:
        self.start_chief()
        self.calm(is_boot=True)

    # ---- Events

    def deliver(self, index: int) -> None:
        self._event(lambda: self.network and Run.deliver(self, index))

    def land(self, index: int, is_lost: bool = False) -> None:
        self._event(lambda: self.writes and Run.land(self, index, is_lost))

    def finish_job(self, worker: Worker) -> None:
        self._event(lambda: worker.jobs and Run.finish_job(self, worker))

    def _event(self, happen: Any) -> None:
        if self.events < 0:
            happen()
            return
        event = self.events
        self.events += 1
        if event in (self.barrier_at + 4, self.barrier_at + 9):
            for leaf in (1, 2, 3):
                self.world.emit(leaf, event % 2)
        chief = self.leader() if event == self.barrier_at else None
        if chief is not None:
            chief.act(chief.coordinator.checkpoint())
        now = [crash for crash in self.crashes if crash.event == event]
        for crash in now:
            if crash.when is BEFORE:
                self._strike(crash)
        said = len(self.network)
        happen()
        for crash in now:
            if crash.when is SILENT:
                name = self._name_of(crash.role)
                fresh = self.network[max(said - 1, 0) :]
                self.network = self.network[: max(said - 1, 0)]
                self.network += [entry for entry in fresh if entry[1] != name]
            if crash.when is not BEFORE:
                self._strike(crash)

    def _name_of(self, role: str) -> str:
        if role == "coordinator":
            return next(iter(self.chiefs), "")
        worker = "w0" if role == "source" else "w1"
        return f"{worker}.{self.incarnations[worker]}"

    def _strike(self, crash: Crash) -> None:
        name = self._name_of(crash.role)
        if name in self.workers or name in self.chiefs:
            self.crash(name)
            if crash.restarts and crash.role == "coordinator":
                self.start_chief()
            elif crash.restarts:
                self.start_worker(name.split(".")[0])
        if not self.workers:
            self.start_worker("w0")


def events(barrier_at: int) -> int:
    """How many events there are without crashes."""
    run = ScriptedRun(barrier_at=barrier_at)
    run.play()
    return run.events


def single_crashes(count: int) -> list[Crash]:
    return [
        Crash(event, role, when, restarts)
        for event in range(count)
        for role in ROLES
        for when in (BEFORE, SILENT, AFTER)
        for restarts in (False, True)
    ]
