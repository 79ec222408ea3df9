"""The order of records across rescales: random runs against a plain list, and bugs put in.

The simulator is ordering.py. STATEKIT_NIGHTLY=1 plays a million seeds.
"""

import ast
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ordering import Batch, Record, Run, SenderTask, explain

from statekit.engine import align, items, sender, turns
from statekit.engine.align import Finish, HandOver, Pass, Process, Receiver
from statekit.engine.items import FIRST, Barrier, Change, End, Mark, Move, Watermark
from statekit.engine.sender import Send, Sender
from statekit.engine.turns import Turns
from statekit.errors import EngineError

SEEDS = 1_000_000 if os.environ.get("STATEKIT_NIGHTLY") == "1" else 20_000
CHUNK = 2000
SEEDS_MAX = 3000  # until a mutant must be caught


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_record_is_processed_once_in_order_and_in_time(first: int) -> None:
    for seed in range(first, first + CHUNK):
        try:
            Run(seed).play()
        except Exception:
            pytest.fail(explain(seed) or f"seed {seed} fails once, and not when it is repeated")


def test_runs_visit_what_is_rare() -> None:
    seen: Counter[str] = Counter()
    for seed in range(600):
        trace: list[str] = []
        run = Run(seed, trace)
        run.play()
        text = "\n".join(trace)
        seen["moves"] += run.version
        seen["barriers"] += len(run.world.cuts)
        seen["receivers that came"] += "is told open" in text
        seen["receivers that went"] += len(run.left)
        for name, machine in run.receivers.items():
            seen["marks counted"] += machine._settled
            seen["parked records"] += text.count(f"{name}: Process") > 3
    assert min(seen.values()) > 30, seen


def test_a_run_is_the_same_every_time() -> None:
    for seed in range(20):
        first: list[str] = []
        again: list[str] = []
        Run(seed, first).play()
        Run(seed, again).play()
        assert first == again


