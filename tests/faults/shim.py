"""The Python side of the I/O shim (ioshim.c): builds it, controls it, and reads its log.

`build()` is for the process that starts others under LD_PRELOAD. `Shim` is for a process that runs
under it: the library is then loaded already, and ctypes finds that very copy by its path.
"""

import ctypes
import errno
import os
import signal
import struct
import subprocess
from collections.abc import Iterable, Iterator
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("ioshim.c")

# In the order of ioshim.c; Shim() compares.
_CALLS = """
open close write pwrite writev pwritev read pread fsync fdatasync sync_file_range rename link
unlink rmdir truncate fallocate mkdir mmap msync flock copy mark
"""
CALLS = tuple(_CALLS.split())

OPENS = ("open",)
READS = ("read", "pread")
WRITES = ("write", "pwrite", "writev", "pwritev", "copy", "fallocate", "truncate")
SYNCS = ("fsync", "fdatasync", "sync_file_range", "msync")
NAMES = ("rename", "link", "unlink", "rmdir", "mkdir")
# CHANGES leaves out calls that do not change the disk: a kill before such a call is the same as a
# kill after the call before it.
ALL = tuple(name for name in CALLS if name != "mark")
CHANGES = (*OPENS, "close", *WRITES, *SYNCS, *NAMES, "mmap", "flock")

_ENTRY = struct.Struct("<IHHiiQqQqqIIIIQ")


class Action(IntEnum):
    """What happens to the nth call; see ioshim.c."""

    FAIL = 1
    FAIL_FOREVER = 2
    SHORT = 3
    KILL = 4
    KILL_AFTER = 5
    KILL_HALF = 6
    DELAY = 7


KILLS = (Action.KILL, Action.KILL_AFTER, Action.KILL_HALF)


class Flag(IntFlag):
    """Of a log entry."""

    CREATED = 1
    DIRECTORY = 2
    TRUNCATED = 4
    UNNAMED = 8
    INJECTED = 16


class Rule(NamedTuple):
    """The nth (from 1) of these calls does not go well."""

    nth: int
    action: Action = Action.KILL
    calls: tuple[str, ...] = CHANGES
    error: int = 0
    delay_us: int = 0


# A file system that has neither link() nor rename(), like network mounts of object stores. To be
# armed after other rules: a rule that makes a call fail is the last one that sees it.
WITHOUT_NAMES = Rule(1, Action.FAIL_FOREVER, ("link", "rename"), errno.ENOSYS)


class Entry(NamedTuple):
    """One call, or a mark. `error` is 0 if it worked; `data` is what was really written."""

    call: str
    path: str = ""
    path2: str = ""
    fd: int = -1
    inode: int = 0
    offset: int = -1
    length: int = 0
    result: int = 0
    error: int = 0
    flags: Flag = Flag(0)
    argument: int = 0
    thread: int = 0
    data: bytes = b""

    def __str__(self) -> str:
        name = os.path.basename(self.path)
        text = f"{self.call} {name}" if self.call != "mark" else f"mark {self.data.decode()}"
        if self.path2:
            text += f" -> {os.path.basename(self.path2)}"
        if self.data and self.call != "mark":
            text += f" [{self.offset}, {self.offset + len(self.data)})"
        if self.error:
            text += f" = {os.strerror(self.error)}"
        return text


def build(directory: Path) -> Path:
    """The shim as a library in this directory; compiled if it is older than its source."""
    library = directory / "ioshim.so"
    if library.exists() and library.stat().st_mtime > SOURCE.stat().st_mtime:
        return library
    directory.mkdir(parents=True, exist_ok=True)
    scratch = library.with_suffix(f".{os.getpid()}")
    command = ["gcc", "-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-U_FORTIFY_SOURCE"]
    command += ["-fPIC", "-shared", "-fvisibility=hidden", str(SOURCE), "-o", str(scratch)]
    subprocess.run([*command, "-lpthread"], check=True)
    scratch.replace(library)
    return library


def mask_of(calls: Iterable[str]) -> int:
    return sum(1 << CALLS.index(name) for name in set(calls))


class Shim:
    """Control of the shim in this process, which runs under it."""

    def __init__(self, library: str) -> None:
        assert library in os.environ.get("LD_PRELOAD", ""), "this process is not under the shim"
        native = ctypes.CDLL(library)
        native.shim_call_name.restype = ctypes.c_char_p
        native.shim_count.restype = ctypes.c_int64
        native.shim_count.argtypes = [ctypes.c_uint64]
        native.shim_log.restype = ctypes.c_uint64
        native.shim_arm.argtypes = [
            ctypes.c_uint64,
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int64,
        ]
        names = [native.shim_call_name(at) for at in range(len(CALLS) + 1)]
        assert names == [*(name.encode() for name in CALLS), None], "CALLS is not as in ioshim.c"
        self._native = native

    def watch(self, directory: str) -> None:
        self._native.shim_watch(os.path.realpath(directory).encode() if directory else b"")

    def reset(self) -> None:
        self._native.shim_reset()

    def arm(self, rule: Rule) -> None:
        mask = mask_of(rule.calls)
        at = self._native.shim_arm(mask, rule.nth, rule.action, rule.error, rule.delay_us)
        assert at >= 0, "too many rules are armed"

    def disarm(self) -> None:
        self._native.shim_disarm()

    def count(self, calls: Iterable[str] = ALL) -> int:
        return int(self._native.shim_count(mask_of(calls)))

    def counts(self) -> dict[str, int]:
        """Calls so far by name, without those that did not happen."""
        found = {name: self.count([name]) for name in CALLS}
        return {name: count for name, count in found.items() if count}

    def log_start(self) -> None:
        self._native.shim_log_start()

    def mark(self, text: str) -> None:
        self._native.shim_mark(text.encode())

    def log(self) -> bytes:
        place = ctypes.c_void_p()
        size = self._native.shim_log(ctypes.byref(place))
        return ctypes.string_at(place, size) if size else b""


def parse_log(log: bytes) -> Iterator[Entry]:
    """The entries of a dumped log."""
    at = 0
    while at < len(log):
        header = _ENTRY.unpack_from(log, at)
        size, call, flags, fd, error, inode, offset, length, result, argument, thread = header[:11]
        path_size, path2_size, _, data_size = header[11:]
        path = at + _ENTRY.size
        path2 = path + path_size
        data = path2 + path2_size
        yield Entry(
            CALLS[call],
            log[path:path2].decode(),
            log[path2:data].decode(),
            fd,
            inode,
            offset,
            length,
            result,
            error,
            Flag(flags),
            argument,
            thread,
            log[data : data + data_size],
        )
        at += size


def is_killed(status: int) -> bool:
    """Whether a status from waitpid says that the process ended by SIGKILL."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
