"""Where files of states are: a directory of this machine, any URL that fsspec knows, or stdout.

A file appears when it is complete. On this machine it is written beside its place and renamed. For
another place it is written to a temporary directory first, since it may not fit into memory. What
is sent there appears as a whole, or is removed if it cannot be sent.
"""

import re
import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from statekit.cli.output import cannot_print
from statekit.errors import ArgumentError, temporary_failed
from statekit.storage import open_storage
from statekit.storage.fsspec import RemoteStorage

_FILE_URL = re.compile(r"(?:file|local):(?://(?=/))?(.+)", re.IGNORECASE)
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")

_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".csv")

Make = Callable[[Path], list[Path]]  # writes a file and those that go with it; returns all of them


class Target(ABC):
    """A directory to write files to."""

    @abstractmethod
    def shown(self, name: str) -> str:
        """A file's full name, for messages."""

    @abstractmethod
    def exists(self, name: str) -> bool: ...

    @abstractmethod
    def write(self, name: str, make: Make) -> int:
        """Makes a file there. Returns its size."""

    def discard(self) -> None:  # noqa: B027
        """Removes what was written."""


class LocalTarget(Target):
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._written: list[Path] = []

    def shown(self, name: str) -> str:
        return str(self._directory / name)

    def exists(self, name: str) -> bool:
        return (self._directory / name).exists()

    def write(self, name: str, make: Make) -> int:
        self._directory.mkdir(parents=True, exist_ok=True)
        made = make(self._directory / name)
        self._written += made
        return made[0].stat().st_size

    def discard(self) -> None:
        for file in self._written:
            file.unlink(missing_ok=True)


class RemoteTarget(Target):
    def __init__(self, storage: RemoteStorage) -> None:
        self._storage = storage
        self._written: list[str] = []

    def shown(self, name: str) -> str:
        return self._storage.file(name)

    def exists(self, name: str) -> bool:
        return any(entry.name == name for entry in self._storage.list())

    def write(self, name: str, make: Make) -> int:
        with _temporary() as directory:
            file, *beside = make(directory / name)
            for one in (*beside, file):  # the file comes last: if it is there, all are
                self._written.append(one.name)
                self._storage.upload(one.name, one)
            return file.stat().st_size

    def discard(self) -> None:
        self._storage.delete(self._written)


class Stdout(Target):
    """One file, as it is."""

    def shown(self, name: str) -> str:
        return "-"

    def exists(self, name: str) -> bool:
        return False

    def write(self, name: str, make: Make) -> int:
        with _temporary() as directory:
            file, *_ = make(directory / name)
            with file.open("rb") as data:
                out = sys.stdout.buffer
                try:
                    shutil.copyfileobj(data, out)
                    out.flush()
                except BrokenPipeError:
                    raise
                except OSError as error:
                    raise cannot_print(error) from None
            return file.stat().st_size


@contextmanager
def _temporary() -> Iterator[Path]:
    try:
        directory = tempfile.TemporaryDirectory(prefix="statekit-files-")
    except OSError as error:
        raise temporary_failed(error) from error
    with directory:
        yield Path(directory.name)


def open_target(out: str, suffix: str, is_one: bool) -> tuple[Target, str | None]:
    """The target that --out names, and the file's name if it names a file and not a directory."""
    if out == "-":
        if not is_one:
            raise ArgumentError("--out - takes one state. Name it with --state.")
        if suffix in (".parquet", ".arrow") and sys.stdout.isatty():
            raise ArgumentError(f"a terminal cannot show {suffix[1:]}. Name a file, or pipe it on.")
        return Stdout(), f"state{suffix}"
    place, _, name = out.rpartition("/")
    is_file = is_one and name.endswith(suffix) and name != suffix
    if not is_file:
        _check_suffix(out, name, suffix, is_one)
        place, name = out, ""
    if (local := local_path(out)) is not None:
        if not is_file and local.exists() and not local.is_dir():
            raise ArgumentError(
                f"{out!r} is a file. Name a directory, or with --state a new file whose name ends "
                f"in {suffix}."
            )
        return LocalTarget(local.parent if is_file else local), local.name if is_file else None
    storage = open_storage(place)
    assert isinstance(storage, RemoteStorage)
    return RemoteTarget(storage), name or None


def _check_suffix(out: str, name: str, suffix: str, is_one: bool) -> None:
    """ArgumentError if a directory has the name of a file: hardly anybody means that."""
    other = "." + name.rpartition(".")[2]
    if "." not in name or other not in _SUFFIXES or Path(out).is_dir():
        return
    if other == suffix and not is_one:
        raise ArgumentError(
            f"{out!r} is called as one file is, and there is a file for each state. "
            "Name the state with --state, or a directory."
        )
    raise ArgumentError(f"{out!r} ends in {other}, and what is written is {suffix[1:]}. Rename it.")


def local_path(url: str) -> Path | None:
    """The path of a file or directory of this machine; None if it is elsewhere."""
    if found := _FILE_URL.fullmatch(url):
        return Path(found[1])
    if _URL.match(url):
        return None
    if not url or _SCHEME.match(url):
        open_storage(url)  # says what is wrong
    return Path(url)


@contextmanager
def local_copy(url: str, *beside: str) -> Iterator[Path]:
    """A file as one of this machine. beside: suffixes of files to bring along, if there are any."""
    if (local := local_path(url)) is not None:
        yield local
        return
    place, _, name = url.rpartition("/")
    storage = open_storage(place)
    assert isinstance(storage, RemoteStorage)
    there = {entry.name for entry in storage.list()}
    with _temporary() as directory:
        for one in (name, *(name + suffix for suffix in beside)):
            if one in there or one == name:
                storage.download(one, directory / one)
        yield directory / name
