"""Deployment: the processes of a job, who is whose sender, and who has which key-groups.

What the coordinator knows of one generation of processes, and how it talks to them. Starting,
scaling and recovering change it; they are scripts (scaling.py, coordinator.py).
"""

import os
import queue
import secrets
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

from statekit.assignment import assign
from statekit.engine.checkpoints import JobCheckpoint, place_of
from statekit.engine.control import Control
from statekit.engine.frames import groups_to_plain
from statekit.engine.items import FIRST, Barrier, Move
from statekit.engine.job import Job, Stage
from statekit.engine.turns import Turns
from statekit.errors import EngineError

Message: TypeAlias = dict[str, Any]
JOIN_SECONDS = 120.0  # for a process to start, and to say so
SAID_SECONDS = 0.02  # after the end of a process, in which what it said last is heard
REJOIN_SECONDS = 5.0  # for one that runs to become another task

#: What takes several steps: a generator that yields what it waits for.
Script: TypeAlias = Generator[Callable[[], bool], None, None]


class Joined:
    """A process that somebody has started by hand. What of a Popen is needed here."""

    returncode = -signal.SIGKILL  # nobody tells who is not its parent

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)  # it stays this process, whoever gets its number later

    def poll(self) -> int | None:
        return self.returncode if select.select([self._fd], [], [], 0)[0] else None

    def wait(self) -> None:
        select.select([self._fd], [], [])

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)


class Process:
    """A task's process, as the coordinator knows it."""

    def __init__(self, name: str, stage: Stage, popen: "subprocess.Popen[bytes] | Joined") -> None:
        self.name = name
        self.stage = stage
        self.popen = popen
        self.control: Control | None = None
        self.address = ""  # for its senders
        self.provider = ""  # for other owners of state
        self.is_ready = False
        self.is_finished = False
        self.is_gone = False  # it ended before it said that it is there
        self.is_kept = False  # the process was another task before

    def tell(self, kind: str, **fields: Any) -> None:
        """Says something. If the process has gone, somebody else notices."""
        assert self.control is not None
        with suppress(EngineError):
            self.control.send(kind, **fields)

    def stop(self) -> None:
        """At once: nothing that it holds counts."""
        self.popen.kill()
        self.popen.wait()
        if self.control is not None:
            self.control.close()


