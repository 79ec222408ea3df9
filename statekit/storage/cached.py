"""A far storage whose packs are kept on this host, too, for all processes of it.

    <directory>/<digest of the URL>/<name>        a pack, whole, as the storage has it
                                   /<name>.tmp-…  being written, or its writer died

A pack is named by its contents and never changed. So a copy is never stale, and none can be ahead
of the storage: which packs a checkpoint consists of is said by its manifest, which is always read
from the storage. What can be wrong with a copy, and what follows:

    it is missing    the pack is read from the storage, and a copy is kept
    it is short      the same
    it is damaged    whoever reads it verifies checksums, as always, and calls drop_copies() before
                     it says that the pack is damaged. Then it reads the pack once more
    it cannot be     nothing is kept: no disk, no space, no rights. A cache that fails is no reason
      written        to fail

A pack is copied when it is written, and when it is read: if most of it is wanted or it is small;
of others the parts are read from the storage. Copies are made under another name and renamed, so
whoever finds one finds all of it. Two processes that want the same pack may both fetch it.

The directory is bounded: after each copy the ones that were not used for the longest time go, until
the rest is small enough; and all that were not used for hours. A reader that has such a file open
goes on reading it.

Copies are read, and not mapped: reading takes 5 of the 85 ms of CPU that a batch of 20 k of 1 M
entries of 64 bytes takes, and a mapped file that somebody truncates kills the process.
"""

import hashlib
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING

from statekit.errors import DamagedError, StorageError
from statekit.storage.storage import TEMPORARY, Entries, Names, Pieces, Storage

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

CACHE_BYTES = 4 << 30
_PACK = re.compile(r"[0-9a-f]{32}\.pack", re.ASCII)
_SMALL_BYTES = 4 << 20  # a pack up to this size is fetched whole, whatever of it is wanted
_WORTH = 8  # a larger one is, if an eighth of it is wanted
_ROOM = 0.9  # of the bound that is left in use when copies had to go
_UNUSED_SECONDS = 6 * 3600.0


def host_directory() -> str:
    """Where copies are kept on this host unless told."""
    return os.path.join(tempfile.gettempdir(), f"statekit-packs-{os.getuid()}")


