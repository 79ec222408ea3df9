"""Control: what the coordinator and its processes tell each other. JSON, with its length in front.

One Unix socket for each process, opened by the process. A message is an object with a "kind".
"""

import socket
import struct
import threading
from typing import Any

import msgspec

from statekit.engine.channel import ChannelLostError, read_bytes, write_buffers
from statekit.errors import EngineError, shorten

_LENGTH = struct.Struct("<I")
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
