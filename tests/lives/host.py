"""Host: a process with providers, which does what the driver tells it, and can be killed.

The driver forks a host before the driver has threads or providers of its own, and talks to it over
a pair of pipes. A command is (name, arguments…); the answer is ("ok", result) or ("error", type,
text, trace).
"""

import faulthandler
import os
import pickle
import re
import select
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import statekit as sk
from statekit.assignment import subtract
from statekit.errors import NoCheckpointError
from statekit.homes import register_home
from statekit.provider.recording import whole_groups

from . import lock_order
from .forms import ERRORS, FORMS, Op, Spec

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(ROOT / "statekit") + os.sep
ANSWER_SECONDS_MAX = 240.0  # if an answer takes longer, something hangs
Command = tuple[Any, ...]


class HostError(AssertionError):
    """A command raised what it must not raise."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind = kind
        self.text = text


class HostDied(AssertionError):
    """The process ended by itself, or hangs."""


# ---- The driver's side


class Host:
    """A process, as its driver sees it."""

    def __init__(self, number: int, log: Path) -> None:
        self.number = number
        self.log = log
        here, there = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 70
            try:
                os.close(here[1])
                os.close(there[0])
                _run(here[0], there[1], log)
                code = 0
            finally:
                os._exit(code)
        os.close(here[0])
        os.close(there[1])
        self._to, self._from = here[1], there[0]

    def send(self, command: Command) -> None:
        _write(self._to, command)

    def receive(self) -> Any:
        ready, _, _ = select.select([self._from], [], [], ANSWER_SECONDS_MAX)
        if not ready:
            os.kill(self.pid, signal.SIGUSR1)  # the process prints where its threads are
            select.select([], [], [], 1.0)
            stacks = self.log.read_text()[-20000:]
            raise HostDied(f"host {self.number} does not answer. Its threads:\n{stacks}")
        answer = _read(self._from)
        if answer is None:
            raise EOFError
        return answer

    def call(self, *command: Any) -> Any:
        try:
            self.send(command)
            answer = self.receive()
        except (EOFError, BrokenPipeError):
            _, status = os.waitpid(self.pid, 0)
            self.pid = 0
            told = self.log.read_text()[-20000:]
            raise HostDied(f"host {self.number} ended by itself, status {status}\n{told}") from None
        if answer[0] == "error":
            raise HostError(*answer[1:])
        return answer[1]

    def call_doomed(self, lines: int, *command: Any) -> tuple[bool, Any]:
        """Kills the process before the n-th line of statekit in the command, or after the command.

        Returns whether the command had come to its end, and its answer.
        """
        self.send(("doomed", lines, command))
        try:
            answer = self.receive()
        except EOFError:
            self.kill()
            return False, None
        self.kill()
        if answer[0] == "error":
            raise HostError(*answer[1:])
        return True, answer[1]

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        for end in (self._to, self._from):
            if end >= 0:
                os.close(end)
        self._to = self._from = -1


def _write(end: int, what: Any) -> None:
    data = pickle.dumps(what)
    data = len(data).to_bytes(8, "big") + data
    while data:
        data = data[os.write(end, data) :]


def _read(end: int) -> Any:
    def exactly(count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = os.read(end, count - len(data))
            if not part:
                return b""
            data += part
        return data

    head = exactly(8)
    if not head:
        return None
    data = exactly(int.from_bytes(head, "big"))
    return pickle.loads(data) if data else None


# ---- In the process


def _run(commands: int, answers: int, log: Path) -> None:
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        faulthandler.enable(file)
        faulthandler.register(signal.SIGUSR1, file)
        lock_order.watch()
        worker = Worker()
        while (command := _read(commands)) is not None:
            answer: tuple[Any, ...]
            try:
                answer = ("ok", worker.do(command))
            except BaseException as error:
                answer = ("error", type(error).__name__, str(error), traceback.format_exc())
            _write(answers, answer)


def _register_sqlite() -> None:
    """The home that docs/homes.md shows, as it is there."""
    text = (ROOT / "docs" / "homes.md").read_text()
    (code,) = re.findall(r"```python\n(import sqlite3.*?)```", text, re.DOTALL)
    scope: dict[str, Any] = {}
    exec(code, scope)

    def open_fast(url: Any, cache_bytes: int) -> Any:
        home = scope["SqliteHome"](url, cache_bytes)
        home.run("PRAGMA synchronous = OFF")  # there is no loss of power here
        return home

    register_home("sqlite", open_fast)


_register_sqlite()


class Worker:
    """The providers of a process, and what can be done to them."""

    def __init__(self) -> None:
        self.kvs: dict[str, Any] = {}
        self.specs: dict[str, dict[str, Spec]] = {}  # declared, by provider
        self.moves: dict[str, Any] = {}
        self.shadows: dict[str, Any] = {}
        self.jobs: dict[str, Any] = {}

    def do(self, command: Command) -> Any:
        name, *args = command
        return getattr(self, name)(*args)

    def doomed(self, lines: int, command: Command) -> Any:
        left = lines

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            if event == "line":
                left -= 1
                if left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        try:
            return self.do(command)
        finally:
            sys.settrace(None)

    def lock_edges(self) -> lock_order.Edges:
        return lock_order.edges()

    # ---- Providers

    def _take(self, pid: str, kv: Any, times: tuple[int, int], declared: Any, first: bool) -> Any:
        self.kvs[pid], self.specs[pid] = kv, {}
        if first:
            self._set_times(kv, *times)
        self.declare(pid, declared)
        if not first:
            self._set_times(kv, *times)
        return self.owned(pid)

    @staticmethod
    def _set_times(kv: Any, now: int, watermark: int) -> None:
        kv._residence.store.set_time("processing", now)
        kv.advance_watermark(watermark)

    def open(
        self, pid: str, url: str, settings: dict[str, Any], times: Any, declared: Any, first: bool
    ) -> Any:
        return self._take(pid, sk.open(url, **settings), times, declared, first)

    def restore(
        self,
        pid: str,
        places: Any,
        settings: dict[str, Any],
        times: Any,
        declared: Any,
        first: bool,
    ) -> Any:
        points = []
        for url, number in places:
            points += [one for one in sk.checkpoints(url) if one.number == number]
        assert len(points) == len(places), f"checkpoints are missing of {places}"
        return self._take(pid, sk.restore(points, **settings), times, declared, first)

    def declare(self, pid: str, declared: list[tuple[Spec, int]]) -> None:
        for spec, version in declared:
            FORMS[spec.form].declare(self.kvs[pid], spec, version)
            self.specs[pid][spec.name] = spec

    def close(self, pid: str) -> None:
        self.kvs[pid].close()
        del self.kvs[pid], self.specs[pid]

    def times(self, now: int, watermark: int) -> None:
        for kv in self.kvs.values():
            self._set_times(kv, now, watermark)

    def owned(self, pid: str) -> list[int]:
        return [group for part in self.kvs[pid].key_groups for group in part]

    def call(self, pid: str, method: str, *args: Any) -> Any:
        return getattr(self.kvs[pid], method)(*args)

    def committed(self, pid: str) -> Any:
        return self.kvs[pid].committed

    def split(self, pid: str, parts: list[tuple[str, list[int]]], times: tuple[int, int]) -> None:
        made = self.kvs[pid].split([groups for _, groups in parts])
        for (name, _), kv in zip(parts, made, strict=True):
            self.kvs[name], self.specs[name] = kv, dict(self.specs[pid])
            kv._residence.store.set_time("processing", times[0])

    def merge(self, pid: str, other: str) -> None:
        self.kvs[pid].merge(self.kvs[other])
        self.specs[pid] |= self.specs[other]

    # ---- State

    def ops(self, pid: str, ops: list[tuple[str, Op]]) -> list[Any]:
        return [self._op(pid, name, op) for name, op in ops]

    def _op(self, pid: str, name: str, op: Op) -> Any:
        spec = self.specs[pid][name]
        try:
            return ("ok", FORMS[spec.form].real(self.kvs[pid][name], op))
        except sk.StateKitError as error:
            # Before ERRORS: some StateKitErrors are LookupErrors and ValueErrors, too.
            return ("raised", type(error).__name__, str(error))
        except ERRORS as error:
            return ("raised", type(error).__name__, "")

    def dump(self, pid: str) -> dict[str, Any]:
        """Everything that can be seen of the declared states."""
        kv = self.kvs[pid]
        found = {}
        for name, spec in self.specs[pid].items():
            state = kv[name]
            form = FORMS[spec.form]
            found[name] = (form.dump(state), len(state), [*state.keys()])
        return found

    def metrics(self, pid: str) -> dict[str, Any]:
        found: dict[str, Any] = self.kvs[pid].metrics().as_dict()
        return found

    def loading(self, pid: str) -> bool:
        return self.kvs[pid].loading is not None

    def schemas(self, pid: str) -> list[str]:
        return sorted(self.kvs[pid].schemas)

    def absent(self, pid: str, keys: list[str], prefetch: bool) -> int:
        kv = self.kvs[pid]
        count = len(kv.absent(keys))
        if prefetch:
            kv.prefetch(keys).result(ANSWER_SECONDS_MAX / 2)
            count = len(kv.absent(keys))
        return count

    # ---- Checkpoints

    def checkpoint(self, pid: str, place: str, settings: dict[str, Any]) -> int:
        while True:
            try:
                number: int = self.kvs[pid].checkpoint(place, **settings).number
                return number
            except sk.errors.CheckpointError as error:
                # Of a late part. Section 3 of issue 11: the second one is to wait by itself.
                if "being written already" not in str(error):
                    raise
                threading.Event().wait(0.002)

    def checkpoint_start(self, pid: str, job: str, place: str, settings: dict[str, Any]) -> None:
        self.jobs[job] = self.kvs[pid].checkpoint_async(place, **settings)

    def checkpoint_wait(self, job: str) -> int:
        number: int = self.jobs.pop(job).wait(ANSWER_SECONDS_MAX / 2).number
        return number

    def write_part(self, pid: str, place: str, settings: dict[str, Any]) -> str:
        part: str = self.kvs[pid].write_part(place, **settings).to_json()
        return part

    def publish(self, place: str, parts: list[str], number: int, metadata: Any) -> int:
        found: int = sk.publish(place, parts, number=number, metadata=metadata).number
        return found

    def beside(self, pid: str, ops: list[tuple[str, Op]], command: Command) -> Any:
        """A command while a thread does operations. Returns the results of both."""
        results: list[Any] = []
        is_begun = threading.Event()

        def work() -> None:
            is_begun.set()
            for name, op in ops:
                results.append(self._op(pid, name, op))

        writer = threading.Thread(target=work)
        writer.start()
        is_begun.wait()
        try:
            answer = self.do(command)
        finally:
            writer.join()
        return answer, results

    def collect(self, place: str, keep: int) -> tuple[list[int], list[int]]:
        done = sk.collect(place, keep)
        return [*done.kept, *done.in_use], [*done.removed]

    def checkpoints(self, place: str) -> list[tuple[int, Any]]:
        return [(one.number, one.metadata) for one in sk.checkpoints(place)]

    # ---- Hand-overs

    def serve(self, pid: str) -> str:
        address: str = self.kvs[pid].serve().address
        return address

    def fetch(
        self, pid: str, move: str, address: str, groups: list[int], settings: dict[str, Any]
    ) -> bool:
        settings = dict(settings)
        if "base_at" in settings:
            url, number = settings.pop("base_at")
            found = [one for one in sk.checkpoints(url) if one.number == number]
            if not found:
                raise NoCheckpointError(f"checkpoint {number} of {url} was collected")
            settings["base"] = found[0]
        made = self.moves[move] = self.kvs[pid].fetch_from(address, key_groups=groups, **settings)
        if hasattr(made, "owned") and hasattr(made, "stop"):  # in steps
            made.wait(ANSWER_SECONDS_MAX / 2)
            return False
        return bool(made.is_based)

    def shadow(self, pid: str, sid: str, address: str, groups: list[int]) -> None:
        self.shadows[sid] = self.kvs[pid].shadow(address, key_groups=groups, timeout=60.0)

    def take(
        self, pid: str, move: str, address: str, groups: list[int], settings: dict[str, Any]
    ) -> None:
        """Whether the copies are any good then depends on what has happened to both meanwhile."""
        shadow = self.shadows[settings["sid"]]
        if settings["waits"]:
            with suppress(sk.StateKitError):  # it was dropped
                shadow.wait(ANSWER_SECONDS_MAX / 2)
        self.moves[move] = shadow.take(groups)

    def drop_shadow(self, pid: str, sid: str) -> None:
        self.shadows.pop(sid).drop()

    def migrate(
        self, pid: str, move: str, address: str, groups: list[int], settings: dict[str, Any]
    ) -> None:
        made = self.moves[move] = self.kvs[pid].migrate(address, key_groups=groups, **settings)
        if hasattr(made, "departures"):  # in steps
            made.wait(ANSWER_SECONDS_MAX / 2)

    def finish(self, pid: str) -> None:
        """Waits until everything on its way here has come, and the old owners know it."""
        for one in self.kvs[pid].migrations:
            if hasattr(one, "give_back"):  # an arrival
                one.wait(ANSWER_SECONDS_MAX / 2)

    def unfinished(self, url: str) -> tuple[list[int], list[int]]:
        """Key-groups of a home that are there only in part; and those that are another's."""
        kv = sk.open(url, owned=())
        try:
            arriving = kv._recorded.arriving
            whole = whole_groups(arriving, kv._residence.ledger.moved_in(), kv.subgroups)
            torn, given = subtract(arriving, whole), subtract(kv._recorded.given, arriving)
            return [g for part in torn for g in part], [g for part in given for g in part]
        finally:
            kv._let_go()

    def abandon(self, pid: str, source: str) -> list[int]:
        """Gives up what has not come from a dead process. Returns those key-groups."""
        lost: list[int] = []
        for one in self.kvs[pid].migrations:
            if getattr(one, "source", None) == source:
                lost += [group for part in one.abandon() for group in part]
        return lost

    def move_call(self, move: str, method: str, settings: dict[str, Any]) -> Any:
        found = getattr(self.moves[move], method)(**settings)
        return None if found is None else [group for part in found for group in part]

    def abort(self, pid: str, groups: list[int], settings: dict[str, Any]) -> str:
        """Aborts departures. Returns what is said about key-groups that cannot come back."""
        told = []
        for one in self.kvs[pid].migrations:
            of = {group for part in one.key_groups for group in part}
            if hasattr(one, "abort") and of & set(groups):
                try:
                    one.abort(**settings)
                except sk.StateKitError as error:
                    told.append(f"{type(error).__name__}: {error}")
        return "; ".join(told)

    def let_go(self, pid: str) -> None:
        """Waits until nothing that was handed over is kept: a thread frees it."""
        until = threading.Event()
        residence = self.kvs[pid]._residence
        for _ in range(int(ANSWER_SECONDS_MAX / 0.004)):
            with residence._lock:
                if not residence._handed_over:
                    return
            until.wait(0.002)
        raise AssertionError(f"leaves {sorted(residence._handed_over)[:9]} are kept for ever")

    def late(self, move: str) -> tuple[str, int] | None:
        """What was added to our part of a barrier when key-groups came."""
        job = self.moves[move].late_checkpoint
        if job is None:
            return None
        made = job.wait(ANSWER_SECONDS_MAX / 2)
        return made.url, made.number
