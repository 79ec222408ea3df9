"""Fork server: runs one step of a program again and again, each time with another fault.

    pytest ──(pipe)── server under LD_PRELOAD ──fork──> child: one step, perhaps killed

The server imports statekit and prepares once (a provider with keys in it, say); a fork gets all of
that for about a millisecond. The child arms the shim and calls the step. What it means to do
(`intent`) and what it was told is safe (`done`) goes through a pipe at once. So it is known here,
whatever happens to the child: the expected state lives outside the system under test.

    server = ForkServer(library, watch=directory, prepare="scenarios:loaded", keys=100)
    calls = server.run("scenarios:checkpoint").count(CHANGES)
    for nth in range(1, calls + 1):
        reset(directory)
        outcome = server.run("scenarios:checkpoint", rules=[Rule(nth, Action.KILL)])
        assert outcome.status == KILLED

A step is a function `step(kit, prepared, **arguments)`, named "module:function". fork copies only
the thread that calls it, so preparing must leave no other thread: the server checks.
"""

import contextlib
import gc
import importlib
import os
import pickle
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shim import ALL, CHANGES, Entry, Rule, Shim, is_killed, parse_log

HERE = Path(__file__).resolve().parent
SECONDS_MAX = 300  # if one run takes longer, it hangs, however busy the machine is
SETTLE_SECONDS_MAX = 10.0

CLEAN = "clean"
RAISED = "raised"
KILLED = "killed"  # by SIGKILL

_SIZE = struct.Struct("<Q")


class Facts(NamedTuple):
    """What a process holds that must not leak."""

    files: tuple[str, ...]
    threads: int
    bytes_max: int  # peak of resident memory


@dataclass
class Outcome:
    """What became of one run."""

    status: str = ""
    error: str = ""  # name of the exception's class
    bases: tuple[str, ...] = ()  # and of its bases
    message: str = ""
    trace: str = ""
    intended: list[Any] = field(default_factory=list)
    acknowledged: list[Any] = field(default_factory=list)
    result: Any = None
    counts: dict[str, int] = field(default_factory=dict)
    log: bytes = b""
    before: Facts | None = None
    after: Facts | None = None
    visits: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, calls: Iterable[str] = CHANGES) -> int:
        return sum(self.counts.get(name, 0) for name in calls)

    def entries(self) -> list[Entry]:
        return list(parse_log(self.log))

    def leaks(self) -> str:
        """What the step left behind in its process; "" if nothing."""
        assert self.before is not None
        assert self.after is not None
        files = set(self.after.files) - set(self.before.files)
        threads = self.after.threads - self.before.threads
        found = [f"file {name}" for name in sorted(files)]
        return ", ".join([*found, *([f"{threads} threads"] if threads > 0 else [])])


class Kit:
    """What a step may use."""

    def __init__(self, shim: Shim, fd: int) -> None:
        self.shim = shim
        self._fd = fd

    def intent(self, value: object) -> None:
        """Says that the step is about to make this true."""
        self.shim.mark(f"intent {value}")
        send(self._fd, ("intended", value))

    def done(self, value: object) -> None:
        """Says that the system has reported this as safe."""
        self.shim.mark(f"done {value}")
        send(self._fd, ("acknowledged", value))


def send(fd: int, value: object) -> None:
    data = pickle.dumps(value)
    data = _SIZE.pack(len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def receive(fd: int) -> Any:
    """The next value. EOFError at the end, also if a killed writer left half of a value."""
    (size,) = _SIZE.unpack(_exactly(fd, _SIZE.size))
    return pickle.loads(_exactly(fd, size))


def _exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


# ---- the test's side ---------------------------------------------------------------------------


class ForkServer:
    """A process that is ready to run a step. A context manager."""

    def __init__(
        self,
        library: Path,
        *,
        watch: Path | str = "",
        prepare: str = "",
        python_path: Sequence[Path] = (),
        env: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        request_read, self._request = os.pipe()
        self._answer, answer_write = os.pipe()
        environment = os.environ | (env or {})
        environment["LD_PRELOAD"] = str(library)
        path = [*python_path, HERE, os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, map(str, path)))
        code = f"import harness; harness.serve({request_read}, {answer_write}, {str(library)!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            pass_fds=[request_read, answer_write],
            env=environment,
            cwd=HERE,
            stdin=subprocess.DEVNULL,
        )
        os.close(request_read)
        os.close(answer_write)
        try:
            self._ask(("prepare", str(watch), prepare, arguments))
        except BaseException:
            self.close()
            raise

    def run(
        self,
        step: str,
        /,
        *,
        rules: Sequence[Rule] = (),
        is_logged: bool = False,
        failpoints: str | None = None,
        **arguments: Any,
    ) -> Outcome:
        """The step in a fork. `failpoints` is for statekit.failpoints.configure."""
        outcome = self._ask(("run", step, tuple(rules), is_logged, failpoints, arguments))
        assert isinstance(outcome, Outcome)
        return outcome

    def _ask(self, request: object) -> Any:
        send(self._request, request)
        try:
            kind, answer = receive(self._answer)
        except EOFError:
            raise RuntimeError(f"the fork server ended: {self._process.wait(60)}") from None
        if kind == "failed":
            raise RuntimeError(f"the fork server could not do that:\n{answer}")
        return answer

    def close(self) -> None:
        os.close(self._request)
        os.close(self._answer)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Template:
    """A directory as it was, to begin again from. Files are hard links: none is changed in place.

    That is itself a property of checkpoints (files are written once, then only linked, renamed and
    removed); `check` proves it.
    """

    def __init__(self, directory: Path, store: Path) -> None:
        self._directory = directory
        self._store = store
        copy_tree(directory, store)
        self.files = tree_of(store)

    def reset(self) -> None:
        for entry in os.scandir(self._directory):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
        copy_tree(self._store, self._directory)

    def check(self) -> None:
        assert tree_of(self._store) == self.files, "a file was changed in place"


