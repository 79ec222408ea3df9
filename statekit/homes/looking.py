"""A private copy of a RocksDB directory: to look into a home without changing anything there.

Opening a RocksDB database writes to it: the log is replayed into tables, a new log and a new
manifest are begun, tables are compacted. So it is opened elsewhere, in a temporary directory:

    tables (.sst, .blob)    links: they are never changed once they are written
    all else                copies; the manifest and the log of what is not in tables yet are small

Nobody may have the database open meanwhile, for that would remove tables that the links lead to.
So the lock that RocksDB takes (a POSIX lock on the file LOCK) is taken here too, to share: others
may look at the same time.
"""

import errno
import fcntl
import os
import shutil
import struct
import tempfile

from statekit.errors import HomeError, HomeLockedError

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_TABLES = (".sst", ".blob")
_LEFT_OUT = ("LOCK", "LOG")  # RocksDB makes them anew; LOG.old.1234 is left out too
_kept_open: list[int] = []  # see _lock()


class PrivateCopy:
    """A directory (`path`) that is what another one was; close() removes it.

    HomeLockedError if somebody has the original open, HomeError if it is no database.
    """

    def __init__(self, original: str) -> None:
        names = _names(original)
        self._lock = _lock(os.path.join(original, "LOCK"), original)
        self.path = ""
        try:
            self.path = tempfile.mkdtemp(prefix="statekit-look-")
            for name in names:
                source, target = os.path.join(original, name), os.path.join(self.path, name)
                if name.endswith(_TABLES):
                    os.symlink(source, target)
                else:
                    shutil.copyfile(source, target)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise HomeError(
                f"no copy of {original!r} can be made to look at: {error.filename!r}: "
                f"{error.strerror or error}. Check your rights to it and the space in "
                f"{tempfile.gettempdir()!r}, or name another directory in TMPDIR."
            ) from None

    def close(self) -> None:
        """Removes the copy and lets others open the original. Closing twice does no harm."""
        if self.path:
            shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _names(original: str) -> list[str]:
    """The files of a database. HomeError if it is none, before anything is copied."""
    try:
        entries = list(os.scandir(original))
    except OSError as error:
        raise HomeError(
            f"{original!r} cannot be looked into: {error.strerror}. "
            "Check the path and your rights to it."
        ) from None
    files = [entry.name for entry in entries if entry.is_file()]
    if "CURRENT" not in files:
        raise HomeError(f"{original!r} is no RocksDB home: it has no file CURRENT. Check the path.")
    return [name for name in files if name.split(".")[0] not in _LEFT_OUT]


def _lock(path: str, original: str) -> int | None:
    """Keeps others from opening a database; None where nobody ever had it open from here."""
    try:
        lock = os.open(path, os.O_RDONLY)
    except FileNotFoundError:  # the copy of a database, by other means
        return None
    try:
        # Of the open file, not of the process: so it is refused if this process has it open, too.
        _change_lock(lock, fcntl.F_OFD_SETLK)
    except OSError as error:
        pid = _change_lock(lock, fcntl.F_OFD_GETLK)
        if pid == os.getpid():
            # To close any file of a process ends all POSIX locks that the process has on it.
            _kept_open.append(lock)
        else:
            os.close(lock)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise HomeError(f"{path!r} cannot be locked: {error.strerror}.") from None
        who = "this process" if pid == os.getpid() else f"process {pid}" if pid > 0 else "another"
        raise HomeLockedError(
            f"the RocksDB home at {original!r} is open already, in {who}. Look at it through that "
            "one (kv.serve()), at a checkpoint of it, or when that one has closed it."
        ) from None
    return lock


def _change_lock(lock: int, command: int) -> int:
    """Takes the whole file to share, or asks who keeps us from it: its process, -1 if unknown."""
    answer = fcntl.fcntl(lock, command, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0))
    pid: int = _FLOCK.unpack(answer[: _FLOCK.size])[4]
    return pid
