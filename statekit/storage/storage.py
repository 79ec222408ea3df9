"""Where checkpoints are kept: the contract, and the registry of what this process does there.

A storage is one directory of files. A file is either there as a whole or not there; it is never
changed afterwards. Two rules make a checkpoint safe, and every storage keeps both:

1. write() returns when the contents are durable, and sync() when the names are. A manifest is
   published with create() after the packs it names were written and synced. So whoever can read
   the manifest can read the whole checkpoint, even after a loss of power.
2. create() never replaces a file. If two publish the same number, one of them gets False.

Garbage collection deletes packs that no manifest names. The packs of an attempt that is not
published yet look the same. Hence the locks: an attempt holds writing(), and only the holder of
collecting() deletes such packs. A storage without locks (S3) cannot tell what other machines do;
there the age of a pack decides (retention.py).

A reader pins its manifest, and retire() does not delete a pinned one. Pins and locks of this
process are in a registry, by URL. A local directory has flock() in addition, for other processes.
"""

import errno
import os
import re
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from statekit import failpoints
from statekit.errors import ArgumentError, DamagedError, MissingFileError, StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

TEMPORARY = ".tmp-"  # in the name of a file that is not complete

failpoints.register("storage.list", "storage.read", "storage.delete", "storage.retire")

_TEMPORARY_NAME = re.compile(
    r"([0-9]{12}\.manifest|[0-9a-f]{32}\.pack|[0-9]{12}-[0-9a-f]{64}\.(part|attachment))"
    r"\.tmp-(unfinished-)?[0-9a-f]+",
    re.ASCII,
)


class Entry(NamedTuple):
    """A file of a storage."""

    name: str
    size: int  # bytes
    modified: float  # seconds since 1970, by the clock of the storage


# Storage.list() hides the builtin in the class.
Entries: TypeAlias = list[Entry]
Names: TypeAlias = list[str]
Pieces: TypeAlias = list[bytes]


