"""Channels: one stream socket from a sender to a receiver. Bounded by credit.

A sender that is so many bytes of batches ahead of what its receiver has taken waits for credit,
which comes back on the same socket. So what is on its way is bounded by the window and one batch.
A receiver that does not read holds up its senders and nobody else. Watermarks, barriers and marks
are small and need no credit: only the records before a mark can keep it from being sent.

Unix sockets (an address is a path), or TCP on loopback ("127.0.0.1:port"). A channel begins with
the name of its sender, after one byte with its length; frames follow (frames.py). After its end,
the sender waits until the receiver has closed: nothing is cut off on the way.
"""

import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa

from statekit.engine import frames
from statekit.engine.items import Barrier, End, Mark, Watermark
from statekit.errors import EngineError

WINDOW = 4 << 20  # bytes of batches that may be on their way
_NAME_MAX = 255
_LOOPBACK = ("127.0.0.1", "localhost")


class ChannelLostError(EngineError):
    """The task at the other end has gone, or its machine does not let us reach it."""


def listen(address: str) -> socket.socket:
    """address: a path for a Unix socket, or "127.0.0.1:0"."""
    place = _tcp(address)
    try:
        if place is not None:
            return socket.create_server(place)
        with ExitStack() as undo:
            found = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            found.bind(address)
            Path(address).chmod(0o600)
            found.listen(64)
            undo.pop_all()
        return found
    except OSError as error:
        raise EngineError(f"cannot listen at {address!r}: {error.strerror or error}.") from None


def connect(address: str) -> socket.socket:
    place = _tcp(address)
    try:
        if place is not None:
            made = socket.create_connection(place)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        with ExitStack() as undo:
            made = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            made.connect(address)
            undo.pop_all()
        return made
    except OSError as error:
        raise ChannelLostError(
            f"nobody listens at {address!r}: {error.strerror or error}."
        ) from None


def _tcp(address: str) -> tuple[str, int] | None:
    if "/" in address:
        return None
    host, _, port = address.rpartition(":")
    if host not in _LOOPBACK or not port.isdecimal():
        raise EngineError(
            f"{address!r} is no address of the engine. Its processes are on one machine: pass the "
            'path of a Unix socket, or "127.0.0.1:0".'
        )
    return host, int(port)


def read_bytes(made: socket.socket, size: int) -> bytearray | None:
    """So many bytes; None if the stream ends before the first of them."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        try:
            count = made.recv_into(view[have:])
        except OSError as error:
            raise ChannelLostError(f"a channel broke: {error.strerror or error}.") from None
        if not count:
            if have:
                raise ChannelLostError(
                    f"a channel ended in the middle of a frame ({have} of {size})."
                )
            return None
        have += count
    return data


def write_buffers(made: socket.socket, buffers: list[Any]) -> None:
    views = [memoryview(one).cast("B") for one in buffers if memoryview(one).nbytes]
    try:
        while views:
            sent = made.sendmsg(views)
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if views:
                views[0] = views[0][sent:]
    except OSError as error:
        raise ChannelLostError(f"a channel broke: {error.strerror or error}.") from None


class Outgoing:
    """The sender's end."""

    def __init__(self, made: socket.socket, name: str, window: int = WINDOW) -> None:
        self._socket = made
        self._window = window
        self.ahead = 0  # bytes of batches that the receiver has not taken
        self._schema: pa.Schema | None = None
        encoded = name.encode()
        assert 0 < len(encoded) <= _NAME_MAX
        write_buffers(made, [bytes([len(encoded)]), encoded])

    def send(self, item: Watermark | Barrier | Mark | End) -> None:
        write_buffers(self._socket, frames.pack(item))

    def send_records(self, batch: pa.RecordBatch) -> None:
        """Waits for credit if the receiver is too far behind."""
        if self._schema is None or not batch.schema.equals(self._schema):
            self._schema = batch.schema
            write_buffers(self._socket, frames.pack_schema(batch.schema))
        packed = frames.pack_records(batch)
        size = packed[1].size
        while self.ahead >= self._window:
            self._take_credit(self._receive())
        self.ahead += size
        write_buffers(self._socket, packed)

    def finish(self) -> None:
        """After the end was sent: waits until the receiver has it."""
        self._socket.shutdown(socket.SHUT_WR)
        while (head := read_bytes(self._socket, frames.HEADER.size)) is not None:
            self._take_credit(head)
        self.close()

    def _receive(self) -> bytearray:
        if (head := read_bytes(self._socket, frames.HEADER.size)) is None:
            raise ChannelLostError("the receiver of a channel has gone.")
        return head

    def _take_credit(self, head: bytearray) -> None:
        kind, size = frames.header(head)
        data = read_bytes(self._socket, size)
        if kind != frames.CREDIT or data is None:
            raise EngineError(
                f"{frames.NAMES[kind]} came from a receiver, which gives credit only."
            )
        taken = int.from_bytes(data, "little")
        if not 0 < taken <= self.ahead:
            raise EngineError(f"a receiver has taken {taken} bytes, and was sent {self.ahead}.")
        self.ahead -= taken

    def close(self) -> None:
        self._socket.close()


class Incoming:
    """The receiver's end. It is selectable."""

    def __init__(self, made: socket.socket, window: int = WINDOW) -> None:
        self._socket = made
        self._step = window // 4  # credit is given back in steps, not for each batch
        self._taken = 0
        self._schema: pa.Schema | None = None
        length = read_bytes(made, 1)
        name = read_bytes(made, length[0]) if length and length[0] else None
        try:
            self.name = name.decode() if name else ""
        except UnicodeDecodeError:
            self.name = ""
        if not self.name:
            raise EngineError("what connected here does not say who it is: it is no task.")

    def fileno(self) -> int:
        return self._socket.fileno()

    def receive(self) -> pa.RecordBatch | Watermark | Barrier | Mark | End | None:
        """The next item; waits for it. None if the sender has gone."""
        while True:
            head = read_bytes(self._socket, frames.HEADER.size)
            if head is None:
                return None
            kind, size = frames.header(head)
            data = read_bytes(self._socket, size)
            if data is None:
                raise ChannelLostError("a channel ended in the middle of a frame.")
            if kind == frames.SCHEMA:
                self._schema = frames.unpack_schema(data)
                continue
            if kind == frames.RECORDS:
                self._taken += size
                return frames.unpack_records(data, self._schema)
            return frames.unpack(kind, data)

    def give_credit(self) -> None:
        """What was received has been taken: the sender may send more."""
        if self._taken >= self._step:
            write_buffers(
                self._socket, frames.frame(frames.CREDIT, self._taken.to_bytes(8, "little"))
            )
            self._taken = 0

    def close(self) -> None:
        self._socket.close()
