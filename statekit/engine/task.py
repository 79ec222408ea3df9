"""Task: what a process of a stage does. A source, a keyed task or the sink.

One thread does everything in turns: what the coordinator says, and what comes on the channels. So a
task's operator, its routing and its part of a checkpoint never meet half-way. (The library's own
threads carry state, and those of hand_over.py wait for it.)

A task that cannot go on raises why. Recovery is the coordinator's business.
"""

import os
import selectors
import shutil
import sys
import threading
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Any

import numpy as np
import pyarrow as pa

import statekit as sk
from statekit.assignment import group_ranges
from statekit.engine.align import (
    Action,
    Advance,
    Finish,
    HandOver,
    Marked,
    Pass,
    Process,
    Receiver,
    Settled,
)
from statekit.engine.channel import ChannelLostError, Incoming, listen
from statekit.engine.checkpoints import HOMES
from statekit.engine.control import LOST, Control, fail, heard, lost
from statekit.engine.event_time import clock
from statekit.engine.frames import groups_from_plain, move_from_plain
from statekit.engine.hand_over import HandOvers
from statekit.engine.histogram import Histogram
from statekit.engine.items import FIRST, LAST, Watermark
from statekit.engine.job import Job, Placed, Stage, Until
from statekit.engine.metrics import Due
from statekit.engine.outputs import Outputs
from statekit.engine.records import ArrowRecords
from statekit.engine.sink import ARRIVED, FileSink
from statekit.errors import EngineError, StateKitError

Message = dict[str, Any]


class Task:
    """What all tasks share: the coordinator's orders about what they send."""

    address = ""  # for its senders
    outputs: Outputs

    def __init__(self, control: Control, name: str, job: Job, stage: Stage) -> None:
        self.control = control
        self.name = name
        self.job = job
        self.stage = stage
        self.next = job.after(stage)
        self.due = Due()
        self.closing = ExitStack()  # for when it has finished, or is given up

    def run(self, start: Message) -> None:
        raise NotImplementedError

    def connect(self, start: Message) -> None:
        """Opens the channels to the next stage."""
        out = start["outputs"]
        assert self.next is not None
        self.outputs = Outputs(
            self.name,
            self.stage.maps,
            self.next.inputs[self.stage.name],
            out["owners"],
            out["receivers"],
            out["version"],
            self.job.settings,
        )
        self.closing.callback(self.outputs.close)

    def obey(self, message: Message) -> None:
        """An order that is the same for all tasks."""
        kind = message["kind"]
        if kind == "move":
            self.outputs.move(move_from_plain(message["move"]))
        elif kind == "open":
            self.outputs.open(message["task"], message["address"])
        elif kind == "leave":
            self.outputs.leave(message["task"])
        elif kind == "weigh":
            self.control.send("weights", weights=self.outputs.weights())
        else:
            raise EngineError(f"{self.name} was told {kind!r}, which it does not know.")

    def tell_figures(self) -> None:
        """Once in a while."""
        if self.due.is_now():
            self.control.send("figures", **self.figures())

    def figures(self) -> dict[str, float]:
        return {"records_out": self.outputs.records, "queued_bytes": self.outputs.queued_bytes}


