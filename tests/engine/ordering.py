"""A simulator of the order of records: senders, receivers and a coordinator, from one seed.

    python tests/engine/ordering.py 17              plays seed 17 and prints every step
    python tests/engine/ordering.py --seeds 0:20000

What happens next is drawn: a record, a watermark, a delivery, a move, a barrier, a task that
comes, goes or ends. Channels are short and full ones hold their sender up; parked records are few;
what the coordinator says and hears, and hand-overs, take any time. In the end all senders end, and
all that was begun must come to its end.

The oracle is a plain list: the world knows who has each key-group, which records were sent, which
were processed, and how far event time has come for a key-group, whoever has it. At every step:

    order          of one sender and one key-group, record n is processed after record n-1, and once
    ownership      only who has a key-group processes its records
    time           no record is processed after its time has passed for its key-group, and the time
                   of a key-group never goes back. (Senders keep the promise of their watermarks.)
    memory         what is parked of a channel is bounded

and in the end: every record was processed; every barrier cut the records of each sender where that
sender sent it, with every key-group in exactly one task's part; every task has finished.
"""

import argparse
import random
import sys
from collections import deque
from typing import Any, NamedTuple

from statekit.engine.align import (
    Advance,
    Finish,
    HandOver,
    Marked,
    Pass,
    Process,
    Receiver,
    Settled,
)
from statekit.engine.items import FIRST, LAST, Barrier, Change, Move
from statekit.engine.sender import Sender
from statekit.engine.turns import Turns

STEPS = 260
STEPS_MAX = 20_000
PARKED_MAX = 3


class Violation(AssertionError):
    """Something is wrong."""


class Record(NamedTuple):
    sender: str
    group: int
    number: int  # of this sender's records of this key-group
    time: int


class Batch(NamedTuple):
    """Records, as the machines see them."""

    records: tuple[Record, ...]

    @property
    def bytes(self) -> int:
        return len(self.records)

    def groups(self) -> set[int]:
        return {record.group for record in self.records}

    def split(self, groups: Any) -> "tuple[Batch | None, Batch | None]":
        some = tuple(record for record in self.records if record.group in groups)
        rest = tuple(record for record in self.records if record.group not in groups)
        return Batch(some) if some else None, Batch(rest) if rest else None


class SenderTask:
    """A sender, with buffers and an outbox."""

    def __init__(self, name: str, sender: Sender) -> None:
        self.name = name
        self.machine = sender
        self.orders: deque[tuple[str, Any]] = deque()  # of the coordinator
        self.outbox: deque[tuple[str, Any]] = deque()
        self.buffers: dict[str, list[Record]] = {}
        self.sent: dict[int, int] = {}  # per key-group
        self.is_idle = False  # it has no records for now
        self.first = 0  # no record of it is before this time

    def route(self, record: Record) -> None:
        self.buffers.setdefault(self.machine.owners[record.group], []).append(record)
        self.sent[record.group] = record.number + 1

    def flush(self, to: str) -> None:
        if records := self.buffers.pop(to, None):
            self.outbox.append((to, Batch(tuple(records))))

    def send(self, sends: Any) -> None:
        for to, item in sends:
            self.flush(to)
            self.outbox.append((to, item))


class World:
    """What is true of key-groups."""

    def __init__(self, groups: int) -> None:
        self.owner: dict[int, str | None] = {}
        self.next: dict[tuple[str, int], int] = {}  # by sender and key-group: what comes next
        self.time = dict.fromkeys(range(groups), FIRST)  # how far it has come for a key-group
        self.watermarks: dict[str, int] = {}  # of receivers
        self.cuts: dict[int, dict[int, dict[str, int]]] = {}  # by barrier, key-group and sender
        self.sent: dict[int, dict[str, dict[int, int]]] = {}  # by barrier, sender and key-group

    def process(self, receiver: str, batch: Batch) -> None:
        for record in batch.records:
            sender, group, number, time = record
            if self.owner[group] != receiver:
                raise Violation(f"{receiver} processes {record}, {self.owner[group]} has its group")
            expected = self.next.get((sender, group), 0)
            if number != expected:
                raise Violation(f"{receiver} processes {record}; number {expected} is next")
            self.next[sender, group] = number + 1
            if self.watermarks[receiver] < self.time[group]:
                raise Violation(f"time goes back: {record} at {self.watermarks[receiver]}")
            if time < self.watermarks[receiver]:
                raise Violation(f"{record} is late: it is {self.watermarks[receiver]} already")

    def advance(self, receiver: str, time: int) -> None:
        if time <= self.watermarks[receiver]:
            raise Violation(f"the watermark of {receiver} goes from {self.watermarks} to {time}")
        self.watermarks[receiver] = time
        for group, owner in self.owner.items():
            if owner == receiver:
                self.time[group] = max(self.time[group], time)

    def cut(self, receiver: str, number: int) -> None:
        parts = self.cuts.setdefault(number, {})
        for group, owner in self.owner.items():
            if owner == receiver:
                if group in parts:
                    raise Violation(f"key-group {group} is in two parts of barrier {number}")
                parts[group] = {s: n for (s, g), n in self.next.items() if g == group}


