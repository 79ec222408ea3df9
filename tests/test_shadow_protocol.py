"""What of a copy may be used: the machines alone, in the simulator, and with bugs put into them."""

from typing import Any

import pytest
from simulator.shadows import Delta, ShadowRun, ShadowWorker
from test_protocol_mutants import Mutant, mutated

from statekit.protocol import shadow
from statekit.protocol.messages import Expect, Here
from statekit.protocol.shadow import (
    Copied,
    NotCopied,
    Round,
    RoundDone,
    Shade,
    Shaded,
    Shades,
    Shadow,
    Unknown,
)

SEEDS = 600
SEEDS_MAX = 6000


def opened(leaves: int = 4) -> Shadow:
    machine = Shadow("s", 3, range(leaves))
    assert machine.on_shaded(Shaded("s", 3, "old"))
    return machine


def copied(machine: Shadow, leaf: int, base: int, epoch: int, **other: Any) -> Copied:
    return Copied("s", 3, "old", machine.number, leaf, base, epoch)._replace(**other)


# ---- The target


def test_a_copy_is_applied_onto_exactly_what_it_was_made_against() -> None:
    machine = opened()
    machine.round()
    machine.applied(copied(machine, 0, 0, 5))
    machine.round()
    for base in (4, 6, 1):
        assert not machine.accepts(copied(machine, 0, base, 9))
    assert machine.accepts(copied(machine, 0, 5, 9))
    assert machine.accepts(copied(machine, 0, 0, 9)), "all of it fits always"
    assert not machine.accepts(copied(machine, 1, 5, 9)), "nothing is held of it"


@pytest.mark.parametrize(
    "other", [{"generation": 4}, {"source": "another life"}, {"shadow": "t"}, {"number": 1}]
)
def test_copies_of_others_and_of_earlier_rounds_do_not_count(other: dict[str, Any]) -> None:
    machine = opened()
    machine.round()
    machine.round()
    assert machine.accepts(copied(machine, 0, 0, 5))
    assert not machine.accepts(copied(machine, 0, 0, 5, **other))


def test_a_copy_that_comes_twice_is_applied_once() -> None:
    machine = opened()
    machine.round()
    machine.applied(copied(machine, 0, 0, 5))
    assert not machine.accepts(copied(machine, 0, 0, 5))
    with pytest.raises(AssertionError):
        machine.applied(copied(machine, 0, 0, 5))


def test_a_round_that_lost_something_confirms_nothing() -> None:
    machine = opened(2)
    machine.round()
    for leaf in (0, 1):
        machine.applied(copied(machine, leaf, 0, 5))
    assert machine.on_done(RoundDone("s", 3, "old", 1, 5, 2))
    machine.round()
    machine.applied(copied(machine, 0, 5, 8))
    assert not machine.on_done(RoundDone("s", 3, "old", 2, 8, 2))
    assert machine.held == {0: 8, 1: 5}
    assert machine.on_done(RoundDone("s", 3, "old", 2, 8, 1))
    assert machine.held == {0: 8, 1: 8}


def test_what_cannot_be_copied_is_not_held_any_more() -> None:
    machine = opened(2)
    machine.round()
    for leaf in (0, 1):
        machine.applied(copied(machine, leaf, 0, 5))
    machine.round()
    machine.on_not_copied(NotCopied("s", 3, "old", 2, 0))
    assert machine.on_done(RoundDone("s", 3, "old", 2, 8, 0))
    assert machine.held == {0: 0, 1: 8}


def test_a_leaf_in_a_step_is_in_no_round_and_a_failed_step_spoils_it() -> None:
    machine = opened(3)
    machine.round()
    for leaf in range(3):
        machine.applied(copied(machine, leaf, 0, 5))
    assert machine.step((0, 1)) == ((0, 5), (1, 5))
    assert dict(machine.round().held) == {2: 5}
    assert not machine.accepts(copied(machine, 0, 5, 9))
    assert machine.fits("old", 3, 0, 5)
    for wrong in (("new", 3, 0, 5), ("old", 4, 0, 5), ("old", 3, 0, 4), ("old", 3, 2, 5)):
        assert not machine.fits(*wrong)
    machine.stepped((0,), True)
    machine.stepped((1,), False)
    assert machine.held == {1: 0, 2: 5}
    assert not machine.fits("old", 3, 0, 5)
    assert not machine.fits("old", 3, 1, 0)


def test_another_life_of_the_source_and_a_drop_end_it() -> None:
    machine = opened()
    machine.round()
    machine.applied(copied(machine, 0, 0, 5))
    assert not machine.on_shaded(Shaded("s", 3, "its next life"))
    assert machine.is_over
    assert not machine.accepts(copied(machine, 1, 0, 5))
    assert machine.step((0,)) == ()
    other = opened()
    other.on_unknown(Unknown("s", 2, "old"))
    assert not other.is_over
    other.on_unknown(Unknown("s", 3, "old"))
    assert other.is_over


# ---- The source


