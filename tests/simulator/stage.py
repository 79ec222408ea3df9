"""Stage: the processes, the network between them, and every single thing that can happen."""

from random import Random
from typing import Any

from statekit.protocol.coordinator import Coordinator
from statekit.protocol.handover import Incoming
from statekit.protocol.messages import OUTSIDE, Accept, Credit, Hello, Here, Lost, Persist
from statekit.protocol.participant import Participant

from .chief import Chief
from .faults import draw_size
from .worker import Worker
from .world import Violation, World

MESSAGES_MAX = 150  # on the network at once; more are lost


class Stage:
    """`trace` is None, or a list that gets a line for each step."""

    first_generation = OUTSIDE
    subgroups = 1
    is_calm = False  # nothing fails any more
    worker_class: Any = Worker

    def __init__(
        self,
        seed: int,
        participant_class: type[Participant] = Participant,
        coordinator_class: type[Coordinator] = Coordinator,
        trace: list[str] | None = None,
        **size: int,
    ) -> None:
        self.seed = seed
        self.rng = rng = Random(seed)
        self.participant_class = participant_class
        self.coordinator_class = coordinator_class
        self.trace = trace
        workers, leaves, self.steps = draw_size(rng)
        keys = rng.choice((1, 2, 3))
        self.world = World(size.get("leaves", leaves), size.get("keys", keys))
        self.spares = rng.random() < 0.4  # the last worker has nothing at first
        self.large = rng.random() < 0.6  # wanted entries come first
        self.streaming = rng.choice((0.0, 0.5, 1.0))  # how fast the background stream is
        self.window = rng.choice((1, 3, 8, 1000))  # of a stream, in keys
        self.granted: dict[tuple[str, int], int] = {}  # credit of a stream, as its reader said
        self.carried: dict[tuple[str, int], int] = {}  # how much a stream has sent
        self.unwanted: set[str] = set()  # migrations that were asked for, and then not wanted
        self.broken: set[tuple[str, int]] = set()  # streams that have lost a message
        self.network: list[tuple[str, str, Any]] = []  # to, sender, message
        self.old_messages: list[tuple[str, str, Any]] = []  # those that were delivered
        self.writes: list[tuple[Chief, Persist]] = []
        self.replies: list[tuple[Chief, int, bool]] = []
        self.workers: dict[str, Worker] = {}  # by name, those that live
        self.incarnations: dict[str, int] = {}
        self.chiefs: dict[str, Chief] = {}  # by name, those that live
        self.chiefs_started = 0
        self.blocked: dict[tuple[str, str], None] = {}
        self.lost_leaves = 0
        for index in range(size.get("workers", workers)):
            self.start_worker(f"w{index}")

    # ---- What happens to processes

    def start_worker(self, worker: str) -> None:
        incarnation = self.incarnations.get(worker, 0) + 1
        self.incarnations[worker] = incarnation
        started = self.worker_class(self, worker, incarnation)
        self.workers[started.name] = started
        self.step("starts", started.name, "")

    def start_chief(self) -> None:
        self.chiefs_started += 1
        chief = Chief(self, self.chiefs_started)
        self.chiefs[chief.name] = chief
        self.step("starts", chief.name, "")
        chief.act(chief.coordinator.take_over(self.world.stored))

    def crash(self, name: str) -> None:
        self.step("crashes", name, "")
        process: Any = self.workers.pop(name, None) or self.chiefs.pop(name, None)
        if process is not None:
            process.crash()

    def leader(self) -> Chief | None:
        """The coordinator that leads, according to the stored record."""
        stored = self.world.stored
        chief = self.chiefs.get(stored.coordinator) if stored else None
        if chief is None or not chief.coordinator.is_leading or chief.is_paused:
            return None
        return chief

    # ---- What workers and chiefs do

    def send(self, sender: str, to: str, message: Any) -> None:
        if isinstance(message, Accept | Credit) and message.stream:
            credit = message.credit if isinstance(message, Accept) else message.bytes_total
            name = message.migration, message.stream
            self.granted[name] = max(self.granted.get(name, 0), credit)
        if len(self.network) < MESSAGES_MAX:
            self.network.append((to, sender, message))
        else:
            self.lose(message)

    def lose(self, message: Any) -> None:
        """A message does not arrive. If it was part of a stream, that stream has broken off."""
        if isinstance(message, Here) and message.stream:
            self.broken.add((message.migration, message.stream))

    def is_broken(self, migration: str, incoming: Incoming) -> bool:
        return (migration, incoming.stream) in self.broken or incoming.source not in self.workers

    def streams(self, migration: str, stream: int, size: int) -> None:
        """A stream sends `size` more: it must have credit for it."""
        name = migration, stream
        if self.carried.get(name, 0) >= self.granted.get(name, 0):
            raise Violation(f"I8: stream {stream} of {migration} sends more than its credit")
        self.carried[name] = self.carried.get(name, 0) + size

    def open_streams(self, worker: Worker) -> None:
        """Opens streams for leaves that have just been offered, if this run has streams."""
        if self.streaming:
            participant = worker.participant
            for migration, incoming in [*participant._incoming.items()]:
                if not incoming.stream:
                    worker.act(participant.open_stream(migration))

    def record_fails(self) -> bool:
        """Whether a home fails to record that leaves are its provider's again."""
        return not self.is_calm and self.rng.random() < 0.2

    def lost(self, worker: Worker, action: Lost) -> None:
        self.step("lost", worker.name, action)
        self.lost_leaves += 1

    def is_large(self, leaf: int) -> bool:
        return self.large

    def step(self, what: str, who: str, detail: Any) -> None:
        if self.trace is not None:
            self.trace.append(f"{len(self.trace):5} {who:6} {what} {detail}")

    # ---- Single steps

    def deliver(self, index: int) -> None:
        to, sender, message = self.network.pop(index)
        process: Any = self.workers.get(to) or self.chiefs.get(to)
        if process is None:
            self.lose(message)
            return
        if process.is_paused:
            self.network.append((to, sender, message))
            return
        process.on(sender, message)

    def tick(self, worker: Worker) -> None:
        """The worker's clock says that it is time to say things again."""
        self.step("says again", worker.name, "")
        hello = Hello(worker.worker, worker.incarnation, worker.participant.generation)
        for name in self.chiefs:
            self.send(worker.name, name, hello)
        worker.tick()

    def stream(self, worker: Worker, most: int) -> bool:
        """The background stream of one worker sends a few leaves."""
        participant = worker.participant
        sent = 0
        for migration, outgoing in [*participant._outgoing.items()]:
            while sent < most and (unsent := participant.unsent(migration)):
                self.step("streams", worker.name, unsent[0])
                worker.act(participant.send(migration, outgoing.stream, unsent[0]))
                sent += 1
            if sent == most:
                break
        return sent > 0

    def land(self, index: int, is_lost: bool = False) -> None:
        """A write of the record is carried out, and its answer is on its way."""
        chief, persist = self.writes.pop(index)
        if is_lost:
            return
        is_stored = self.world.store(persist.expected, persist.record)
        self.step("stores" if is_stored else "cannot store", chief.name, persist.record)
        self.replies.append((chief, persist.record.revision, is_stored))

    def answer(self, index: int) -> None:
        chief, revision, is_stored = self.replies.pop(index)
        if not chief.is_alive:
            return
        self.step("is told of revision", chief.name, (revision, is_stored))
        if is_stored:
            chief.act(chief.coordinator.persisted(revision))
        else:
            chief.act(chief.coordinator.conflicted())

    def route(self, leaf: int) -> str:
        """Where the source sends the leaf's records: by the newest table."""
        assert self.world.stored is not None
        return self.world.stored.owners[leaf]

    def pass_barrier(self, worker: Worker, number: int) -> None:
        self.step("barrier", worker.name, number)
        worker.act(worker.participant.take(number))

    def process_record(self, leaf: int) -> None:
        """The next record of the leaf, wherever it is: it counts, waits there, or is sent on."""
        world = self.world
        name = world.at[leaf]
        worker = self.workers.get(name)
        if worker is None or worker.participant.generation != world.generation:
            world.at[leaf] = self.route(leaf)
            return
        if worker.is_paused:
            return
        participant = worker.participant
        copy = worker.copies.get(leaf)
        key, era = world.pending[leaf][0]
        if copy is not None and (copy.is_open or not copy.is_whole):
            if not copy.is_open or key not in copy.content:
                self.step("wants", name, (leaf, key))
                migration = participant._leaves[leaf].migration
                keys = (key,) if self.large else ()
                worker.act(participant.want(migration, (leaf,), keys))
                return
            if era > participant.barrier:
                if not world.is_aligned(era):
                    return
                self.pass_barrier(worker, era)  # in the stream of records
                if not worker.is_alive:
                    return
                if participant.barrier < era:
                    raise Violation(f"{name} does not take {era}")
            self.step("counts", name, (leaf, key, copy.content[key] + 1))
            world.count(worker, leaf, key, copy.content)
            return
        to = participant.moved_to(leaf)
        if to is None or to == name or to not in self.workers:
            to = self.route(leaf)
        world.at[leaf] = to