class SourceTask(Task):
    """Reads batches and sends them. Its position is where it goes on, and the time it has seen."""

    def run(self, start: Message) -> None:
        self.connect(start)
        self._position: Any = 0
        latest = FIRST
        if start["position"]:
            self._position, latest = start["position"]
        self._clock = clock(self.stage.event_time, self.job.settings, latest)
        read = self.stage.read
        assert read is not None
        index, tasks = self.stage.tasks().index(self.name), self.stage.parallelism
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self.control, selectors.EVENT_READ)
            items = read(index, tasks, self._position)
            self.closing.callback(getattr(items, "close", lambda: None))  # connections, files
            for item in items:
                self._listen_until(item.moment if isinstance(item, Until) else 0)
                if isinstance(item, Watermark):
                    self.outputs.advance(item.time)
                elif isinstance(item, Placed):
                    self._send(item.batch, item.position)
                elif not isinstance(item, Until):
                    self._send(item, self._position + 1)
                self.tell_figures()
        # The coordinator says when to end: not while a stage is scaled, or a checkpoint is taken.
        self.outputs.advance(LAST)
        self.control.send("exhausted")
        while self._listen() != "end":
            pass
        self.outputs.end()

    def _send(self, batch: pa.RecordBatch, position: Any) -> None:
        made = self.outputs.map(batch)
        self.outputs.deal(made)
        self._position = position
        if (time := self._clock.after(made)) is not None:
            self.outputs.advance(time)

    def _listen_until(self, moment: float) -> None:
        """Does what the coordinator says: what it has said, and what it says before the moment."""
        while True:
            left = max(0.0, moment - monotonic())
            heard = self._selector.select(min(left, self.outputs.left))
            self.outputs.send_due()
            if heard:
                self._listen()
            elif not left:
                return

    def _listen(self) -> str:
        message = heard(self.control)
        kind: str = message["kind"]
        if kind == "barrier":
            position = self._position, self._clock.latest
            self.control.send("passed", number=message["number"], position=position)
            self.outputs.barrier(message["number"])
        elif kind != "end":
            self.obey(message)
        return kind


class ReceivingTask(Task):
    """What keyed tasks and the sink share: channels, and what the receiver says of them."""

    def __init__(self, control: Control, name: str, job: Job, stage: Stage, address: str) -> None:
        super().__init__(control, name, job, stage)
        self.address = address
        self._listener = listen(self.address)
        self.closing.callback(self._listener.close)
        self._channels: dict[str, Incoming] = {}
        self._later: deque[Message] = deque()  # heard while another one was waited for
        self._is_finished = False
        self._records = 0  # that have come
        self.receiver: Receiver

    def work(self) -> None:
        """Until everything has come and was processed."""
        with selectors.DefaultSelector() as selector:
            self._selector = selector
            selector.register(self.control, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._is_finished:
                for key, _ in selector.select(self.left()):
                    if key.fileobj is self.control:
                        self.hear(heard(self.control))
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif isinstance(key.fileobj, Incoming):
                        self._take(key.fileobj)
                    while self._later:
                        self.hear(self._later.popleft())
                self._choose()
                self.turn()

    def left(self) -> float:
        """Seconds until turn() has something to do, whatever comes."""
        return self.due.left

    def turn(self) -> None:
        """After whatever has come."""
        self.tell_figures()

    def _accept(self) -> None:
        made, _ = self._listener.accept()
        incoming = Incoming(made, self.job.settings.buffer_bytes)
        if incoming.name in self._channels:
            raise EngineError(f"{self.name}: channel {incoming.name!r} was opened twice.")
        self._channels[incoming.name] = incoming
        self.closing.callback(incoming.close)

    def _choose(self) -> None:
        """Reads those channels that should be read."""
        reading = self._selector.get_map()
        for name, incoming in self._channels.items():
            if incoming.fileno() < 0:
                continue
            if self.receiver.reads(name):
                incoming.give_credit()
                if incoming.fileno() not in reading:
                    self._selector.register(incoming, selectors.EVENT_READ)
            elif incoming.fileno() in reading:
                self._selector.unregister(incoming)

    def _take(self, incoming: Incoming) -> None:
        if not self.receiver.reads(incoming.name):  # since select() said that there is something
            return
        item = incoming.receive()
        if item is None:
            raise ChannelLostError(f"{incoming.name} has gone before its end.")
        if isinstance(item, pa.RecordBatch):
            self._records += item.num_rows
            actions = self.receiver.on(incoming.name, self.wrap(incoming.name, item))
        else:
            actions = self.receiver.on(incoming.name, item)
        self.act(actions)
        if self.receiver.is_ended(incoming.name):
            self._selector.unregister(incoming)
            incoming.close()

    def wrap(self, channel: str, batch: pa.RecordBatch) -> ArrowRecords:
        raise NotImplementedError

    def figures(self) -> dict[str, float]:
        parked, watermark = self.receiver.parked_bytes, self.receiver.watermark
        return {"records_in": self._records, "parked_bytes": parked, "watermark_ms": watermark}

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Marked):
                self.control.send("marked", version=action.version)
            elif isinstance(action, Settled):
                self.control.send("settled", version=action.version)
            else:
                self.do(action)

    def do(self, action: Action) -> None:
        raise NotImplementedError

    def hear(self, message: Message) -> None:
        if message["kind"] == "channel":
            self.receiver.open(message["task"])
            self.control.send("opened", task=message["task"])
        else:
            self.obey(message)


