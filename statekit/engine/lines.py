"""Lines: text that comes on a socket, as the source of a job.

    job.source(lines("127.0.0.1:9999", "/data/job/lines"))      # parallelism=1

A socket cannot be asked again. So what comes is written to a file before it goes on, and a source
that is started again reads the file from its position on, and then connects again. What was on its
way to a process that was killed is lost: nobody has seen it. All else counts once.
"""

import select
import socket
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, BinaryIO

import pyarrow as pa

from statekit.engine.channel import connect
from statekit.engine.job import Placed, Read, Until
from statekit.errors import EngineError

_WAIT_S = 0.02  # for bytes, before the coordinator is listened to again
_PIECE = 1 << 16


def lines(address: str, folder: "str | Path") -> Read:
    """Batches with a column `line`, until the other end closes.

    address: "127.0.0.1:port", or the path of a Unix socket. folder: for the file.
    """

    def read(task: int, tasks: int, start: Any) -> Iterator[Placed | Until]:
        if tasks != 1:
            raise EngineError("a source of lines has one connection: give it parallelism=1.")
        Path(folder).mkdir(parents=True, exist_ok=True)
        with (Path(folder) / "lines").open("a+b") as file:
            yield from _kept(file, start)
            with connect(address) as made:
                yield from _new(made, file)

    return read


def _kept(file: BinaryIO, start: int) -> Iterator[Placed]:
    """What came before this start of the source, and was not processed."""
    file.seek(start)
    while piece := file.read(_PIECE):
        piece += file.readline()
        whole = piece[: piece.rfind(b"\n") + 1]
        start += len(whole)
        if whole:
            yield Placed(_batch(whole), start)
    file.truncate(start)  # the beginning of a line, whose end was lost


def _new(made: socket.socket, file: BinaryIO) -> Iterator[Placed | Until]:
    position, rest = file.seek(0, 2), b""
    while True:
        yield Until(monotonic())
        if not select.select([made], [], [], _WAIT_S)[0]:
            continue
        piece = made.recv(_PIECE)
        if not piece and rest:
            piece = b"\n"  # the last line had none
        if not piece:
            return
        file.write(piece)
        file.flush()
        whole, newline, rest = (rest + piece).rpartition(b"\n")
        if newline:
            position += len(whole) + 1
            yield Placed(_batch(whole + b"\n"), position)


def _batch(text: bytes) -> pa.RecordBatch:
    found = text[:-1].split(b"\n")
    return pa.record_batch({"line": [line.decode(errors="replace") for line in found]})
