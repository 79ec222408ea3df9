"""Coordinator: what is to happen in a job, and when: checkpoints, rescales, recovery, the end.

One thread takes events in turns: messages of the processes, processes that have gone, commands of
users (running.py). Nothing else touches what it knows. What takes several steps, such as a rescale,
is a script, which goes on when that is so which it waits for. One script runs at a time.

If a process is lost, all tasks begin anew from the newest checkpoint, at the parallelism that they
had. The other processes stay, without their state: they have imported everything. (An error of the
job itself, in an operator or a source, ends the job: it would come again.)

A job ends when all sources have said that they have no more records, and nothing is under way:
then they are told to send their end. When everything has reached the sink, that is written down,
and all results appear.
"""

import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from statekit.engine.channel import listen
from statekit.engine.checkpoints import HOMES, JobCheckpoint, end, has_ended, newest
from statekit.engine.control import SAID_WHY, Control
from statekit.engine.deployment import Deployment, Message, Process, Script
from statekit.engine.frames import move_to_plain
from statekit.engine.items import Barrier, Move
from statekit.engine.job import Stage
from statekit.engine.loading import load_job
from statekit.engine.metrics import told
from statekit.engine.rescales import Rescale
from statekit.engine.scaling import Goal, rescaling, weighing
from statekit.engine.sink import publish_all
from statekit.engine.strategies import RESTART, How
from statekit.errors import EngineError

LOST_SECONDS = 0.1  # after which a task that has lost another one is believed
RECOVERIES_MAX = 20  # of one job: a machine that loses a process that often is broken


@dataclass(eq=False)
class _Running:
    """A script, who waits for its end, and what it waits for itself."""

    script: Script
    future: "Future[Any]"
    rescale: Rescale | None = None
    goal: Goal | None = None
    aborts: "list[Future[Any]]" = field(default_factory=list)  # who wants it to be cut short
    is_due: Callable[[], bool] = lambda: True


