"""A directory of this machine as a storage of checkpoints.

    file                             what                        who locks it
    <name>                           a pack or a manifest        of a manifest: its readers, shared
    <name>.tmp-<random>              not complete yet            -
    <name>.tmp-unfinished-<random>   empty: <name> may be        -
                                     incomplete
    .lock                            empty                       attempts shared, collectors
                                                                 exclusive

The order of system calls is the proof of durability:

    write()     open tmp, write, fsync tmp, close, rename to the name
    sync()      fsync of the directory, and once of the parents that were made for it
    create()    open tmp, write, fsync tmp, close, link to the name, unlink tmp, fsync directory

link() fails if the name exists, for all machines that share the directory; rename() would replace.

There are file systems without rename() or link(): network mounts of object stores answer ENOSYS.
Then files are written directly under their names:

    write()     open the name, write, fsync. Nobody looks at a pack that no manifest names yet. A
                pack of that name may be there already, from an attempt that failed. It has the same
                bytes or the beginning of them, since its name is made of its contents
    create()    open a mark, fsync directory; open the name with O_EXCL, which is as exclusive as
                link(); write, fsync, unlink the mark, fsync directory

A crash before the mark is gone leaves a file that may not be complete, and the mark, whose name was
durable earlier. So an incomplete file with a mark is unfinished; without a mark it is damaged. When
create() has returned, the mark is gone for good.

A failed fsync is final. The kernel may have dropped the pages and marked them clean, so a second
fsync would report success for data that is lost. The file is removed and the attempt fails.

flock() belongs to the open file, so the system ends it with the process, however the process ends.
On a file system without flock(), only the locks within this process remain, and has_locks is False.
"""

import errno
import fcntl
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from statekit import failpoints
from statekit.errors import ArgumentError, StorageError
from statekit.failpoints import register, visit
from statekit.storage.storage import TEMPORARY, Entries, Entry, Names, Pieces, Storage, check_sub

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_LOCK = ".lock"
_UNFINISHED = f"{TEMPORARY}unfinished-"
_PIECE_BYTES = 16 << 20  # of one write(): the thread can be interrupted between two writes
_PIECES_MAX = 256  # of one writev(); every system allows 1024

_NO_LINK = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_RENAME = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_NO_FLOCK = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)

register(
    "storage.mkdir",
    "storage.lock",
    "storage.pack.open",
    "storage.pack.write",
    "storage.pack.fsync",
    "storage.pack.rename",
    "storage.dirsync",
    "storage.parentsync",
    "storage.manifest.open",
    "storage.manifest.write",
    "storage.manifest.fsync",
    "storage.manifest.link",
    "storage.manifest.unlink",
    "storage.manifest.dirsync",
)


def open_local(path: str) -> Storage:
    """The storage of a path, which need not exist yet."""
    if not path or "\0" in path:
        raise ArgumentError(f"{path!r} names no directory. Give the path of one.")
    # Symbolic links are resolved, so that one directory has one URL.
    return LocalStorage(os.path.realpath(path))