class Run:
    def __init__(self, seed: int, trace: list[str] | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.trace = trace
        self.groups = rng.choice((1, 2, 4, 8))
        self.world = World(self.groups)
        names = [f"r{i}" for i in range(rng.randint(1, 3))]
        self.turns = self.turns_of(names)
        self.planned = [names[i * len(names) // self.groups] for i in range(self.groups)]
        self.version = 0
        self.number = 0
        self.receivers: dict[str, Receiver] = {}
        self.senders: dict[str, SenderTask] = {}
        self.channels: dict[tuple[str, str], deque[Any]] = {}
        self.reports: dict[str, deque[tuple[str, int]]] = {}
        self.carried: list[tuple[str, int, frozenset[int], int]] = []  # hand-overs on their way
        self.finished: set[str] = set()
        self.left: set[str] = set()
        self.settled: dict[int, set[str]] = {}  # by move: tasks that have not settled it
        self.room = rng.choice((1, 2, 4, 8))  # of a channel
        self.ahead = rng.choice(
            (0, 0, 0.3)
        )  # receivers take what is there already, whatever they say
        self.batch_max = 0  # the longest batch that was sent
        senders = [f"s{i}" for i in range(rng.randint(1, 3))]
        for name in names:
            owned = [group for group, owner in enumerate(self.planned) if owner == name]
            self.add_receiver(name, senders, owned)
            self.world.owner.update(dict.fromkeys(owned, name))
        for name in senders:
            self.add_sender(name, Sender(self.planned, names))
        kinds = ("record", "watermark", "flush", "idle", "deliver", "order", "report", "carry")
        weights = [10, 3, 4, 0.3, 25, 4, 4, 4]
        rare = ("move", "barrier", "open", "sender", "leave", "end")
        often = [rng.choice((0, 1, 3, 8)), rng.choice((0, 1, 2))]
        weights += [*often, 0.3, rng.choice((0.3, 3)), 0.3, 0.2]
        self.kinds = (*kinds, *rare)
        # Some things are slow in some runs.
        self.weights = [weight * rng.choice((0.2, 1, 1, 3)) for weight in weights]

    def turns_of(self, receivers: list[str]) -> Turns:
        return Turns(receivers)

    # ---- The cast

    def add_receiver(self, name: str, senders: Any, owned: Any = ()) -> None:
        self.receivers[name] = Receiver(name, senders, owned, parked_max=PARKED_MAX)
        self.world.watermarks[name] = FIRST
        self.reports[name] = deque()

    def add_sender(self, name: str, sender: Sender) -> None:
        self.senders[name] = SenderTask(name, sender)

    def tell(self, what: Any) -> None:
        """The coordinator tells all senders something."""
        for task in self.senders.values():
            task.orders.append(what)

    def begin(self, begun: Any) -> None:
        for what in begun:
            self.say(f"coordinator begins {what}")
            self.tell(("move" if isinstance(what, Move) else "barrier", what))

    # ---- Steps; each returns whether there was something to do

    def play(self) -> None:
        for _ in range(STEPS):
            kind = self.rng.choices(self.kinds, self.weights)[0]
            getattr(self, f"step_{kind}")()
        self.calm()
        self.check_end()

    def calm(self) -> None:
        """Nothing new begins, and everything that was begun comes to its end."""
        steps = [self.step_deliver, self.step_order, self.step_report, self.step_carry]
        for _ in range(STEPS_MAX):
            self.rng.shuffle(steps)
            if not any(step() for step in steps):
                waiting = [task for task in self.senders.values() if not task.machine.is_ended]
                if not waiting:
                    return
                self.end(self.rng.choice(waiting))
        raise Violation(f"it is not quiet after {STEPS_MAX} steps")

    def free(self) -> list[SenderTask]:
        """Senders that are not held up, and have not ended."""
        return [t for t in self.senders.values() if not t.outbox and not t.machine.is_ended]

    def step_record(self) -> None:
        if tasks := [task for task in self.free() if not task.is_idle]:
            task = self.rng.choice(tasks)
            group = self.rng.randrange(self.groups)
            time = max(task.first, task.machine.watermark) + self.rng.randint(0, 9)
            task.route(Record(task.name, group, task.sent.get(group, 0), time))

    def step_watermark(self) -> None:
        if tasks := self.free():
            task = self.rng.choice(tasks)
            time = max(task.first, task.machine.watermark) + self.rng.randint(1, 5)
            task.send(task.machine.advance(time))

    def step_flush(self) -> None:
        if tasks := self.free():
            task = self.rng.choice(tasks)
            for to in [*task.buffers]:
                task.flush(to)

    def step_idle(self) -> None:
        task = self.rng.choice([*self.senders.values()])
        task.is_idle = not task.is_idle

    def step_end(self) -> None:
        if tasks := self.free():
            self.end(self.rng.choice(tasks))

    def end(self, task: SenderTask) -> None:
        self.say(f"{task.name} ends")
        task.send(task.machine.end())

    def step_order(self) -> bool:
        """A sender does what the coordinator has told it."""
        tasks = [task for task in self.senders.values() if task.orders and not task.outbox]
        if not tasks:
            return False
        task = self.rng.choice(tasks)
        kind, what = task.orders.popleft()
        self.say(f"{task.name} is told {kind} {what}")
        machine = task.machine
        if kind == "move":
            task.send(machine.move(what))
        elif kind == "barrier":
            if not machine.is_ended:
                self.world.sent.setdefault(what.number, {})[task.name] = dict(task.sent)
            task.send(machine.barrier(what.number))
        elif kind == "open":
            task.send(machine.open(what))
        else:
            task.send(machine.leave(what))
        return True

    def step_deliver(self) -> bool:
        """Something goes from an outbox into its channel, or from a channel to its receiver."""
        ready: list[Any] = [
            task
            for task in self.senders.values()
            if task.outbox and len(self.channel(task.name, task.outbox[0][0])) < self.room
        ]
        ready += [
            (sender, receiver)
            for (sender, receiver), items in self.channels.items()
            if items and (self.receivers[receiver].reads(sender) or self.rng.random() < self.ahead)
        ]
        if not ready:
            return False
        chosen = self.rng.choice(ready)
        if isinstance(chosen, SenderTask):
            to, item = chosen.outbox.popleft()
            self.channel(chosen.name, to).append(item)
            if isinstance(item, Batch):
                self.batch_max = max(self.batch_max, item.bytes)
        else:
            sender, receiver = chosen
            item = self.channels[chosen].popleft()
            self.say(f"{receiver} gets {item} of {sender}")
            machine = self.receivers[receiver]
            self.act(receiver, machine.on(sender, item))
            # The last batch that is read goes beyond the bound, and no more.
            if not self.ahead and machine._channels[sender].bytes > PARKED_MAX + self.batch_max:
                raise Violation("more is parked than may be")
        return True

    def channel(self, sender: str, receiver: str) -> deque[Any]:
        return self.channels.setdefault((sender, receiver), deque())

    def step_carry(self) -> bool:
        """A hand-over, or some of it, is there."""
        if not self.carried:
            return False
        at = self.rng.randrange(len(self.carried))
        to, version, groups, watermark = self.carried.pop(at)
        if len(groups) > 1 and self.rng.random() < 0.3:
            some = frozenset(self.rng.sample(sorted(groups), 1))
            self.carried.append((to, version, groups - some, watermark))
            groups = some
        self.say(f"{to} has {sorted(groups)} of move {version}")
        for group in groups:
            self.world.owner[group] = to
        self.act(to, self.receivers[to].handed_over(version, groups, watermark))
        return True

    def act(self, name: str, actions: Any) -> None:
        world = self.world
        for action in actions:
            self.say(f"    {name}: {action}")
            if isinstance(action, Process):
                world.process(name, action.records)
            elif isinstance(action, Advance):
                world.advance(name, action.time)
            elif isinstance(action, HandOver):
                for group in action.groups:
                    if world.owner[group] != name:
                        raise Violation(f"{name} hands {group} over, which it does not have")
                    world.owner[group] = None
                self.carried.append((action.to, action.version, action.groups, action.watermark))
            elif isinstance(action, Pass):
                world.cut(name, action.number)
                self.reports[name].append(("passed", action.number))
            elif isinstance(action, Marked):
                self.reports[name].append(("marked", action.version))
            elif isinstance(action, Settled):
                self.settled[action.version].discard(name)
            elif isinstance(action, Finish):
                self.finished.add(name)
                self.reports[name].append(("finished", 0))

    def step_report(self) -> bool:
        """The coordinator hears of something."""
        names = [name for name, reports in self.reports.items() if reports]
        if not names:
            return False
        name = self.rng.choice(names)
        kind, number = self.reports[name].popleft()
        if kind == "marked":
            self.begin(self.turns.marked(name, number))
        elif kind == "passed":
            self.begin(self.turns.passed(name, number))
        else:
            self.begin(self.turns.gone(name))
        return True

    # ---- What the coordinator asks for

    def active(self) -> list[str]:
        return [name for name in self.receivers if name not in self.left]

    def step_move(self) -> None:
        names = self.active()
        groups = self.rng.sample(range(self.groups), self.rng.randint(1, self.groups))
        changes: dict[tuple[str, str], set[int]] = {}
        for group in groups:
            old, new = self.planned[group], self.rng.choice(names)
            if old != new:
                changes.setdefault((old, new), set()).add(group)
        if not changes:
            return
        self.version += 1
        move = Move(
            self.version,
            tuple(Change(frozenset(some), old, new) for (old, new), some in changes.items()),
        )
        for change in move.changes:
            for group in change.groups:
                self.planned[group] = change.new
        self.settled[self.version] = {*move.involved}
        self.begin(self.turns.ask(move))

    def step_barrier(self) -> None:
        self.number += 1
        self.begin(self.turns.ask(Barrier(self.number)))

    def step_open(self) -> None:
        if len(self.receivers) < 5 and len(self.finished) == len(self.left & self.finished):
            name = f"r{len(self.receivers)}"
            self.add_receiver(name, [*self.senders])
            self.turns.come(name)
            self.tell(("open", name))

    def is_calm(self) -> bool:
        return self.turns.is_idle and not any(r.is_moving for r in self.receivers.values())

    def step_sender(self) -> None:
        """A sender comes, while nothing is under way: the coordinator waits for that."""
        if len(self.senders) == 4 or self.finished or not self.is_calm():
            return
        if any(task.orders for task in self.senders.values()):
            return  # a receiver may be just about to come or go
        name = f"s{len(self.senders)}"
        for receiver in self.active():
            self.receivers[receiver].open(name)
        self.add_sender(name, Sender(self.planned, self.active(), self.version))
        # It takes the work of another sender on, and time has gone no further than that one said.
        self.senders[name].first = max(0, *self.world.watermarks.values())

    def step_leave(self) -> None:
        names = [n for n in self.active() if n not in self.planned and n not in self.finished]
        if names and self.is_calm():
            name = self.rng.choice(names)
            self.left.add(name)
            self.begin(self.turns.gone(name))
            self.tell(("leave", name))

    # ---- The end

    def check_end(self) -> None:
        for task in self.senders.values():
            if task.outbox or task.orders:
                raise Violation(f"{task.name} is held up for ever: {task.outbox}")
            for group, sent in task.sent.items():
                if self.world.next.get((task.name, group), 0) != sent:
                    raise Violation(f"records {group} of {task.name} were not processed")
        for name, machine in self.receivers.items():
            if name not in self.finished:
                raise Violation(f"{name} has not finished")
            if machine.parked_bytes or machine.is_moving:
                raise Violation(f"{name} has finished, and something is left")
            if machine.watermark != LAST:
                raise Violation(f"{name} has not come to the end of time")
            if machine.owned != {g for g, owner in self.world.owner.items() if owner == name}:
                raise Violation(f"{name} does not know what it has")
        if not self.turns.is_idle:
            raise Violation("something is in flight for ever")
        self.check_cuts()

    def check_cuts(self) -> None:
        for number, sent in self.world.sent.items():
            cut = self.world.cuts.get(number, {})
            if {*cut} != {*range(self.groups)}:
                raise Violation(f"barrier {number} has only the parts of {sorted(cut)}")
            for name, task in self.senders.items():
                if name not in sent and not task.machine.is_ended:
                    raise Violation(f"{name} was not told of barrier {number}")
                # Who was not told had ended, and has sent all that it ever did; or it came later.
                right = [sent[name]] if name in sent else [task.sent, {}]
                found = {group: counts.get(name, 0) for group, counts in cut.items()}
                if found not in [{g: one.get(g, 0) for g in cut} for one in right]:
                    raise Violation(f"barrier {number}, {name}: it cuts at {found}, not {right}")

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(text)


def explain(seed: int, run: type[Run] = Run) -> str:
    """Plays it once more. Returns its steps and what is wrong; "" if nothing is."""
    trace: list[str] = []
    try:
        run(seed, trace).play()
    except Exception as error:
        return "\n".join([*trace, f"seed {seed}: {type(error).__name__}: {error}"])
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("seed", nargs="?", type=int)
    parser.add_argument("--seeds", help="A:B, the first one and the one after the last")
    arguments = parser.parse_args()
    if arguments.seeds is None:
        trace: list[str] = []
        try:
            Run(arguments.seed, trace).play()
        finally:
            print(*trace, sep="\n")
        return 0
    failed = 0
    for seed in range(*map(int, arguments.seeds.split(":"))):
        try:
            Run(seed).play()
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {error}")
            failed += 1
            if failed == 20:
                break
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