def test_the_source_compares_with_what_the_target_says_that_it_holds() -> None:
    shades = Shades("old", 3)
    assert shades.on_shade("new", Shade("s", 3, (range(4),))) == Shaded("s", 3, "old")
    asked = Round("s", 3, 1, ((0, 0), (1, 5), (2, 7), (9, 5), (3, 99)))
    assert shades.on_round("new", asked, 10) == {0: 0, 1: 5, 2: 7, 3: 0}
    assert shades.needed("s") == 5
    assert shades.on_round("new", asked._replace(number=0), 10) is None, "a later one was asked for"
    assert isinstance(shades.on_round("other", asked, 10), Unknown)
    assert isinstance(shades.on_round("new", asked._replace(generation=2), 10), Unknown)
    assert isinstance(shades.on_round("new", asked._replace(shadow="t"), 10), Unknown)


def test_only_its_target_may_use_a_shadow_and_only_while_it_is_known() -> None:
    shades = Shades("old", 3)
    shades.on_shade("new", Shade("s", 3, (range(4),)))
    assert shades.on_shade("other", Shade("s", 3, (range(4),))) is None
    assert shades.on_shade("new", Shade("t", 2, (range(4),))) is None
    assert shades.since("new", "s", 3, 1, 5) == 5
    for wrong in (("other", "s", 3, 1), ("new", "t", 3, 1), ("new", "s", 2, 1), ("new", "s", 3, 7)):
        assert shades.since(*wrong, 5) == 0
    shades.fence(4)
    assert shades.since("new", "s", 4, 1, 5) == 0
    assert len(shades) == 0


# ---- In the simulator


def test_no_seed_with_shadows_breaks_an_invariant() -> None:
    completed = 0
    for seed in range(SEEDS):
        run = ShadowRun(seed)
        try:
            run.play()
        except Exception as error:
            trace: list[str] = []
            with pytest.raises(type(error)):
                ShadowRun(seed, trace=trace).play()
            pytest.fail("\n".join([*trace, f"seed {seed}: {error}"]))
        completed += run.completed + sum(one.completed for one in run.workers.values())
    assert completed > SEEDS // 5, "many leaves came as changes to their copies"


MUTANTS = {
    "delta onto a stale shadow": Mutant(
        shadow, "return base is not None and copied.base in (0, base)", "return base is not None"
    ),
    "a copy counts as newer than it is": Mutant(
        shadow,
        "self.held[copied.leaf] = copied.epoch",
        "self.held[copied.leaf] = copied.epoch + 1",
    ),
    "step without acknowledgement": Mutant(
        shadow,
        "self.stepping[leaf] = self.held.pop(leaf)",
        "self.stepping[leaf] = max(self.held.values())\n                del self.held[leaf]",
    ),
}


# Chance needs thousands of runs for this one: a change must be lost, its round must seem complete,
# and a step must follow before the leaf is copied again.
LOST = Mutant(
    shadow,
    "if not self._is_current(done) or done.copies != len(self._came):",
    "if not self._is_current(done):",
)


class Served(ShadowWorker):
    """Bug: records are counted in a copy."""

    def _on_copied(self, sender: str, message: Copied) -> None:
        super()._on_copied(sender, message)
        twin = self.twins.get(message.shadow, {}).get(message.leaf)
        if twin is not None and self.run.world.pending[message.leaf]:
            key, _ = self.run.world.pending[message.leaf][0]
            if key in twin:
                self.run.world.count(self, message.leaf, key, twin)


class Hasty(ShadowWorker):
    """Bug: what is offered is taken from the copy, without the changes since."""

    def _expect(self, action: Expect) -> None:
        super()._expect(action)
        for leaf in action.leaves:
            for name, machine in self.shadows.items():
                if leaf in machine.stepping and leaf in self.twins[name]:
                    known = self.participant._leaves[leaf]
                    here = Here(known.migration, 0, 0, leaf, known.epoch, True, None)
                    full = here._replace(content=dict(self.twins[name][leaf]))
                    self.act(self.participant.on(known.peer, full))
                    break


class Blind(ShadowWorker):
    """Bug: the last changes are applied onto a copy that has been dropped and made anew."""

    def _complete(self, sender: str, here: Here) -> None:
        delta: Delta = here.content
        machine = self.shadows.get(delta.shadow)
        if machine is not None and here.leaf in machine.stepping:
            machine.stepping[here.leaf] = delta.base
            delta = delta._replace(changes={})
        super()._complete(sender, here._replace(content=delta))


def is_caught(worker_class: Any = ShadowWorker) -> bool:
    for seed in range(SEEDS_MAX):
        run_class = type("Buggy", (ShadowRun,), {"worker_class": worker_class})
        try:
            run_class(seed).play()
        except Exception:
            return True
    return False


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    with mutated(MUTANTS[name]):
        assert is_caught(), f"{name!r} survives {SEEDS_MAX} seeds"


def test_a_round_that_lost_copies_and_counts_as_complete_is_caught() -> None:
    with mutated(LOST), pytest.raises(AssertionError):
        test_a_round_that_lost_something_confirms_nothing()


@pytest.mark.parametrize("bug", [Served, Hasty, Blind])
def test_bug_around_the_machine_is_caught(bug: Any) -> None:
    assert is_caught(bug), f"{bug.__doc__} survives {SEEDS_MAX} seeds"