class KeyedTask(ReceivingTask):
    """An operator with the state of its key-groups."""

    _home_folder = ""  # if state has a home

    def run(self, start: Message) -> None:
        stage = self.stage
        assert stage.key is not None
        assert stage.operator is not None
        owned = group_ranges(groups_from_plain(start["owned"]))
        groups = stage.key.key_groups
        self._place = start["place"]
        number = start["checkpoint"]
        home = self._home(start["generation"])
        if number and owned:
            self.kv = sk.restore(self._place, at=number, key_groups=owned, home=home, lazy=True)
        else:
            self.kv = sk.open(home, key_groups=groups, owned=owned)
        self.closing.callback(self._let_go_of_state)
        self.operator = stage.operator()
        self.operator.key, self.operator.time = stage.key, start["time"]
        self.operator.open(self.kv)
        provider = ""
        if not self.job.settings.is_fixed:
            given = {"generation": start["generation"], "token": start["token"]}
            provider = self.kv.serve("127.0.0.1:0", **given).address
        everything = frozenset(group for part in owned for group in part)
        self.receiver = Receiver(self.name, start["channels"], everything, watermark=start["time"])
        self.connect(start)
        self.hand_overs = HandOvers(
            self.kv,
            self.control,
            self._place,
            lambda: heard(self.control),
            self._later,
            self._failed,
        )
        self.closing.callback(self.hand_overs.give_up)
        self.control.send("ready", provider=provider)
        self.work()
        self.hand_overs.leave()
        self.outputs.end()
        self.kv.close()

    def _failed(self) -> None:
        """In a thread, of what is being handed over."""
        if isinstance(sys.exc_info()[1], LOST):
            lost(self.control)
        else:
            fail(self.control)

    def _let_go_of_state(self) -> None:
        """It may wait for others that have gone. Nobody waits for that, or minds if it fails."""

        def close() -> None:
            with suppress(StateKitError):
                self.kv.close()
            if self._home_folder:
                shutil.rmtree(self._home_folder, ignore_errors=True)

        threading.Thread(target=close, daemon=True).start()

    def _home(self, generation: int) -> str:
        """Where state lives. What is there counts no longer than this process lives."""
        settings = self.job.settings
        if settings.state == "memory":
            return "memory:"
        folder = Path(self._place).parents[1] / HOMES / f"{self.name}-{generation}-{os.getpid()}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._home_folder = str(folder)
        return f"rocksdb:{folder}?memory={settings.state_memory}"

    def left(self) -> float:
        return min(super().left(), self.outputs.left)

    def turn(self) -> None:
        super().turn()
        self.outputs.send_due()

    def wrap(self, channel: str, batch: pa.RecordBatch) -> ArrowRecords:
        key = self.stage.inputs[stage_of(channel)]
        assert key is not None
        return ArrowRecords(batch, key)

    def do(self, action: Action) -> None:
        if isinstance(action, Process):
            assert isinstance(action.records, ArrowRecords)
            stage, batch = stage_of(action.channel), action.records.batch
            self.outputs.send(self.operator.process_from(stage, batch))
        elif isinstance(action, Advance):
            self.operator.time = action.time
            self.kv.advance_watermark(action.time)
            self.outputs.send(self.operator.advance(action.time))
            self.outputs.advance(action.time)
        elif isinstance(action, HandOver):
            self.hand_overs.let_go(action)
        elif isinstance(action, Pass):
            part = self.kv.write_part(self._place, number=action.number, barrier=action.number)
            time = self.receiver.watermark if self.receiver.owned else None
            self.control.send("passed", number=action.number, part=part.to_json(), time=time)
            self.outputs.barrier(action.number)
        elif isinstance(action, Finish):
            self._is_finished = True

    def hear(self, message: Message) -> None:
        kind = message["kind"]
        if kind == "handed_over":
            groups = groups_from_plain(message["groups"])
            self.control.send("parked", bytes=self.receiver.parked_bytes)
            self.act(self.receiver.handed_over(message["version"], groups, message["watermark"]))
        elif kind == "weigh" and message["stage"] == self.stage.name:
            self.control.send("weights", weights=self._sizes())
        elif not self.hand_overs.on(message):
            super().hear(message)

    def figures(self) -> dict[str, float]:
        known = self.kv.metrics()
        moved = known.moved
        return {
            **super().figures(),
            **Task.figures(self),
            "state_bytes": known.bytes,
            "state_entries": sum(state.entries for state in known.states.values()),
            "state_bytes_in": moved.bytes_in + moved.copied_in,
            "state_bytes_out": moved.bytes_out + moved.copied_out,
            "shadow_bytes": moved.shadow_bytes,
            "migrations": moved.migrations,
        }

    def _sizes(self) -> list[int]:
        """The bytes of each key-group."""
        store = self.kv._residence.store
        sizes = store.leaf_sizes()
        step = store.subgroups
        return [sum(sizes[at : at + step]) for at in range(0, len(sizes), step)]


