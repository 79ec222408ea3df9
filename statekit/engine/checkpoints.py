"""Checkpoints of a job: the parts of all stages, and how far the sources were. Exactly one moment.

A barrier goes through the job. Each source says its position when it sends the barrier, each keyed
task writes its part when it passes, and the coordinator has all of it when the last one has. Then

    1. job-7.json is written: positions, and all parts (small; the packs are on the disk already).
       From now on, checkpoint 7 of the job exists
    2. the parts of each stage are published as checkpoint 7 in its own place, which can be repeated
    3. the sink makes its files visible, which can be repeated

Whoever restarts the job from checkpoint 7 does 2 and 3 once more. So a crash between them does no
harm, and the places of several stages never disagree.
"""

import os
import re
from pathlib import Path
from typing import Any

import msgspec

import statekit as sk
from statekit.errors import EngineError

KEEP = 3  # checkpoints of the job
HOMES = "homes"  # a folder beside them: of tasks whose state is not in memory
_ENDED = "ended.json"


class JobCheckpoint(msgspec.Struct):
    number: int
    positions: dict[str, Any]  # by source task
    parts: dict[str, list[str]]  # by keyed stage
    times: dict[str, int] = {}  # by keyed stage: how far event time had come

    def write(self, folder: Path) -> None:
        """From now on it exists."""
        _write(folder / f"job-{self.number}.json", msgspec.json.encode(self))

    def publish(self, folder: Path) -> None:
        for stage, parts in self.parts.items():
            sk.publish(place_of(folder, stage), parts, number=self.number)

    def collect(self, folder: Path) -> None:
        """Removes those that are no longer kept."""
        for number, path in _files(folder):
            if number <= self.number - KEEP:
                path.unlink()
        for stage in self.parts:
            sk.collect(place_of(folder, stage), keep=KEEP)


def end(folder: Path) -> None:
    """The job has ended: from now on all of its results count, and it never runs again."""
    _write(folder / _ENDED, b"{}")


def has_ended(folder: Path) -> bool:
    return (folder / _ENDED).exists()


def _write(path: Path, data: bytes) -> None:
    """Durably, and all of it or nothing."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def place_of(folder: Path, stage: str) -> str:
    return str(folder / "state" / stage)


def newest(folder: Path) -> JobCheckpoint | None:
    """The newest checkpoint of a job, published."""
    found = sorted(_files(folder))
    if not found:
        return None
    path = found[-1][1]
    try:
        checkpoint = msgspec.json.decode(path.read_bytes(), type=JobCheckpoint)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineError(f"{str(path)!r} is damaged: {error}. Restore an earlier one.") from None
    checkpoint.publish(folder)
    return checkpoint


def _files(folder: Path) -> list[tuple[int, Path]]:
    matches: list[tuple[Path, Any]] = [
        (path, re.fullmatch(r"job-(\d+)\.json", path.name)) for path in folder.iterdir()
    ]
    return [(int(match[1]), path) for path, match in matches if match]