class Storage(ABC):
    """One directory of files. All methods may be called from several threads at once.

    Every failure is a StorageError that says what could not be done with which file, why, and
    what to do. The directory is made when something is first written.
    """

    url: str  # normalised: equal places have equal URLs. It may contain a password
    shown: str  # the URL for messages, without secrets
    is_local: bool

    def __init__(self, url: str, shown: str) -> None:
        self.url = url
        self.shown = shown
        self._place = _place_of(url)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.shown!r}>"

    @property
    @abstractmethod
    def has_locks(self) -> bool:
        """Whether writing() and collecting() exclude each other, wherever the processes run."""

    @abstractmethod
    def list(self) -> Entries:
        """The files sorted by name, without lock files; none if there is no such directory."""

    @abstractmethod
    def subdirectories(self) -> Names:
        """The names of the directories in this one, sorted."""

    @abstractmethod
    def sub(self, name: str) -> "Storage":
        """The storage of a directory in this one."""

    @abstractmethod
    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """`length` bytes of a file, or all bytes from the offset on.

        MissingFileError if there is no such file, DamagedError if it ends too early.
        """

    def read_parts(self, name: str, parts: "Sequence[tuple[int, int]]") -> Pieces:
        """Several parts of a file: offset and length of each. Otherwise like read()."""
        return [self.read(name, offset, length) for offset, length in parts]

    def drop_copies(self, names: "Sequence[str]") -> bool:
        """Forgets copies of files that are kept nearer; whether there were any (cached.py).

        To be called when a file seems to be damaged: perhaps it was the copy.
        """
        return False

    @abstractmethod
    def size(self, name: str) -> int:
        """The size of a file in bytes; MissingFileError if there is none."""

    @abstractmethod
    def write(self, name: str, parts: "Sequence[ReadableBuffer]") -> None:
        """Writes a file of these parts. It replaces a file of that name.

        The contents are durable when it returns, the name after sync(). If it fails, the file of
        that name is as it was before; or, on a file system without rename(), it may have a part of
        the new contents.
        """

    @abstractmethod
    def sync(self) -> None:
        """Makes names durable: that written files have theirs, and that deleted files are gone."""

    @abstractmethod
    def create(
        self, name: str, data: bytes, on_reserved: Callable[[], None] = lambda: None
    ) -> bool:
        """Like write() and sync(). But if there is a file of that name, it only returns False.

        on_reserved: called before the contents are there. On a storage where name and contents
        cannot appear at once, the name is there by then. If it raises, nothing is created.
        """

    def is_unfinished(self, name: str) -> bool:
        """Whether create() has not finished this file: it is not complete, but that is no damage.

        Only on a storage where name and contents cannot appear at once: a process that dies in
        create() leaves such a file there.
        """
        return False

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Deletes files in this order; missing ones are fine. Durable after sync()."""

    def retire(self, name: str) -> bool:
        """Deletes a file, unless somebody pins it: then False. Nobody can pin it meanwhile."""
        with self._place.lock:
            return not self._place.pins[name] and self._retire(name)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The shared lock of an attempt in progress. Waits while garbage is collected."""
        with self._place.attempt(), self._shared_lock():
            yield

    @contextmanager
    def collecting(self) -> Iterator[bool]:
        """The exclusive lock, without waiting: False if an attempt or a collector is at work."""
        with self._place.collector() as is_alone:
            if not is_alone:
                yield False
            else:
                with self._exclusive_lock() as is_alone:
                    yield is_alone

    def pin(self, name: str) -> "Pin":
        """Protects a file from retire() until released; MissingFileError if there is none.

        Pin before you read: otherwise the file may be deleted in between.
        """
        place = self._place
        place.add_pin(name)
        try:
            release = self._hold(name)
        except BaseException:
            place.drop_pin(name)
            raise
        return Pin(name, place, release)

    def is_pinned(self, name: str) -> bool:
        """Whether somebody pins the file. For reports only: the answer may change at any time."""
        return self._place.pins[name] > 0 or self._is_held(name)

    def file(self, name: str) -> str:
        """A file's full name for messages, without secrets."""
        return f"{self.shown}/{name}"

    # What a storage adds to the registry for other processes: nothing, unless it overrides these.

    def _shared_lock(self) -> AbstractContextManager[object]:
        return nullcontext()

    def _exclusive_lock(self) -> AbstractContextManager[bool]:
        return nullcontext(True)

    def _hold(self, name: str) -> Callable[[], None] | None:
        """Holds a file that must exist; returns the function that lets go of it."""
        self.size(name)
        return None

    def _is_held(self, name: str) -> bool:
        return False

    def _retire(self, name: str) -> bool:
        self.delete([name])
        return True

    # Errors

    def failed(self, done: str, name: str | None, error: BaseException) -> StorageError:
        """Our exception for one of the system or a client: failed("written", "x.pack", error)."""
        place = self.shown if name is None else self.file(name)
        if isinstance(error, FileNotFoundError) and name is not None and done.startswith("read"):
            return MissingFileError(
                f"there is no file {place!r}. Check the place; "
                "if the file was deleted, use another checkpoint."
            )
        reason = self._reason(error).rstrip(". ")
        return StorageError(f"{place!r} cannot be {done}: {reason}. {self._advice(error)}")

    def ends_early(self, name: str, size: int, offset: int, length: int | None) -> DamagedError:
        """The exception for a file that has fewer bytes than somebody needs."""
        to = "" if length is None else f" to {offset + length}"
        return DamagedError(
            f"the file {self.file(name)!r} is damaged: it ends at byte {size}, and the bytes from "
            f"{offset}{to} are needed. Use another checkpoint, or a copy of this file.",
            file=self.file(name),
            offset=size,
        )

    def _reason(self, error: BaseException) -> str:
        text = error.strerror if isinstance(error, OSError) else None
        return text or str(error) or type(error).__name__

    def _advice(self, error: BaseException) -> str:
        number = error.errno if isinstance(error, OSError) else None
        return _ADVICE.get(number or 0, _ADVICE_ELSE)