class CachedStorage(Storage):
    """A storage, with copies of packs in a directory of this host."""

    is_local = False

    def __init__(self, inner: Storage, directory: str, bytes_max: int = CACHE_BYTES) -> None:
        super().__init__(inner.url, inner.shown)
        self.hits = 0  # reads that were answered by copies
        self.misses = 0  # reads that were not
        self._inner = inner
        self._bytes_max = bytes_max
        self._root = directory
        place = hashlib.sha256(inner.url.encode()).hexdigest()[:32]
        self._place_of_copies = os.path.join(directory, place)
        self._is_usable = bytes_max > 0 and _make_own(directory, self._place_of_copies)

    # ---- Packs

    def read_parts(self, name: str, parts: "Sequence[tuple[int, int]]") -> Pieces:
        if not self._is_usable or _PACK.fullmatch(name) is None:
            return self._inner.read_parts(name, parts)
        if (found := self._read_copy(name, parts)) is not None:
            self.hits += 1
            return found
        self.misses += 1
        if not self._is_worth_copying(name, parts):
            return self._inner.read_parts(name, parts)
        data = self._inner.read(name)
        if any(offset + length > len(data) for offset, length in parts):
            return self._inner.read_parts(name, parts)  # which says what is wrong
        self._keep(name, [data])
        view = memoryview(data)
        return [bytes(view[offset : offset + length]) for offset, length in parts]

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        if length is None or _PACK.fullmatch(name) is None:
            return self._inner.read(name, offset, length)
        return self.read_parts(name, [(offset, length)])[0]

    def write(self, name: str, parts: "Sequence[ReadableBuffer]") -> None:
        self._inner.write(name, parts)
        if self._is_usable and _PACK.fullmatch(name) is not None:
            self._keep(name, parts)

    def drop_copies(self, names: Sequence[str]) -> bool:
        found = False
        for name in names:
            if _PACK.fullmatch(name) is not None:
                with suppress(OSError):
                    os.unlink(self._copy(name))
                    found = True
        return found

    def _is_worth_copying(self, name: str, parts: "Sequence[tuple[int, int]]") -> bool:
        wanted = sum(length for _, length in parts)
        last = max((offset + length for offset, length in parts), default=0)
        if last <= _SMALL_BYTES or wanted * _WORTH >= last:
            size = self._inner.size(name)  # only now: it is a request
            return size <= min(max(_SMALL_BYTES, wanted * _WORTH), self._bytes_max)
        return False

    # ---- Copies

    def _copy(self, name: str) -> str:
        return os.path.join(self._place_of_copies, name)

    def _read_copy(self, name: str, parts: "Sequence[tuple[int, int]]") -> Pieces | None:
        """Parts of a copy; None if there is none that has them."""
        path = self._copy(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            pieces = [os.pread(fd, length, offset) for offset, length in parts]
            os.utime(fd)  # it was used just now
        except OSError:
            return None
        finally:
            os.close(fd)
        if any(len(piece) != part[1] for piece, part in zip(pieces, parts, strict=True)):
            return None
        return pieces

    def _keep(self, name: str, parts: "Sequence[ReadableBuffer]") -> None:
        """Keeps a copy, if that is possible."""
        draft = self._copy(f"{name}{TEMPORARY}{secrets.token_hex(8)}")
        with suppress(OSError):
            try:
                with open(draft, "xb") as file:
                    file.writelines(parts)
                os.rename(draft, self._copy(name))
            except BaseException:
                with suppress(OSError):
                    os.unlink(draft)
                raise
            self._clean_up()

    def _clean_up(self) -> None:
        """Removes what is too much, and what nobody uses any more."""
        files = sorted(_files(self._root), reverse=True)  # the one that was used last comes first
        oldest = time.time() - _UNUSED_SECONDS
        bound = self._bytes_max
        if sum(size for _, size, _ in files) > bound:
            bound = int(bound * _ROOM)
        total = 0
        for used, size, path in files:
            total += size
            if total > bound or used < oldest:
                with suppress(OSError):
                    os.unlink(path)

    # ---- All else is the storage's

    @property
    def has_locks(self) -> bool:
        return self._inner.has_locks

    def list(self) -> Entries:
        return self._inner.list()

    def subdirectories(self) -> Names:
        return self._inner.subdirectories()

    def sub(self, name: str) -> Storage:
        return self._inner.sub(name)

    def size(self, name: str) -> int:
        return self._inner.size(name)

    def sync(self) -> None:
        self._inner.sync()

    def create(
        self, name: str, data: bytes, on_reserved: Callable[[], None] = lambda: None
    ) -> bool:
        return self._inner.create(name, data, on_reserved)

    def is_unfinished(self, name: str) -> bool:
        return self._inner.is_unfinished(name)

    def delete(self, names: Sequence[str]) -> None:
        self._inner.delete(names)

    def _shared_lock(self) -> AbstractContextManager[object]:
        return self._inner._shared_lock()

    def _exclusive_lock(self) -> AbstractContextManager[bool]:
        return self._inner._exclusive_lock()

    def _hold(self, name: str) -> Callable[[], None] | None:
        return self._inner._hold(name)

    def _is_held(self, name: str) -> bool:
        return self._inner._is_held(name)

    def _retire(self, name: str) -> bool:
        return self._inner._retire(name)

    def failed(self, done: str, name: str | None, error: BaseException) -> StorageError:
        return self._inner.failed(done, name, error)

    def ends_early(self, name: str, size: int, offset: int, length: int | None) -> DamagedError:
        return self._inner.ends_early(name, size, offset, length)


def _make_own(*directories: str) -> bool:
    """Makes directories that only this user can change. False if that is not so: /tmp is open to
    others, who could put files there before us.
    """
    for one in directories:
        try:
            os.makedirs(one, mode=0o700, exist_ok=True)
            found = os.lstat(one)
        except OSError:
            return False
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            return False
    return True


def _files(root: str) -> Iterator[tuple[float, int, str]]:
    """The copies of all places: when each was used, its size and path."""
    with suppress(OSError), os.scandir(root) as places:
        for place in places:
            with suppress(OSError), os.scandir(place.path) as copies:
                for copy in copies:
                    with suppress(OSError):
                        found = copy.stat(follow_symlinks=False)
                        yield found.st_mtime, found.st_size, copy.path