class Coordinator(Deployment):
    def __init__(self, reference: str, folder: Path, spares: int = 0) -> None:
        job = load_job(reference)
        folder.mkdir(parents=True, exist_ok=True)
        # A path of a Unix socket is short: it cannot be in a folder of any name.
        self._sockets = tempfile.TemporaryDirectory(prefix="statekit-")
        super().__init__(job, reference, folder, f"{self._sockets.name}/control", spares)
        self._listener = listen(self.address)
        self.rescales: list[Rescale] = []
        self.done: Future[None] = Future()
        self.recoveries = 0
        self._scripts: deque[_Running] = deque()
        self._asked: deque[Future[int]] = deque()  # checkpoints, while none may begin

    def forget(self) -> None:
        super().forget()
        self.figures: dict[str, dict[str, float]] = {}  # by task: as it said them last
        self._exhausted: set[str] = set()  # sources that have no more records
        self._is_ending = False  # they were told to end
        self._checkpoint: JobCheckpoint | None = None  # under way
        self._missing: set[str] = set()  # tasks that have not passed its barrier
        self._future: Future[int] | None = None  # who waits for it

    # ---- Events

    def run(self) -> None:
        """Until the job is done, or has failed."""
        threading.Thread(target=self._accept, daemon=True).start()
        try:
            if has_ended(self.folder):
                self._finish()
            else:
                # What is in homes of an earlier start is in the checkpoint, too, or never was.
                shutil.rmtree(self.folder / HOMES, ignore_errors=True)
                self._start()
            while not self.done.done():
                self.events.get()()
                self._go_on()
        except Exception as error:
            self.fail(error)
        finally:
            self.stop()
            self._listener.close()
            self._sockets.cleanup()

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def _accept(self) -> None:
        while True:
            try:
                made, _ = self._listener.accept()
            except OSError:  # closed: the job is over
                return
            threading.Thread(target=self._read, args=(Control(made),), daemon=True).start()

    def _read(self, control: Control) -> None:
        """Passes on what one process says."""
        process: list[Process] = []

        def arrive(message: Message) -> Callable[[], None]:
            return lambda: self._hear(control, process, message)

        with suppress(EngineError, OSError, ValueError):  # broken, or closed by us: _watch() tells
            while (message := control.receive()) is not None:
                self.events.put(arrive(message))
        control.close()

    def _hear(self, control: Control, known: list[Process], message: Message) -> None:
        if not known:
            process = self._who(message)
            if process is None or process.control is not None:
                control.close()  # a process of an earlier generation, or none at all
                return
            process.control, process.address = control, message["address"]
            known.append(process)
        elif self.processes.get(known[0].name) is known[0]:
            handler = getattr(self, f"_on_{message['kind']}", None)
            if handler is None:
                raise EngineError(f"{known[0].name} says {message['kind']!r}: nobody knows that.")
            handler(known[0], message)

    def _who(self, message: Message) -> Process | None:
        """Whose first message this is; None for a process of an earlier generation."""
        if message["kind"] != "hello":
            return None
        if name := message["task"]:
            is_now = message["generation"] == self.generation
            return self.processes.get(name) if is_now else None
        pid = message["pid"]
        known = (one for one in self.idle if one.popen.pid == pid)
        return next(known, None) or self.join(pid)

    def gone(self, process: Process) -> None:
        """If it knew that it would end, it has said so, or says so now."""
        code = process.popen.returncode
        if self.processes.get(process.name) is not process or process.is_finished:
            return
        if process.control is None and code >= 0:
            process.is_gone = True  # whoever waits for it says what that means
            return
        if code in (0, SAID_WHY):
            return
        if code > 0:
            raise EngineError(f"{process.name} ended with exit code {code}: see what it printed.")
        self._recover(f"{process.name} was killed by signal {-code}")

    # ---- What processes say

    def _on_ready(self, process: Process, message: Message) -> None:
        process.provider, process.is_ready = message["provider"], True

    def _on_marked(self, process: Process, message: Message) -> None:
        self.begin(self.turns.marked(process.name, message["version"]))

    def _on_settled(self, process: Process, message: Message) -> None:
        waiting = self.unsettled[message["version"]]
        waiting.discard(process.name)
        if not waiting:
            del self.unsettled[message["version"]]

    def _on_let_go(self, process: Process, message: Message) -> None:
        new = self.processes[message.pop("to")]
        new.tell("take", old=process.name, **_fields(message))

    def _on_taken(self, process: Process, message: Message) -> None:
        old = self.processes[message["old"]]
        old.tell("taken", version=message["version"], by=process.name)

    def _on_arrived(self, process: Process, message: Message) -> None:
        process.tell("handed_over", **_fields(message))

    def _on_delivered(self, process: Process, message: Message) -> None:
        self.arriving.discard((message["version"], message["old"], process.name))
        if rescale := self.rescale:
            rescale.bytes += message["bytes"]

    def _on_copied(self, process: Process, message: Message) -> None:
        if message["is_ready"]:
            self.copying.discard((message["old"], process.name))
        if rescale := self.rescale:
            rescale.bytes += message["bytes"]
            rescale.bytes_copied += message["bytes"]

    def _on_parked(self, process: Process, message: Message) -> None:
        if rescale := self.rescale:
            rescale.backlog = max(rescale.backlog, message["bytes"])

    def _on_weights(self, process: Process, message: Message) -> None:
        self.weights[process.name] = message["weights"]

    def _on_figures(self, process: Process, message: Message) -> None:
        known = self.figures.get(process.name, {})
        self.figures = {**self.figures, process.name: told(known, message, monotonic())}

    def _on_opened(self, process: Process, message: Message) -> None:
        self.opened.add((process.name, message["task"]))

    def _on_completed(self, process: Process, message: Message) -> None:
        self.completed.add(process.name)

    def _on_exhausted(self, process: Process, message: Message) -> None:
        self._exhausted.add(process.name)

    def _on_drained(self, process: Process, message: Message) -> None:
        """Everything has reached the sink."""
        end(self.folder)
        self._finish()

    def _finish(self) -> None:
        """What is done here is done again if the coordinator is killed before the end of it."""
        folder = self.job.stages[-1].folder
        assert folder is not None
        publish_all(folder)
        self.done.set_result(None)

    def _on_passed(self, process: Process, message: Message) -> None:
        checkpoint = self._checkpoint
        if checkpoint is not None and checkpoint.number == message["number"]:
            if process.stage.kind == "source":
                checkpoint.positions[process.name] = message["position"]
            elif process.stage.kind == "keyed":
                checkpoint.parts.setdefault(process.stage.name, []).append(message["part"])
                if (time := message["time"]) is not None:
                    times, name = checkpoint.times, process.stage.name
                    times[name] = min(time, times.get(name, time))
            self._missing.discard(process.name)
            self._complete()
        if process.stage.kind != "source":
            self.begin(self.turns.passed(process.name, message["number"]))

    def _on_finished(self, process: Process, message: Message) -> None:
        process.is_finished = True
        self.begin(self.turns.gone(process.name))

    def _on_failed(self, process: Process, message: Message) -> None:
        if message["is_lost"]:  # another one has gone: mostly we hear of that one, too
            self.wake_in(LOST_SECONDS, self._recovering(f"{process.name} has lost another process"))
        else:
            self.fail(EngineError(f"{process.name} failed:\n{message['text']}"))

    def _recovering(self, why: str) -> Callable[[], None]:
        """Recovers, if that was not done before it is called."""
        generation = self.generation
        return lambda: self._recover(why) if self.generation == generation else None

    # ---- Turns

    def begin(self, begun: list[Move | Barrier]) -> None:
        for what in begun:
            if isinstance(what, Move):
                stage = self.processes[what.changes[0].old].stage
                self.tell_senders(stage, "move", move=move_to_plain(what))
            else:
                self._begin_checkpoint(what.number)

    # ---- Checkpoints

    def ask_checkpoint(self, future: "Future[int]") -> None:
        if self._is_ending:
            future.set_exception(EngineError("the job is about to end: its sources have ended."))
        elif not self._may_checkpoint():
            self._asked.append(future)
        else:
            self._future = future
            self.begin(self.turns.ask(Barrier(self.last + 1)))

    def _may_checkpoint(self) -> bool:
        return self.is_started and self._future is None and not self.holds_barriers

    def _begin_checkpoint(self, number: int) -> None:
        self._checkpoint = JobCheckpoint(number, {}, {})
        sources = [p for stage in self.job.sources for p in self.living(stage)]
        self._missing = {p.name for p in sources} | self.turns.tasks
        for process in sources:
            process.tell("barrier", number=number)

    def _complete(self) -> None:
        """Publishes the checkpoint, if all of it is there."""
        checkpoint = self._checkpoint
        if checkpoint is None or self._missing:
            return
        checkpoint.write(self.folder)
        checkpoint.publish(self.folder)
        checkpoint.collect(self.folder)
        self.last = checkpoint.number
        for process in self.living(self.job.stages[-1]):
            process.tell("published", number=checkpoint.number)
        self._checkpoint = None
        future, self._future = self._future, None
        if future is not None:
            future.set_result(checkpoint.number)

    # ---- Scripts

    def _go_on(self) -> None:
        """Everything that may be done now."""
        while self._scripts and self._scripts[0].is_due():
            first = self._scripts[0]
            try:
                first.is_due = next(first.script)
            except StopIteration:
                self._end(first)
            except EngineError as error:
                self._end(first, error)
        if self._asked and self._may_checkpoint():
            self.ask_checkpoint(self._asked.popleft())
        sources = {name for stage in self.job.sources for name in self.tasks(stage)}
        if self._may_checkpoint() and not self._scripts and self._exhausted == sources:
            self._is_ending = True
            for name in sources:
                self.processes[name].tell("end")
            self._exhausted = set()

    def _end(self, one: _Running, error: EngineError | None = None) -> None:
        """A script is over."""
        if self._scripts and self._scripts[0] is one:
            self.holds_barriers = False
        one.script.close()
        if one in self._scripts:  # a restart has put another one in front of it
            self._scripts.remove(one)
        if (rescale := one.rescale) is not None:
            rescale.finish(*(("failed", str(error)) if error else _end_of(rescale)))
            if error is None and rescale.end != "done":
                error = EngineError(
                    f"rescale {rescale.number} of {rescale.stage} was {rescale.end}: "
                    f"{rescale.reason}."
                )
            for future in one.aborts:
                future.set_result(rescale)
        if error is not None:
            one.future.set_exception(error)
        else:
            one.future.set_result(rescale)
        if not self._scripts and self.is_started:
            self.refill()

    # ---- Rescales

    @property
    def rescale(self) -> Rescale | None:
        """The one that is under way."""
        return self._scripts[0].rescale if self._scripts else None

    def ask_rescale(
        self, name: str, goal: Goal, how: How, cause: str, future: "Future[Any]"
    ) -> None:
        """A new number of workers supersedes the one before it; all else waits for its turn."""
        try:
            stage = self._check(name, goal, how)
        except EngineError as error:
            future.set_exception(error)
            return
        number = len(self.rescales) + 1
        rescale = Rescale(number, name, str(goal), cause, how, len(self.tasks(stage)))
        if goal.workers:
            for one in [*self._scripts]:
                if one.goal and one.goal.workers and one.rescale and one.rescale.stage == name:
                    self._cut_short(one, "superseded", f"rescale {number} came: {goal}")
        self.rescales.append(rescale)
        script = self._rescaling(stage, goal, rescale)
        self._scripts.append(_Running(script, future, rescale, goal))

    def _check(self, name: str, goal: Goal, how: How) -> Stage:
        if self._is_ending:
            raise EngineError("the job is about to end: its sources have ended.")
        how.check()
        if self.job.settings.is_fixed and how.strategy != RESTART:
            raise EngineError(
                "the job is fixed: its settings say is_fixed = true. It can be scaled by 'restart'."
            )
        stage = self.job.stage(name)
        if stage.key is None:
            raise EngineError(f"stage {name!r} has no key: only keyed stages are scaled.")
        goal.check(stage.key.key_groups)
        if not any(one.rescale for one in self._scripts):  # else it counts when its turn comes
            goal.check_tasks(self.tasks(stage))
        return stage

    def ask_abort(self, number: int | None, future: "Future[Any]") -> None:
        """number: of a rescale; the one that is under way unless told."""
        for one in self._scripts:
            if one.rescale and number in (None, one.rescale.number):
                if not self._cut_short(one, "aborted", "somebody asked for it"):
                    phase = one.rescale.phase
                    text = f"rescale {one.rescale.number} is {phase}: too late to abort it."
                    future.set_exception(EngineError(text))
                elif one.rescale.end:
                    future.set_result(one.rescale)
                else:
                    one.aborts.append(future)
                return
        what = "no rescale" if number is None else f"no rescale {number}"
        future.set_exception(EngineError(f"{what} is under way or waits for its turn."))

    def _cut_short(self, one: _Running, end: str, reason: str) -> bool:
        """Whether a rescale ends early; at once, if it has not begun."""
        rescale = one.rescale
        assert rescale is not None
        if not rescale.may_be_cut_short or rescale.wanted_end == "aborted":
            return False
        rescale.wanted_end, rescale.reason = end, reason
        if rescale.phase == "waiting":
            self._end(one)
        return True

    def _rescaling(self, stage: Stage, goal: Goal, rescale: Rescale) -> Script:
        rescale.before = rescale.after = len(self.tasks(stage))
        goal.check_tasks(self.tasks(stage))
        if rescale.how.strategy == RESTART:
            yield from self._restarting(stage, goal, rescale)
        else:
            yield from rescaling(self, stage, goal, rescale, self._taking_checkpoint)

    def _taking_checkpoint(self) -> Script:
        taken: Future[int] = Future()
        self.ask_checkpoint(taken)
        yield taken.done

    def _restarting(self, stage: Stage, goal: Goal, rescale: Rescale) -> Script:
        """Stops at a checkpoint, and begins again from it."""
        rescale.enter("restarting")
        owners, names = self.owners[stage.name], goal.names(self, stage)
        weights = yield from weighing(self, stage)
        yield from self._taking_checkpoint()
        target = goal.owners(owners, names, weights)
        rescale.groups = sum(old != now for old, now in zip(owners, target, strict=True))
        self.parallelism[stage.name] = rescale.after = len(names)
        self.shares[stage.name] = [names.index(name) for name in target]
        self._renew()
        yield lambda: self.is_started
        rescale.moved = rescale.groups

    # ---- Beginning, recovering, ending

    def _start(self) -> None:
        """All processes, from the newest checkpoint if there is one."""
        checkpoint = newest(self.folder)
        self.last = checkpoint.number if checkpoint else 0
        self.deploy()
        started: Future[None] = Future()
        self._scripts.appendleft(_Running(self.starting(checkpoint), started))
        started.add_done_callback(self._note_started)

    def _note_started(self, started: "Future[None]") -> None:
        error = started.exception()
        if isinstance(error, EngineError):
            self.fail(error)

    def _renew(self) -> None:
        """Another generation of processes, from the newest checkpoint."""
        self.keep()
        if self._future is not None:  # a checkpoint was cut off: whoever waits gets the next one
            self._asked.appendleft(self._future)
        self.generation += 1
        self.forget()
        self._start()

    def _recover(self, why: str) -> None:
        self.recoveries += 1
        if self.recoveries > RECOVERIES_MAX:
            raise EngineError(f"{why}, and the job was recovered {RECOVERIES_MAX} times already.")
        scripts, self._scripts = self._scripts, deque()
        self._renew()
        back = f"{why}: the job went back to checkpoint {self.last or 'none'}."
        for one in scripts:
            if one.rescale:  # else it started the processes, and nobody waits for that
                self._end(one, EngineError(back))


def _fields(message: Message) -> Message:
    """What a message says, to be said to somebody else."""
    return {name: value for name, value in message.items() if name not in ("kind", "bytes")}


def _end_of(rescale: Rescale) -> tuple[str, str]:
    return rescale.wanted_end or "done", rescale.reason