_FULL = "Free some space or use another place"
_DENIED = "Give this user the right to read and write there, or use another place"
_ADVICE = {
    number: f"{advice}; the checkpoints that are complete are not affected."
    for number, advice in {
        errno.ENOSPC: _FULL,
        errno.EDQUOT: _FULL,
        errno.EFBIG: _FULL,
        errno.EMFILE: "Raise the limit of open files (ulimit -n)",
        errno.ENFILE: "Raise the limit of open files of the system (fs.file-max)",
        errno.EACCES: _DENIED,
        errno.EPERM: _DENIED,
        errno.EROFS: "Mount the file system for writing, or use another place",
        errno.ENOTDIR: "A part of the path is a file: name a directory",
        errno.EISDIR: "Remove the directory of that name",
        errno.ENOENT: "Name a directory on a disk (/proc and the like take none), and see to it "
        "that nobody else removes files there",
        errno.EIO: "Look for errors of the disk in the system's log and use another place",
        errno.ENAMETOOLONG: "Use a shorter path",
    }.items()
}
_ADVICE_ELSE = "Try again or use another place; the checkpoints that are complete are not affected."


class Pin:
    """A file that is protected from garbage collection until release()."""

    def __init__(self, name: str, place: "_InUse", release: Callable[[], None] | None) -> None:
        self.name = name
        self._places = [place]  # empty once released; pop() is atomic, so release() acts once
        self._release = release
        self._pid = os.getpid()

    def release(self) -> None:
        """Ends the protection; a second call does nothing."""
        try:
            place = self._places.pop()
        except IndexError:
            return
        if self._release is not None:
            self._release()
        if self._pid == os.getpid():  # a child forgets the pins of its parent (_forget)
            place.drop_pin(self.name)

    def __enter__(self) -> "Pin":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    # A pin that is lost, by a provider that was never closed, must not protect the file for ever.
    __del__ = release


class _InUse:
    """What this process does in one directory."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.pins: Counter[str] = Counter()
        self._attempts = 0
        self._is_collected = False

    def add_pin(self, name: str) -> None:
        with self.lock:
            self.pins[name] += 1

    def drop_pin(self, name: str) -> None:
        with self.lock:
            self.pins[name] -= 1
            self.pins += Counter()  # drops names whose count is 0

    @contextmanager
    def attempt(self) -> Iterator[None]:
        with self.lock:
            self.lock.wait_for(lambda: not self._is_collected)
            self._attempts += 1
        try:
            yield
        finally:
            with self.lock:
                self._attempts -= 1

    @contextmanager
    def collector(self) -> Iterator[bool]:
        with self.lock:
            is_alone = not self._attempts and not self._is_collected
            self._is_collected |= is_alone
        try:
            yield is_alone
        finally:
            if is_alone:
                with self.lock:
                    self._is_collected = False
                    self.lock.notify_all()


# Weak: a place is remembered as long as one of its storages or pins lives.
_places: WeakValueDictionary[str, _InUse] = WeakValueDictionary()
_places_lock = threading.Lock()


def _place_of(url: str) -> _InUse:
    with _places_lock:
        place = _places.get(url)
        if place is None:
            place = _places[url] = _InUse()
        return place


def _forget() -> None:
    """In a forked child: locks, pins and attempts belong to threads of the parent, so drop them."""
    global _places_lock
    _places_lock = threading.Lock()
    for place in list(_places.values()):
        place.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_forget)


def is_temporary(name: str) -> bool:
    """Whether a file is still being written, or was when its writer crashed.

    >>> is_temporary("000000000007.manifest.tmp-61d2"), is_temporary("000000000007.manifest")
    (True, False)
    >>> is_temporary("notes.tmp-61d2")  # somebody else's
    False
    """
    return _TEMPORARY_NAME.fullmatch(name) is not None


def check_sub(name: str) -> str:
    """Returns the name of a subdirectory; ArgumentError if it cannot be one."""
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise ArgumentError(f"{name!r} names no subdirectory. Give one name without a slash.")
    return name