class LocalStorage(Storage):
    is_local = True

    def __init__(self, path: str) -> None:
        super().__init__(path, path)
        if os.path.lexists(path) and not os.path.isdir(path):
            raise StorageError(
                f"{path!r} cannot hold checkpoints: it is no directory. "
                "Name a directory, or a path where one can be made."
            )
        self._has_flock = self._has_link = self._has_rename = True  # until a call shows otherwise
        # An earlier process may have made the directory and crashed before it was synced.
        self._unsynced_parents = [os.path.dirname(path)]
        self._parents_lock = threading.Lock()

    @property
    def has_locks(self) -> bool:
        return self._has_flock

    def list(self) -> Entries:
        entries = []
        try:
            visit("storage.list")
            with os.scandir(self.url) as found:
                for item in found:
                    with suppress(FileNotFoundError):  # it was deleted just now
                        if item.name != _LOCK and item.is_file():
                            stat = item.stat()
                            entries.append(Entry(item.name, stat.st_size, stat.st_mtime))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self.failed("listed", None, error) from error
        return sorted(entries)

    def subdirectories(self) -> Names:
        try:
            with os.scandir(self.url) as found:
                return sorted(item.name for item in found if item.is_dir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self.failed("listed", None, error) from error

    def sub(self, name: str) -> Storage:
        return open_local(os.path.join(self.url, check_sub(name)))

    def size(self, name: str) -> int:
        try:
            return os.stat(self._path(name)).st_size
        except OSError as error:
            raise self.failed("read", name, error) from error

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        return self.read_parts(name, [(offset, length)])[0]

    def read_parts(self, name: str, parts: "Sequence[tuple[int, int | None]]") -> Pieces:
        at = parts[0][0]
        found = []
        try:
            if failpoints.is_on:  # saves the call: somebody may wait for the leaf that is read here
                visit("storage.read")
            fd = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                size = os.fstat(fd).st_size
                for offset, length in parts:
                    at = offset
                    end = size if length is None else offset + length
                    pieces = []
                    # The end is compared with the size first: a damaged length must not make us
                    # allocate memory.
                    while at < end <= size and (piece := os.pread(fd, end - at, at)):
                        pieces.append(piece)
                        at += len(piece)
                    if at != end or end > size:
                        stop = size if max(end, at) > size else at
                        raise self.ends_early(name, stop, offset, length)
                    found.append(pieces[0] if len(pieces) == 1 else b"".join(pieces))
            finally:
                os.close(fd)
        except OSError as error:
            raise self.failed(f"read at byte {at}", name, error) from error
        return found

    def write(self, name: str, parts: "Sequence[ReadableBuffer]") -> None:
        try:
            if self._has_rename:
                with self._temporary(name, parts, "storage.pack") as temporary:
                    visit("storage.pack.rename")
                    self._has_rename = _try(os.rename, temporary, self._path(name), _NO_RENAME)
            if not self._has_rename:
                self._write_in_place(self._path(name), parts)
        except OSError as error:
            raise self.failed("written", name, error) from error

    def sync(self) -> None:
        try:
            visit("storage.dirsync")
            self._sync_names()
        except OSError as error:
            raise self.failed("synced", None, error) from error

    def create(
        self, name: str, data: bytes, on_reserved: Callable[[], None] = lambda: None
    ) -> bool:
        try:
            if self._has_link:
                with self._temporary(name, [data], "storage.manifest") as temporary:
                    on_reserved()
                    visit("storage.manifest.link")
                    try:
                        self._has_link = _try(os.link, temporary, self._path(name), _NO_LINK)
                    except FileExistsError:
                        return False
                    if self._has_link:
                        self._end_creation(name, temporary)
                        return True
            return self._create_in_place(name, data, on_reserved)
        except OSError as error:
            raise self.failed("written", name, error) from error

    def is_unfinished(self, name: str) -> bool:
        return any(entry.name.startswith(f"{name}{_UNFINISHED}") for entry in self.list())

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                visit("storage.delete")
                with suppress(FileNotFoundError):
                    os.unlink(self._path(name))
            except OSError as error:
                raise self.failed("deleted", name, error) from error

    def _path(self, name: str) -> str:
        assert "/" not in name, f"{name!r} is no name of a file"
        return f"{self.url}/{name}"

    # Writing

    @contextmanager
    def _temporary(self, name: str, parts: "Sequence[ReadableBuffer]", point: str) -> Iterator[str]:
        """A new file of these parts, with durable contents. Removed unless the block renames it."""
        path = self._path(f"{name}{TEMPORARY}{secrets.token_hex(8)}")
        visit(f"{point}.open")
        fd = self._open_new(path, os.O_EXCL | os.O_WRONLY)
        try:
            try:
                is_short = visit(f"{point}.write") == "short"
                _write_parts(fd, parts, is_short)
                visit(f"{point}.fsync")
                os.fsync(fd)
            finally:
                os.close(fd)
            yield path
        finally:
            _remove(path)

    def _open_new(self, path: str, flags: int) -> int:
        """Opens a file. Makes it, and the directory, if they are missing."""
        flags |= os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            self._make_directory()
            return os.open(path, flags, 0o666)

    def _open_lock(self) -> int:
        """Every writer and every collector calls this first."""
        self._check_place()
        return self._open_new(self._path(_LOCK), os.O_RDWR)

    def _check_place(self) -> None:
        """ArgumentError if this is the directory of a RocksDB home, or inside of one.

        RocksDB deletes files that it does not know, and its destroy() and backups act on all files.
        """
        place = self.url
        while True:
            if _is_rocksdb(place):
                raise ArgumentError(
                    f"{self.url!r} cannot hold checkpoints: {place!r} is a RocksDB database, such "
                    "as the home of a provider. Nothing was written. Use a directory beside it."
                )
            above = os.path.dirname(place)
            if above == place:
                return
            place = above

    def _make_directory(self) -> None:
        visit("storage.mkdir")
        missing = []
        path = self.url
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            try:
                os.mkdir(path)
            except FileExistsError:
                if not os.path.isdir(path):
                    raise NotADirectoryError(errno.ENOTDIR, "it is a file", path) from None
            with self._parents_lock:
                self._unsynced_parents.append(os.path.dirname(path))

    def _sync_names(self) -> None:
        _sync_directory(self.url)
        with self._parents_lock:
            # From the nearest parent up. A parent stays in the list until its sync has succeeded.
            while self._unsynced_parents:
                visit("storage.parentsync")
                # A directory that we may not read cannot be synced. Then it is not our own, and was
                # there before.
                with suppress(PermissionError):
                    _sync_directory(self._unsynced_parents[-1])
                self._unsynced_parents.pop()

    def _end_creation(self, name: str, temporary: str) -> None:
        """Makes a new name durable. The temporary file is removed first."""
        try:
            visit("storage.manifest.unlink")
            _remove(temporary)
            visit("storage.manifest.dirsync")
            self._sync_names()
        except BaseException:
            _remove(self._path(name))  # nobody may rely on a name that a loss of power may undo
            raise

    # Writing where there is no rename() or link()

    def _write_in_place(self, path: str, parts: "Sequence[ReadableBuffer]") -> None:
        is_new = True
        try:
            fd = self._open_new(path, os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            if _is_of(path, parts):  # not written again: a mount may refuse to open it for writing
                _sync_file(path)
                return
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            is_new = False
        try:
            _write_parts(fd, parts, visit("storage.pack.write") == "short")
            if not is_new:
                os.ftruncate(fd, sum(memoryview(part).nbytes for part in parts))
            visit("storage.pack.fsync")
            os.fsync(fd)
        finally:
            os.close(fd)

    def _create_in_place(self, name: str, data: bytes, on_reserved: Callable[[], None]) -> bool:
        path = self._path(name)
        if os.path.lexists(path):
            return False
        mark = self._path(f"{name}{_UNFINISHED}{secrets.token_hex(8)}")
        visit("storage.manifest.open")
        os.close(self._open_new(mark, os.O_EXCL | os.O_WRONLY))
        try:
            self._sync_names()
            try:
                fd = self._open_new(path, os.O_EXCL | os.O_WRONLY)
            except FileExistsError:
                return False
            try:
                try:
                    on_reserved()
                    _write_parts(fd, [data], visit("storage.manifest.write") == "short")
                    visit("storage.manifest.fsync")
                    os.fsync(fd)
                finally:
                    os.close(fd)
            except BaseException:
                _remove(path)
                raise
            self._end_creation(name, mark)
            return True
        finally:
            _remove(mark)

    # Locks

    @contextmanager
    def _shared_lock(self) -> Iterator[None]:
        try:
            visit("storage.lock")
            lock = self._lock(self._open_lock(), fcntl.LOCK_SH)
        except OSError as error:
            done = "locked" if os.path.isdir(self.url) else "made"
            raise self.failed(done, None, error) from error
        assert lock is not None, "a lock that waits was not given"
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _exclusive_lock(self) -> Iterator[bool]:
        if not os.path.isdir(self.url):
            yield True  # nobody writes to a directory that does not exist
            return
        try:
            visit("storage.lock")
            lock = self._lock(self._open_lock(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise self.failed("locked", None, error) from error
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def _lock(self, fd: int, operation: int) -> "_FileLock | None":
        """Locks an open file; None if somebody else has the lock. The lock owns the descriptor."""
        lock = _FileLock(fd)
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError:
            lock.release()
            return None
        except BaseException as error:
            if not isinstance(error, OSError) or error.errno not in _NO_FLOCK:
                lock.release()
                raise
            self._has_flock = False
        return lock

    def _hold(self, name: str) -> Callable[[], None] | None:
        path = self._path(name)
        try:
            lock = self._lock(os.open(path, os.O_RDONLY | os.O_CLOEXEC), fcntl.LOCK_SH)
            assert lock is not None, "a lock that waits was not given"
            try:
                # A collector may have deleted the file while we waited for the lock.
                if not os.path.samestat(os.fstat(lock.fd), os.stat(path)):
                    raise FileNotFoundError(errno.ENOENT, "it was deleted", path)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            raise self.failed("read", name, error) from error
        return lock.release

    def _is_held(self, name: str) -> bool:
        try:
            lock = self._lock(self._open_exclusive(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self.failed("read", name, error) from error
        if lock is not None:
            lock.release()
        return lock is None

    def _retire(self, name: str) -> bool:
        try:
            visit("storage.retire")
            lock = self._lock(self._open_exclusive(name), fcntl.LOCK_EX | fcntl.LOCK_NB)
            if lock is None:
                return False
            try:
                # Deleted under the lock: a reader that waits for it finds the file gone (_hold).
                with suppress(FileNotFoundError):
                    os.unlink(self._path(name))
            finally:
                lock.release()
        except FileNotFoundError:
            return True
        except OSError as error:
            raise self.failed("deleted", name, error) from error
        return True

    def _open_exclusive(self, name: str) -> int:
        path = self._path(name)
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)  # NFS locks only files open for writing
        except PermissionError:
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


class _FileLock:
    """An open file for flock(), unlocked and closed by release()."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pid = os.getpid()

    def release(self) -> None:
        # A forked child shares the lock with its parent. The child's copy must not end the lock.
        if self._pid == os.getpid():
            with suppress(OSError):  # there was no lock
                fcntl.flock(self.fd, fcntl.LOCK_UN)
        with suppress(OSError):  # nothing was written through it, so nothing can be lost
            os.close(self.fd)


def _write_parts(fd: int, parts: "Sequence[ReadableBuffer]", is_short: bool) -> None:
    """Writes all parts, without copying them and without holding the GIL."""
    views = [view for part in parts if (view := memoryview(part).cast("B")).nbytes]
    pieces = deque(
        view[at : at + _PIECE_BYTES] for view in views for at in range(0, len(view), _PIECE_BYTES)
    )
    if is_short and pieces:
        pieces = deque([pieces[0][: len(pieces[0]) // 2]])
    while pieces:
        batch: list[memoryview] = []
        size = 0
        while pieces and len(batch) < _PIECES_MAX and size + len(pieces[0]) <= _PIECE_BYTES:
            size += len(pieces[0])
            batch.append(pieces.popleft())
        written = os.writev(fd, batch)
        # Pieces that the system did not take go back to the front.
        while written < size:
            last = batch.pop()
            size -= len(last)
            pieces.appendleft(last[max(written - size, 0) :])
    if is_short:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _is_rocksdb(path: str) -> bool:
    """Whether a directory is a RocksDB database, judging by its files."""
    if not os.path.isfile(os.path.join(path, "CURRENT")):
        return False
    with suppress(OSError), os.scandir(path) as found:
        return any(item.name.startswith("MANIFEST-") for item in found)
    return False


def _try(call: Callable[[str, str], None], source: str, target: str, no: Sequence[int]) -> bool:
    """Gives a file another name; False if the file system cannot do that.

    no: the error numbers that say so.
    """
    try:
        call(source, target)
    except OSError as error:
        if error.errno in no and not isinstance(error, FileExistsError):
            return False
        raise
    return True


def _is_of(path: str, parts: "Sequence[ReadableBuffer]") -> bool:
    """Whether a file consists of these parts."""
    with open(path, "rb", buffering=0) as file:
        for part in parts:
            left = memoryview(part).cast("B")
            while left.nbytes:
                piece = file.read(min(left.nbytes, _PIECE_BYTES))
                if not piece or piece != left[: len(piece)]:
                    return False
                left = left[len(piece) :]
        return not file.read(1)


def _sync_file(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(path: str) -> None:
    """Removes a file if possible. If it stays, it is garbage for a collector."""
    with suppress(OSError):
        os.unlink(path)


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
