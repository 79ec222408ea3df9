"""Which transitions of a leaf, and which handlers, runs have visited."""

from collections import Counter
from typing import Any

from statekit.protocol.coordinator import Coordinator
from statekit.protocol.messages import Accept, Begin, GiveBack, GivenBack, Offer
from statekit.protocol.participant import Participant

#: (what came, state of the leaf before, after): how often
VISITED: Counter[tuple[str, str, str]] = Counter()
#: (machine, what came, what it asked for or "nothing"): how often
HANDLED: Counter[tuple[str, str, str]] = Counter()


def _leaves_of(message: Any) -> list[int]:
    if isinstance(message, Offer):
        return [leaf for grant in message.grants for leaf in grant.leaves]
    if isinstance(message, Accept):
        return [leaf for leaves, _ in message.waiting for leaf in leaves]
    if isinstance(message, Begin):
        return [leaf for leaves in message.leaves for leaf in leaves]
    if isinstance(message, GiveBack | GivenBack):
        return [leaf for leaf, _ in message.leases]
    return [message.leaf] if hasattr(message, "leaf") else []


def _note(machine: str, what: str, asked: list[Any]) -> None:
    for order in asked:
        to_say = type(order.message).__name__ if hasattr(order, "message") else ""
        HANDLED[machine, what, to_say or type(order).__name__] += 1
    if not asked:
        HANDLED[machine, what, "nothing"] += 1


class CountingParticipant(Participant):
    def on(self, sender: str, message: Any) -> list[Any]:
        what = type(message).__name__
        counts = message.generation == self.generation and not self.is_fenced
        leaves = _leaves_of(message) if counts else []
        before = [self.state_of(leaf) for leaf in leaves]
        actions = super().on(sender, message)
        for leaf, state in zip(leaves, before, strict=True):
            VISITED[what, state, self.state_of(leaf)] += 1
        _note("participant", what, actions)
        return actions

    def _called(self, what: str, before: dict[int, str]) -> None:
        for leaf, known in self._leaves.items():
            if known.state != before.get(leaf, "none"):
                VISITED[what, before.get(leaf, "none"), known.state] += 1

    def _states(self) -> dict[int, str]:
        return {leaf: known.state for leaf, known in self._leaves.items()}

    def own(self, *arguments: Any, **named: Any) -> list[Any]:
        before = self._states()
        actions = super().own(*arguments, **named)
        self._called("own", before)
        return actions

    def begin(self, *arguments: Any, **named: Any) -> list[Any]:
        before = self._states()
        actions = super().begin(*arguments, **named)
        self._called("begin", before)
        return actions

    def abort(self, *arguments: Any, **named: Any) -> tuple[list[Any], tuple[int, ...]]:
        before = self._states()
        result = super().abort(*arguments, **named)
        self._called("abort", before)
        return result

    def taken_back(self, *arguments: Any, **named: Any) -> list[Any]:
        before = self._states()
        actions = super().taken_back(*arguments, **named)
        self._called("taken_back", before)
        return actions

    def declare_dead(self, *arguments: Any, **named: Any) -> tuple[list[Any], tuple[int, ...]]:
        before = self._states()
        result = super().declare_dead(*arguments, **named)
        self._called("declare_dead", before)
        return result

    def give_back(self, *arguments: Any, **named: Any) -> list[Any]:
        before = self._states()
        actions = super().give_back(*arguments, **named)
        self._called("give_back", before)
        return actions

    def _fence(self, generation: int) -> list[Any]:
        for state in self._states().values():
            VISITED["fence", state, "none"] += 1
        return super()._fence(generation)


class CountingCoordinator(Coordinator):
    def on(self, sender: str, message: Any) -> list[Any]:
        orders = super().on(sender, message)
        _note("coordinator", type(message).__name__, orders)
        return orders
