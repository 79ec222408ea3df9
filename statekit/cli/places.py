"""What a URL on the command line stands for.

/data/ckpt           a directory of checkpoints: the newest one
s3://bucket/job@7    checkpoint 7 of a directory
/data/job            a directory that has worker-0, worker-1 ... in it: all of them
rocksdb:/path        a home; statekit.homes knows which schemes there are
127.0.0.1:7000       a process that serves; also [::1]:7000 and unix:/path
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from statekit.checkpoint.reader import Checkpoint, open_checkpoint
from statekit.errors import ArgumentError, NoCheckpointError
from statekit.format.manifest import number_of
from statekit.homes import HomeUrl
from statekit.homes.home import is_home_scheme
from statekit.storage import Storage, open_storage

_NUMBERED = re.compile(r"(?s)(.+)@(\d{1,12})")
_WORKER = re.compile(r"worker-(\d+)")
_ADDRESS = re.compile(r"unix:.*|(\[[0-9A-Fa-f:.]*\]|[A-Za-z0-9._-]*):\d+")
_MARKED = re.compile(r"(?s)(.*?[^/@])@[^/]*/?")  # URL@7, or something that was meant as one


class Place(NamedTuple):
    """A URL, taken apart."""

    storage: Storage
    at: int | None  # the number of a checkpoint; None for the newest

    @property
    def shown(self) -> str:
        return self.storage.shown if self.at is None else f"{self.storage.shown}@{self.at}"


def is_address(url: str) -> bool:
    """Whether it is the address of a process that serves."""
    return _ADDRESS.fullmatch(url) is not None


def is_home(url: str) -> bool:
    """Whether it is the URL of a home. (memory://x is a storage of fsspec, memory: is a home.)"""
    scheme, colon, rest = url.partition(":")
    is_storage = scheme.lower() == "memory" and rest.startswith("//")
    return bool(colon) and not is_storage and is_home_scheme(scheme)


def parse_place(url: str, at: int | None = None) -> Place:
    """Takes URL@7 apart. at: the number from the option --at."""
    found = _NUMBERED.fullmatch(url)
    place = url if found is None else found[1]
    if is_home(place):
        shown = HomeUrl.parse(place).shown
        raise ArgumentError(
            f"{shown!r} is a home, and this is about checkpoints. "
            f"`statekit checkpoint {shown} --to DIR` makes one of it."
        )
    if is_address(place):
        raise ArgumentError(
            f"{place!r} is the address of a process, and this is about checkpoints. "
            f"For a directory of that name write ./{place}"
        )
    if found is None:
        return Place(open_storage(url), at)
    if at is not None and at != int(found[2]):
        raise ArgumentError(f"{url!r} and --at {at} name two checkpoints. Give one of them.")
    return Place(open_storage(place), int(found[2]))


def parse_directory(url: str) -> Storage:
    """A directory as a whole. ArgumentError if one of its checkpoints is named."""
    place = parse_place(url)
    if place.at is not None:
        raise ArgumentError(
            f"{url!r} is checkpoint {place.at}, and this is about the whole directory "
            f"{place.storage.shown!r}. Leave @{place.at} out."
        )
    return place.storage


def _check_mark(url: str) -> None:
    """ArgumentError if a URL has no checkpoints, and was probably meant as URL@NUMBER."""
    found = _MARKED.fullmatch(url)
    if found is None:
        return
    _, scheme, rest = found[1].partition("://")
    if scheme and "/" not in rest:
        return  # the @ in sftp://me@host means something else
    storage = open_storage(found[1])
    if has_checkpoints(storage) or worker_names(storage):
        raise ArgumentError(
            f"{url!r} names no checkpoint. Write {found[1]}@7 for checkpoint 7 of {found[1]}; "
            f"`statekit ls {found[1]}` tells which there are."
        )


def has_checkpoints(storage: Storage) -> bool:
    return any(number_of(entry.name) is not None for entry in storage.list())


def worker_names(storage: Storage) -> list[str]:
    """worker-0, worker-1 ... of a directory, by number."""
    found = [(_WORKER.fullmatch(name), name) for name in storage.subdirectories()]
    return [name for _, name in sorted((int(match[1]), name) for match, name in found if match)]


def open_one(url: str, at: int | None = None) -> Checkpoint:
    """The checkpoint that a URL names."""
    places = expand([url], at)
    if len(places) > 1:
        raise NoCheckpointError(
            f"{parse_place(url).storage.shown!r} has the checkpoints of {len(places)} workers. "
            f"Name one of them, such as {places[0].storage.shown}, or merge them first."
        )
    return open_checkpoint(*places[0])


def expand(urls: Sequence[str], at: int | None = None) -> list[Place]:
    """One place for each URL, or for each worker in it."""
    found = []
    for url in urls:
        place = parse_place(url, at)
        workers = []
        if not has_checkpoints(place.storage):
            workers = worker_names(place.storage)
            if not workers:
                _check_mark(url)
        found += [Place(place.storage.sub(name), place.at) for name in workers] or [place]
    return found


def expand_all(url: str) -> list[tuple[str, Place]]:
    """A directory and its workers, by name; "" is the directory, if it has checkpoints itself."""
    storage, at = parse_place(url)
    found = [(name, Place(storage.sub(name), at)) for name in worker_names(storage)]
    if has_checkpoints(storage):
        found.insert(0, ("", Place(storage, at)))
    elif not found:
        _check_mark(url)
        found = [("", Place(storage, at))]
    return found


def open_several(urls: Sequence[str], at: int | None = None) -> list[Checkpoint]:
    """The checkpoints that URLs name. A URL that has workers in it stands for all of them."""
    return [open_checkpoint(place.storage, place.at) for place in expand(urls, at)]