@pytest.mark.parametrize("module", [align, items, sender, turns])
def test_machines_have_no_clock_socket_thread_or_chance(module: Any) -> None:
    tree = ast.parse(Path(module.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    standard = {"collections", "collections.abc", "dataclasses", "typing"}
    assert imported <= {*standard, "statekit.errors", "statekit.engine.items"}


# ---- Bugs put in on purpose


class Mutant(NamedTuple):
    module: Any
    old: str
    new: str
    run: type[Run] = Run


class NoTurns(Turns):
    """Barriers and moves begin when they are asked for."""

    def ask(self, what: Any) -> list[Any]:
        return [what]


class Lazy(SenderTask):
    def send(self, sends: Any) -> None:
        self.outbox.extend(sends)


class Unflushed(Run):
    """Senders that send a mark before what is in their buffers."""

    def add_sender(self, name: str, sender: Sender) -> None:
        self.senders[name] = Lazy(name, sender)


class Hasty(Run):
    """A coordinator that lets barriers and moves overlap."""

    def turns_of(self, receivers: list[str]) -> Turns:
        return NoTurns(receivers)


MUTANTS = {
    # ---- The old owner
    "hands over at the first mark": Mutant(
        align, "one.is_ended or channel in move.marked", "channel in move.marked or move.marked"
    ),
    "the end of a channel is no mark": Mutant(
        align, "one.is_ended or channel in move.marked for", "channel in move.marked for"
    ),
    "hands over before earlier moves are settled": Mutant(
        align,
        "            if move.missing:\n                break\n            del",
        "            if move.missing:\n                continue\n            del",
    ),
    "keeps what it handed over": Mutant(align, "self.owned -= groups", "pass"),
    "fires by watermarks that came after a mark": Mutant(
        align,
        "        if here.frozen:\n            here.later.append(w",
        "        if False:\n            (w",
    ),
    # ---- The new owner
    "begins before it has the marks of all channels": Mutant(
        align,
        "            if not move.is_marked:\n                break\n            for groups, to",
        "            if not move.is_marked and not move.arrived:\n                break\n"
        "            for groups, to",
    ),
    "does not park": Mutant(align, "if group in coming})", "if False})"),
    "parks for the owner, and not for each channel": Mutant(
        align, "        coming = here.coming\n", "        coming = {g: v for v, m in "
        "self._moves.items() for g in m.missing}\n",
    ),
    "processes what is parked twice": Mutant(align, "here.parked = kept", "pass"),
    "processes what is parked of a later move as well": Mutant(
        align, "if parked_for != version:", "if False:"
    ),
    "is behind, and takes the hand-over for nothing": Mutant(
        align, "self._early.setdefault(version, []).append((some, watermark))", "pass"
    ),
    "lets watermarks go on as soon as all marks are there": Mutant(
        align,
        "                actions.append(Marked(version))",
        "                actions.append(Marked(version))\n                self._thaw(version)",
    ),
    "a hand-over does not bring its watermark": Mutant(
        align, "if watermark > self.watermark:", "if False:"
    ),
    "watermarks go back": Mutant(align, "if lowest <= self.watermark:", "if False:"),
    "what was held back of a watermark is lost": Mutant(
        align, "here.watermark = max(here.watermark, item.time)\n                else", "pass\n"
        "                else",
    ),
    # ---- Barriers
    "a barrier passes what is parked": Mutant(
        align, "if not self._barrier or self._moves:", "if not self._barrier:"
    ),
    "a barrier passes when it has come on one channel": Mutant(
        align, "if not all(one.barrier or one.is_ended for", "if not any(one.barrier for"
    ),
    "a barrier does not hold up its channel": Mutant(align, "if here.barrier:", "if False:"),
    "what a barrier held up is lost": Mutant(
        align, "                actions += self.on(channel, item)", "                pass"
    ),
    "marks and barriers in different orders on two channels": Mutant(
        align, "if self._barrier:\n            raise", "if False:\n            raise", Hasty
    ),
    # ---- The sender
    "leaves records in its buffer": Mutant(sender, "", "", Unflushed),
    "sends no mark": Mutant(sender, "for receiver in move.involved]", "for receiver in ()]"),
    "tells the new owner only": Mutant(
        items, "named = [change.old for change in self.changes] + [", "named = ["
    ),
    "says nothing if it has had no records": Mutant(
        sender,
        "for receiver in move.involved]",
        "for receiver in move.involved if self.watermark > FIRST]",
    ),
    "goes on routing to the old owner": Mutant(
        sender, "self.owners[group] = change.new", "pass"
    ),
    "does not say that it has ended": Mutant(sender, "return self._to_all(End())", "return []"),
    "does not tell a new receiver that it has ended": Mutant(
        sender, "return [Send(receiver, End())]\n        return [", "return []\n        return ["
    ),
    "does not tell all of time": Mutant(
        sender, "for receiver in self._receivers]", "for receiver in [*self._receivers][:1]]"
    ),
}  # fmt: skip


@contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    """Meanwhile, the classes of the module have the methods of the mutated text."""
    module = mutant.module
    source = Path(module.__file__).read_text()
    assert not mutant.old or source.count(mutant.old) == 1, (
        "say what is to be replaced: the code has changed"
    )
    scope: dict[str, Any] = {"__name__": module.__name__}
    changed = source.replace(mutant.old, mutant.new) if mutant.old else source
    exec(compile(changed, module.__file__, "exec"), scope)
    kept: list[tuple[type, str, Any]] = []
    try:
        for name, made in [*scope.items()]:
            real = getattr(module, name, None)
            if isinstance(made, type) and made.__module__ == module.__name__ and real is not made:
                scope[name] = real  # what the mutated methods make is what everybody knows
                for method, function in vars(made).items():
                    if hasattr(function, "__code__") or isinstance(function, property):
                        kept.append((real, method, vars(real)[method]))
                        setattr(real, method, function)
        yield
    finally:
        for real, method, function in kept:
            setattr(real, method, function)


def seeds_until_caught(name: str) -> tuple[int, str]:
    with mutated(MUTANTS[name]):
        for seed in range(SEEDS_MAX):
            try:
                MUTANTS[name].run(seed).play()
            except Exception as error:
                return seed + 1, f"{type(error).__name__}: {error}"
    return 0, ""


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    runs, what = seeds_until_caught(name)
    print(runs, what)
    assert runs, f"{name!r} survives {SEEDS_MAX} seeds"


# ---- What cannot be is an error


def batch(*groups: int, sender: str = "s") -> Batch:
    return Batch(tuple(Record(sender, group, 0, 0) for group in groups))


def move(version: int = 1, groups: tuple[int, ...] = (1,), old: str = "a", new: str = "b") -> Move:
    return Move(version, (Change(frozenset(groups), old, new),))


def test_a_key_group_comes_with_its_state_and_what_was_parked() -> None:
    new = Receiver("b", ["s", "t"])
    assert new.on("s", Mark(move())) == []
    assert new.on("s", batch(1)) == []
    assert new.handed_over(1, {1}) == []  # t may still send the mark, and its watermark before
    done = new.on("t", Mark(move()))
    assert [type(action).__name__ for action in done] == ["Marked", "Process", "Settled"]
    assert new.owned == {1}


def test_a_stray_record_is_an_error_and_no_guess() -> None:
    old = Receiver("a", ["s", "t"], [0, 1])
    old.on("s", Mark(move()))
    assert old.on("t", batch(1)) == [Process("t", batch(1))]  # t has not heard of it yet
    with pytest.raises(EngineError, match=r"a, channel 's': a record of key-group 1 came"):
        old.on("s", batch(1))


def test_marks_and_barriers_in_different_orders_are_an_error() -> None:
    first = Receiver("a", ["s", "t"], [0, 1])
    first.on("s", Mark(move()))
    with pytest.raises(EngineError, match="barrier 1 came between two marks of move 1"):
        first.on("t", Barrier(1))
    second = Receiver("a", ["s", "t"], [0, 1])
    second.on("s", Barrier(1))
    with pytest.raises(EngineError, match="mark 1 came between two barriers 1"):
        second.on("t", Mark(move()))


@pytest.mark.parametrize(
    ("marks", "match"),
    [
        ([("s", 2), ("s", 1)], "mark 1 came after mark 2"),
        ([("s", 1), ("s", 1)], "mark 1 came after mark 1"),
        ([("s", 1), ("t", 2)], "mark 2 came, and 1 did not"),
        ([("s", 2), ("t", 1)], "other channels have left out"),
    ],
)
def test_marks_that_are_missing_or_come_twice_are_an_error(marks: Any, match: str) -> None:
    receiver = Receiver("a", ["s", "t"], [0, 1])
    (first, version), (channel, wrong) = marks
    receiver.on(first, Mark(move(version)))
    with pytest.raises(EngineError, match=match):
        receiver.on(channel, Mark(move(wrong)))


def test_a_mark_about_others_is_an_error() -> None:
    with pytest.raises(EngineError, match="which is not about this task"):
        Receiver("c", ["s"]).on("s", Mark(move()))


def test_key_groups_come_once() -> None:
    new = Receiver("b", ["s", "t"])
    new.on("s", Mark(move()))
    new.handed_over(1, {1})
    with pytest.raises(EngineError, match="key-group 1 was handed over for move 1"):
        new.handed_over(1, {1})
    new.on("t", Mark(move()))
    with pytest.raises(EngineError, match="settled, and came once more"):
        new.handed_over(1, {1})


def test_nothing_comes_after_the_end() -> None:
    receiver = Receiver("a", ["s"], [0])
    assert receiver.on("s", End())[-1] == Finish()
    with pytest.raises(EngineError, match="batch came after its end"):
        receiver.on("s", batch(0))


def test_a_hand_over_before_its_barrier_and_after_all_marks() -> None:
    old = Receiver("a", ["s", "t"], [0, 1])
    old.on("s", Mark(move()))
    done = old.on("t", Mark(move()))
    assert HandOver(1, frozenset({1}), "b", FIRST) in done
    assert old.on("s", Barrier(1)) + old.on("t", Barrier(1)) == [Pass(1)]


def test_a_channel_is_not_read_while_its_barrier_waits_or_too_much_is_parked() -> None:
    receiver = Receiver("b", ["s", "t"], parked_max=1)
    receiver.on("s", Barrier(1))
    assert (receiver.reads("s"), receiver.reads("t")) == (False, True)
    receiver.on("t", Barrier(1))
    receiver.on("s", Mark(move()))
    receiver.on("s", batch(1))
    assert receiver.reads("s")
    receiver.on("s", batch(1))
    assert (receiver.reads("s"), receiver.reads("t")) == (False, True)


def test_a_sender_refuses_moves_that_do_not_fit_its_routing() -> None:
    routing = Sender(["a", "a"], ["a", "b"])
    with pytest.raises(EngineError, match="'c', which is no receiver here"):
        routing.move(move(new="c"))
    with pytest.raises(EngineError, match="takes key-group 1 from 'b', which does not have it"):
        routing.move(move(old="b", new="a"))
    assert routing.move(move()) == [Send("a", Mark(move())), Send("b", Mark(move()))]
    with pytest.raises(EngineError, match="was told of version 1"):
        routing.move(move())
    with pytest.raises(EngineError, match="'b' still has key-groups"):
        routing.leave("b")


def test_a_sender_tells_who_comes_late_how_far_it_is() -> None:
    routing = Sender(["a"])
    assert routing.advance(5) == [Send("a", Watermark(5))]
    assert routing.advance(5) == []
    assert routing.open("b") == [Send("b", Watermark(5))]
    routing.end()
    assert routing.open("c") == [Send("c", End())]


def test_barriers_and_moves_take_turns() -> None:
    turns = Turns(["a", "b"])
    assert turns.ask(move(1)) == [move(1)]
    assert turns.ask(move(2)) == [move(2)]  # moves may overlap
    assert turns.ask(Barrier(1)) == []
    assert turns.ask(move(3)) == []  # who asks first comes first
    for version in (1, 2):
        assert turns.marked("a", version) == []
    assert turns.marked("b", 1) == []
    assert turns.marked("b", 2) == [Barrier(1)]
    assert turns.passed("a", 1) == []
    assert turns.gone("b") == [move(3)]
    assert turns.marked("a", 3) == []
    assert turns.is_idle