def copy_tree(source: Path | str, target: Path | str) -> None:
    os.makedirs(target, exist_ok=True)
    for entry in os.scandir(source):
        place = os.path.join(target, entry.name)
        if entry.is_dir(follow_symlinks=False):
            copy_tree(entry.path, place)
        else:
            os.link(entry.path, place)


def tree_of(directory: Path | str) -> dict[str, bytes]:
    """All files below a directory: relative path -> contents. Directories end with "/"."""
    found = {}
    for place, directories, names in os.walk(directory):
        base = os.path.relpath(place, directory)
        for name in directories:
            found[os.path.normpath(os.path.join(base, name)) + "/"] = b""
        for name in names:
            path = os.path.normpath(os.path.join(base, name))
            found[path] = Path(place, name).read_bytes()
    return found


# ---- the server's side -------------------------------------------------------------------------


def serve(requests: int, answers: int, library: str) -> None:
    """The loop of the server; ends when the test closes its end."""
    shim = Shim(library)
    kit = Kit(shim, os.open(os.devnull, os.O_WRONLY))
    prepared: Any = None
    while True:
        try:
            request = receive(requests)
        except EOFError:
            return
        try:
            if request[0] == "prepare":
                _, watch, name, arguments = request
                shim.watch(watch)
                prepared = find(name)(kit, **arguments) if name else None
                gc.collect()
                gc.freeze()  # so that no child's garbage collection goes over what is here already
                answer: Any = None
            else:
                answer = _fork_and_run(shim, prepared, *request[1:])
        except Exception:
            send(answers, ("failed", traceback.format_exc()))
        else:
            send(answers, ("ok", answer))


def find(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _fork_and_run(shim: Shim, prepared: Any, *request: Any) -> Outcome:
    assert thread_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    find(request[0])  # imported here once, not in every child
    started = time.perf_counter()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.alarm(SECONDS_MAX)
        _run(Kit(shim, writing), shim, writing, prepared, *request)
    os.close(writing)
    outcome = Outcome()
    with contextlib.suppress(EOFError):
        while True:
            kind, value = receive(reading)
            if kind in ("intended", "acknowledged"):
                getattr(outcome, kind).append(value)
            else:
                value.intended, value.acknowledged = outcome.intended, outcome.acknowledged
                outcome = value
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    outcome.seconds = time.perf_counter() - started
    if is_killed(status):
        outcome.status = KILLED
    elif os.WIFSIGNALED(status):
        outcome.status = f"signal {os.WTERMSIG(status)}"
    elif os.waitstatus_to_exitcode(status):
        outcome.status = f"exit {os.waitstatus_to_exitcode(status)}"
    return outcome


def _run(
    kit: Kit,
    shim: Shim,
    fd: int,
    prepared: Any,
    step: str,
    rules: Sequence[Rule],
    is_logged: bool,
    failpoints: str | None,
    arguments: dict[str, Any],
) -> None:
    """In the child; does not return."""
    try:
        outcome = Outcome(CLEAN)
        function = find(step)
        outcome.before = facts()
        if failpoints is not None:
            find("statekit.failpoints:configure")(failpoints)
        if is_logged:
            shim.log_start()
        for rule in rules:
            shim.arm(rule)
        try:
            outcome.result = function(kit, prepared, **arguments)
        except Exception as error:
            outcome.status = RAISED
            outcome.error = type(error).__name__
            outcome.bases = tuple(base.__name__ for base in type(error).__mro__)
            outcome.message = str(error)
            outcome.trace = traceback.format_exc()
        shim.disarm()
        outcome.counts = shim.counts()
        outcome.log = shim.log() if is_logged else b""
        if failpoints is not None:
            outcome.visits = find("statekit.failpoints:visits")()
        outcome.after = facts_after(outcome.before)
        send(fd, ("outcome", outcome))
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)


def thread_count() -> int:
    return len(os.listdir("/proc/self/task"))


def facts() -> Facts:
    files = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith("/proc/"):
                files.append(f"{name} {target}")
    return Facts(
        tuple(sorted(files)), thread_count(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    )


def facts_after(before: Facts) -> Facts:
    """Facts, once what is about to end has ended: a joined thread takes a moment to go."""
    after = facts()
    if set(after.files) - set(before.files):
        gc.collect()
    deadline = time.monotonic() + SETTLE_SECONDS_MAX
    while facts().threads > before.threads and time.monotonic() < deadline:
        os.sched_yield()
    return facts()


__all__ = [
    "ALL",
    "CHANGES",
    "CLEAN",
    "KILLED",
    "RAISED",
    "Facts",
    "ForkServer",
    "Kit",
    "Outcome",
    "Template",
    "copy_tree",
    "tree_of",
]
