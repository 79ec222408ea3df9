"""Control: what the coordinator and its processes tell each other. JSON, with its length in front.

One Unix socket for each process, opened by the process. A message is an object with a "kind".

A process that cannot go on says so. If that is because another one has gone, it is *lost* and waits
for the coordinator, which mostly wants it to be a task again. Else it ends.
"""

import os
import socket
import struct
import threading
import traceback
from contextlib import suppress
from typing import Any

import msgspec

from statekit.engine.channel import ChannelLostError, read_bytes, write_buffers
from statekit.errors import EngineError, MigrationError, PeerError, shorten

_LENGTH = struct.Struct("<I")
LOST = (ChannelLostError, PeerError, MigrationError)  # what comes of another process that has gone
SAID_WHY = 3  # exit code of a process that has told the coordinator
_MESSAGE_MAX = 64 << 20  # parts of checkpoints go this way, too


class Control:
    """One end. It is selectable; any thread may send, one receives."""

    def __init__(self, made: socket.socket) -> None:
        self._socket = made
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        data = msgspec.json.encode({"kind": kind, **fields})
        with self._lock:
            write_buffers(self._socket, [_LENGTH.pack(len(data)), data])

    def receive(self) -> dict[str, Any] | None:
        """The next message; waits for it. None if the other end has gone."""
        head = read_bytes(self._socket, _LENGTH.size)
        if head is None:
            return None
        (size,) = _LENGTH.unpack(head)
        if size > _MESSAGE_MAX:
            raise EngineError(
                f"a message says that it has {size} bytes: nobody of ours sends that."
            )
        data = read_bytes(self._socket, size)
        if data is None:
            raise ChannelLostError("the control channel ended in the middle of a message.")
        try:
            message = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"a message is damaged: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise EngineError(f"{shorten(message)} is no message: it has no kind.")
        return message

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> "Control":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- What a process hears and says


class Again(Exception):  # noqa: N818  # no error
    """This process is to be this task now, whatever it was."""

    def __init__(self, task: str, generation: int) -> None:
        self.life = task, generation


def heard(control: Control) -> dict[str, Any]:
    """The next message; waits for it. Again, if it says that."""
    message = control.receive()
    if message is None:
        raise ChannelLostError("the coordinator has gone.")
    if message["kind"] == "again":
        raise Again(message["task"], message["generation"])
    return message


def fail(control: Control) -> None:
    """Says what was raised, and ends the process: nothing it holds counts."""
    with suppress(ChannelLostError):  # else nobody is there to be told
        control.send("failed", is_lost=False, text=traceback.format_exc())
    os._exit(SAID_WHY)


def lost(control: Control) -> None:
    """Says that another process has gone. The coordinator says what is to be done about it."""
    control.send("failed", is_lost=True, text=traceback.format_exc())
