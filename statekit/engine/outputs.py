"""Outputs: a sender with its sockets. What a task does with what it makes."""

from collections.abc import Callable, Mapping, Sequence
from math import inf

import numpy as np
import pyarrow as pa

from statekit.engine.channel import Outgoing, connect
from statekit.engine.collector import Collector, Taken
from statekit.engine.items import Move
from statekit.engine.records import Key, Router
from statekit.engine.sender import Send, Sender
from statekit.engine.settings import Settings

Map = Callable[[pa.RecordBatch], "pa.RecordBatch | None"]


class Outputs:
    """The channels to the next stage, and what is collected for them."""

    def __init__(
        self,
        name: str,
        maps: Sequence[Map],
        key: Key | None,
        owners: Sequence[str],
        receivers: Mapping[str, str],
        version: int,
        settings: Settings,
    ) -> None:
        """receivers: their addresses. key: None if the next stage has one task, which gets all."""
        self.name = name
        self._maps = maps
        self._key = key
        self._sender = Sender(owners, receivers, version)
        self.records = 0  # that were sent
        self._counts = np.zeros(len(owners), np.int64)  # of records, by key-group
        self._router = self._make_router()
        self._window = settings.buffer_bytes
        self._collector = Collector(settings.batch_rows, settings.batch_timeout_ms)
        self._channels = {to: self._connect(place) for to, place in receivers.items()}

    def _connect(self, address: str) -> Outgoing:
        return Outgoing(connect(address), self.name, self._window)

    def _make_router(self) -> Router | None:
        return None if self._key is None else Router(self._key, self._sender.owners, self._counts)

    def send(self, batch: pa.RecordBatch | None) -> None:
        """What an operator has made."""
        self.deal(self.map(batch))

    def map(self, batch: pa.RecordBatch | None) -> pa.RecordBatch | None:
        for function in self._maps:
            if batch is None:
                return None
            batch = function(batch)
        return batch

    def deal(self, batch: pa.RecordBatch | None) -> None:
        """To the receivers of its records; waits where one is behind."""
        if batch is None or not batch.num_rows:
            return
        self.records += batch.num_rows
        if self._router is None:
            self._send(self._collector.add(self._sender.owners[0], batch))
            return
        for to, part in self._router.deal(batch):
            self._send(self._collector.add(to, part))

    def send_due(self) -> None:
        """Sends what was collected, if it has waited long enough."""
        self._send(self._collector.take_due())

    @property
    def left(self) -> float:
        """Seconds until send_due() has something to do."""
        left = self._collector.left
        return inf if left is None else left

    def _send(self, taken: Taken) -> None:
        for to, batch in taken:
            self._channels[to].send_records(batch)

    @property
    def queued_bytes(self) -> int:
        """What receivers have not taken yet."""
        return sum(channel.ahead for channel in self._channels.values())

    def weights(self) -> list[int]:
        """How many records each key-group got; what is long ago counts less."""
        found: list[int] = self._counts.tolist()
        self._counts //= 2
        return found

    def advance(self, time: int) -> None:
        self._do(self._sender.advance(time))

    def barrier(self, number: int) -> None:
        self._do(self._sender.barrier(number))

    def move(self, move: Move) -> None:
        self._do(self._sender.move(move))
        self._router = self._make_router()

    def open(self, receiver: str, address: str) -> None:
        self._channels[receiver] = self._connect(address)
        self._do(self._sender.open(receiver))

    def leave(self, receiver: str) -> None:
        self._do(self._sender.leave(receiver))
        self._channels.pop(receiver).finish()

    def end(self) -> None:
        """Sends the end, and waits until all receivers have taken everything."""
        self._do(self._sender.end())
        for channel in self._channels.values():
            channel.finish()
        self._channels.clear()

    def close(self) -> None:
        """Nothing is sent any more, not even the end."""
        for channel in self._channels.values():
            channel.close()

    def _do(self, sends: Sequence[Send]) -> None:
        if sends:
            self._send(self._collector.take())
        for to, item in sends:
            self._channels[to].send(item)
