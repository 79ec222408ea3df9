"""What a URL on the command line stands for.

/data/ckpt           a directory of checkpoints: the newest one
s3://bucket/job@7    checkpoint 7 of a directory
/data/job            a directory that has worker-0, worker-1 ... in it: all of them
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from statekit.checkpoint.manifest import number_of
from statekit.checkpoint.reader import Checkpoint, open_checkpoint
from statekit.checkpoint.storage import Storage, open_storage
from statekit.errors import ArgumentError, NoCheckpointError

_NUMBERED = re.compile(r"(?s)(.+)@(\d{1,12})")
_WORKER = re.compile(r"worker-(\d+)")


class Place(NamedTuple):
    """A URL, taken apart."""

    storage: Storage
    at: int | None  # the number of a checkpoint; None for the newest


def parse_place(url: str, at: int | None = None) -> Place:
    """Takes URL@7 apart. at: what an option says about it."""
    found = _NUMBERED.fullmatch(url)
    if found is None:
        return Place(open_storage(url), at)
    if at is not None and at != int(found[2]):
        raise ArgumentError(f"{url!r} and --at {at} name two checkpoints. Give one of them.")
    return Place(open_storage(found[1]), int(found[2]))


def has_checkpoints(storage: Storage) -> bool:
    return any(number_of(entry.name) is not None for entry in storage.list())


def worker_names(storage: Storage) -> list[str]:
    """worker-0, worker-1 ... of a directory, by number."""
    found = [(_WORKER.fullmatch(name), name) for name in storage.subdirectories()]
    return [name for _, name in sorted((int(match[1]), name) for match, name in found if match)]


def open_one(url: str, at: int | None = None) -> Checkpoint:
    """The checkpoint that a URL names."""
    place = parse_place(url, at)
    if not has_checkpoints(place.storage) and (workers := worker_names(place.storage)):
        raise NoCheckpointError(
            f"{place.storage.shown!r} has the checkpoints of {len(workers)} workers. "
            f"Name one of them, such as {place.storage.file(workers[0])}, or merge them first."
        )
    return open_checkpoint(place.storage, place.at)


def expand(urls: Sequence[str]) -> list[Place]:
    """One place for each URL, or for each worker in it."""
    found = []
    for url in urls:
        place = parse_place(url)
        workers = [] if has_checkpoints(place.storage) else worker_names(place.storage)
        found += [Place(place.storage.sub(name), place.at) for name in workers] or [place]
    return found


def open_several(urls: Sequence[str]) -> list[Checkpoint]:
    """The checkpoints that URLs name; one that has workers in it stands for all of them."""
    return [open_checkpoint(place.storage, place.at) for place in expand(urls)]
