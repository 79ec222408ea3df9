"""Workloads: streams that the engine is shown and measured with, each with its oracle.

base.py        what they have in common: parameters, a job, results that are checked
draws.py       random numbers by seed and number of the event
pace.py        sources that keep to a timetable
key_count.py   counts by key: uniform or Zipf, values of 8 bytes to 64 KiB, load as you like it
words.py       word count: strings, skewed, growing
servers.py     edits by server: few keys, large maps
windowed.py    sums by key and window of event time, of records out of order
files.py       the events of a workload as files

In a TOML file: job = "statekit.engine.workloads:key_count", and its [parameters].
"""

from typing import Any

from statekit.engine.job import Job
from statekit.engine.workloads.base import Workload, configure
from statekit.engine.workloads.key_count import KeyCount
from statekit.engine.workloads.servers import ServerCount
from statekit.engine.workloads.windowed import WindowedSum
from statekit.engine.workloads.words import WordCount
from statekit.errors import ArgumentError, shorten

__all__ = [
    "WORKLOADS",
    "Workload",
    "key_count",
    "server_count",
    "windowed_sum",
    "word_count",
    "workload",
]

WORKLOADS: dict[str, type[Workload]] = {
    kind.name: kind for kind in (KeyCount, WordCount, ServerCount, WindowedSum)
}


def workload(name: str, **parameters: Any) -> Workload:
    """A workload by its name."""
    if name not in WORKLOADS:
        raise ArgumentError(
            f"there is no workload {shorten(name)}. There are {', '.join(WORKLOADS)}."
        )
    return configure(WORKLOADS[name], parameters)


def key_count(folder: str, **parameters: Any) -> Job:
    return configure(KeyCount, parameters).job(folder)


def word_count(folder: str, **parameters: Any) -> Job:
    return configure(WordCount, parameters).job(folder)


def server_count(folder: str, **parameters: Any) -> Job:
    return configure(ServerCount, parameters).job(folder)


def windowed_sum(folder: str, **parameters: Any) -> Job:
    return configure(WindowedSum, parameters).job(folder)