class SinkTask(ReceivingTask):
    """Writes what comes."""

    def run(self, start: Message) -> None:
        assert self.stage.folder is not None
        self._sink = FileSink(self.stage.folder, self.stage.tasks().index(self.name))
        self._sink.begin(start["checkpoint"])
        self._latencies = Histogram()
        self.receiver = Receiver(self.name, start["channels"], [0])
        self.control.send("ready", provider="")
        self.work()
        self._sink.close()
        self.control.send("drained")  # it is for the coordinator to say that the results count
        while True:
            self.hear(heard(self.control))

    def wrap(self, channel: str, batch: pa.RecordBatch) -> ArrowRecords:
        return ArrowRecords(batch, None)  # type: ignore[arg-type]  # nobody asks for key-groups

    def do(self, action: Action) -> None:
        if isinstance(action, Process):
            assert isinstance(action.records, ArrowRecords)
            self._sink.write(self._stamped(action.records.batch))
        elif isinstance(action, Pass):
            self._sink.cut(action.number)
            self.control.send("passed", number=action.number)
        elif isinstance(action, Finish):
            self._is_finished = True

    def _stamped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """With the moment at which it came, if latencies are to be measured."""
        if (due := self.stage.due) is None:
            return batch
        if due not in batch.schema.names:
            raise EngineError(
                f"latencies are to be measured from column {due!r}, and the results have "
                f"{', '.join(batch.schema.names)}."
            )
        now = np.full(batch.num_rows, monotonic_ns())
        self._latencies.add(now - batch.column(due).to_numpy())
        return pa.record_batch([*batch.columns, pa.array(now)], [*batch.schema.names, ARRIVED])

    def figures(self) -> dict[str, float]:
        """Latencies are those since it said so last."""
        known, self._latencies = self._latencies, Histogram()
        if not known.records:
            return super().figures()
        return {
            **super().figures(),
            "latency_p50_ms": known.percentile(50) / 1e6,
            "latency_p99_ms": known.percentile(99) / 1e6,
            "latency_max_ms": known.longest / 1e6,
        }

    def hear(self, message: Message) -> None:
        if message["kind"] == "published":
            self._sink.publish(message["number"])
        else:
            super().hear(message)


def stage_of(task: str) -> str:
    return task.rpartition("-")[0]