class Deployment:
    """See above. The coordinator's thread alone calls it, and changes it."""

    def __init__(
        self, job: Job, reference: str, folder: Path, address: str, spares: int = 0
    ) -> None:
        """address: where the coordinator listens. spares: processes that wait to be needed."""
        self.job = job
        self.reference = reference
        self.folder = folder
        self.address = address
        self.spares = spares
        self.idle: list[Process] = []  # that can become any task, and have imported everything
        self.events: queue.Queue[Callable[[], None]] = queue.Queue()
        self.parallelism = {stage.name: stage.parallelism for stage in job.stages}
        self.shares: dict[str, list[int]] = {}  # by stage: which task has each key-group, if told
        self.token = secrets.token_urlsafe(24)  # of those who may fetch state: our processes
        self.generation = 0
        self.version = 0  # of the routing
        self.last = 0  # the newest checkpoint
        self.forget()

    def forget(self) -> None:
        """Another generation begins: nothing is known of its processes."""
        self.processes: dict[str, Process] = {}
        self.owners: dict[str, list[str]] = {}  # by stage: the task of each key-group
        self.turns = Turns()
        self.unsettled: dict[int, set[str]] = {}  # moves, and the tasks that have work left
        self.opened: set[tuple[str, str]] = set()  # channels: receiver, sender
        self.completed: set[str] = set()  # tasks that have brought all of their state here
        # State on its way: the move, the old owner and the new one.
        self.arriving: set[tuple[int, str, str]] = set()
        self.copying: set[tuple[str, str]] = set()  # old owners and new ones
        self.weights: dict[str, list[int]] = {}  # by task: of key-groups, as it was asked for
        self.names_used: set[str] = set()
        self.holds_barriers = False
        self.is_started = False

    @property
    def is_calm(self) -> bool:
        """Nothing is under way: neither a move nor a barrier."""
        return self.turns.is_idle and not self.unsettled

    def begin(self, begun: list[Move | Barrier]) -> None:
        """The turn of these has come."""
        raise NotImplementedError

    # ---- Who there is

    def living(self, stage: Stage) -> list[Process]:
        return [p for p in self.processes.values() if p.stage is stage and not p.is_finished]

    def tasks(self, stage: Stage) -> list[str]:
        return [process.name for process in self.living(stage)]

    def senders(self, stage: Stage) -> list[Process]:
        return [process for before in self.job.before(stage) for process in self.living(before)]

    def tell_senders(self, stage: Stage, kind: str, **fields: Any) -> None:
        for process in self.senders(stage):
            process.tell(kind, **fields)

    # ---- Starting

    def deploy(self) -> None:
        """Starts all processes; starting() tells them what to do."""
        for stage in self.job.stages:
            names = [f"{stage.name}-{at}" for at in range(self.parallelism[stage.name])]
            for name in names:
                self.spawn(name, stage)
            if stage.key is not None:
                parts = enumerate(assign(stage.key.key_groups, len(names)))
                even = [index for index, part in parts for _ in part]
                shares = self.shares.get(stage.name, even)
                self.owners[stage.name] = [names[index] for index in shares]
            else:
                self.owners[stage.name] = [names[0]]
            if stage.kind != "source":
                for name in names:
                    self.turns.come(name)

    def starting(self, checkpoint: JobCheckpoint | None) -> Script:
        """From the last stage to the first: who sends needs somebody who receives."""
        yield from self._rejoining()
        yield from self.joining(self.processes)
        for stage in reversed(self.job.stages):
            for process in (some := self.living(stage)):
                self.send_start(process, checkpoint)
            if stage.kind != "source":
                yield lambda some=some: all(p.is_ready for p in some)  # type: ignore[misc]
        self.is_started = True

    def _rejoining(self) -> Script:
        """Processes that are used again. Those that do not hear of it in time are replaced."""
        kept = [process for process in self.processes.values() if process.is_kept]
        until = monotonic() + REJOIN_SECONDS
        self.wake_in(REJOIN_SECONDS)
        yield lambda: monotonic() >= until or all(process.control for process in kept)
        for process in kept:
            if process.control is None:
                self.processes[process.name] = self._begin(process.name, process.stage)
                process.stop()

    def joining(self, names: Collection[str]) -> Script:
        """Until these processes are there. EngineError if one does not come: then none stays."""
        some = [self.processes[name] for name in names]
        until = monotonic() + JOIN_SECONDS
        self.wake_in(JOIN_SECONDS)
        yield (
            lambda: (
                all(process.control for process in some)
                or any(process.is_gone for process in some)
                or monotonic() >= until
            )
        )
        if missing := [process for process in some if process.control is None]:
            first = next((process for process in missing if process.is_gone), missing[0])
            why = (
                f"ended with exit code {first.popen.returncode}: see what it printed"
                if first.is_gone
                else f"has not come within {JOIN_SECONDS:.0f} s"
            )
            for process in some:
                del self.processes[process.name]
                process.stop()
            raise EngineError(f"process {first.name} {why}. It was to join the job.")

    def wake_in(self, seconds: float, call: Callable[[], None] = lambda: None) -> None:
        """Calls it then; and scripts look whether what they wait for is so."""
        timer = threading.Timer(seconds, self.events.put, (call,))
        timer.daemon = True
        timer.start()

    def note_shares(self, stage: Stage) -> None:
        """A stage is as somebody wants it: so it will be after a recovery."""
        names = self.tasks(stage)
        self.parallelism[stage.name] = len(names)
        self.shares[stage.name] = [names.index(owner) for owner in self.owners[stage.name]]

    def spawn(self, name: str, stage: Stage) -> None:
        """A process for a task: an idle one, or a new one."""
        self.names_used.add(name)
        idle = [one for one in self.idle if one.control is not None and one.popen.poll() is None]
        if not idle:
            self.processes[name] = self._begin(name, stage)
            return
        old = max(idle, key=lambda one: (one.name == name, bool(one.name) and one.stage is stage))
        self.idle.remove(old)
        process = self.processes[name] = Process(name, stage, old.popen)
        process.is_kept = True
        old.tell("again", task=name, generation=self.generation)
        self._observe(process)

    def _begin(self, name: str, stage: Stage) -> Process:
        """A new process; without a name it is a spare one."""
        command = [sys.executable, "-m", "statekit.engine.process"]
        command += [self.address, name, str(self.generation), self.reference]
        # A session of its own: Ctrl-C is for us, and we end it.
        process = Process(name, stage, subprocess.Popen(command, start_new_session=True))
        self._observe(process)
        return process

    def _observe(self, process: Process) -> None:
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def join(self, pid: int) -> Process | None:
        """A process that was started by hand: a spare one. None if it has gone already."""
        try:
            process = Process("", self.job.stages[0], Joined(pid))
        except ProcessLookupError:
            return None
        self.idle.append(process)
        self._observe(process)
        return process

    def keep(self) -> None:
        """A generation ends. Processes that can be used again are idle then, others are stopped."""
        for process in self.processes.values():
            if process.control and not process.is_finished and process.popen.poll() is None:
                self.idle.append(process)
            else:
                process.stop()

    def refill(self) -> None:
        """As many spare processes as there are to be. Ours that are too many end."""
        alive = [one for one in self.idle if one.popen.poll() is None]
        joined = [one for one in alive if isinstance(one.popen, Joined)]
        ours = [one for one in alive if one not in joined]
        while len(ours) > self.spares:
            ours.pop().stop()
        while len(ours) < self.spares:
            ours.append(self._begin("", self.job.stages[0]))
        self.idle = joined + ours

    def _watch(self, process: Process) -> None:
        process.popen.wait()
        # What it has said comes first, by another thread.
        self.wake_in(SAID_SECONDS, lambda: self.gone(process))

    def gone(self, process: Process) -> None:
        """A process has ended."""
        raise NotImplementedError

    def send_start(self, process: Process, checkpoint: JobCheckpoint | None) -> None:
        stage, name = process.stage, process.name
        start: Message = {"checkpoint": self.last, "generation": self.generation}
        if stage.kind == "source":
            start["position"] = checkpoint.positions[name] if checkpoint else None
        else:
            start["channels"] = [sender.name for sender in self.senders(stage)]
        if stage.kind == "keyed":
            owned = [g for g, owner in enumerate(self.owners[stage.name]) if owner == name]
            start["owned"] = groups_to_plain(owned)
            start["token"] = self.token
            start["time"] = checkpoint.times.get(stage.name, FIRST) if checkpoint else FIRST
            start["place"] = place_of(self.folder, stage.name)
        if (after := self.job.after(stage)) is not None:
            start["outputs"] = {
                "owners": self.owners[after.name],
                "receivers": {p.name: p.address for p in self.living(after) if p.is_ready},
                "version": self.version,
            }
        process.tell("start", **start)

    def stop(self) -> None:
        for process in (*self.processes.values(), *self.idle):
            process.stop()
