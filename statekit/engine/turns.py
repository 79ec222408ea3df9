"""Turns: barriers and moves take turns. The coordinator's part of the order of records; pure.

A move is in flight until its marks have come on all channels of the tasks that it is about. (Their
key-groups may still be on their way then.) A barrier is in flight until all tasks have passed it.
Several moves may be in flight together, or one barrier; never both kinds: else one sender might
send the mark first, and another one the barrier. Who asks first has the first turn.

Which tasks there are counts when a turn begins, not when it is asked for: a task may come while
others have their turn. The senders hear of it before the turn begins, and so it gets the barrier.
"""

from collections import deque
from collections.abc import Iterable

from statekit.engine.items import Barrier, Move


class Turns:
    """Is asked for moves and barriers, and told how far they are; returns what may begin now."""

    def __init__(self, tasks: Iterable[str] = ()) -> None:
        self.tasks = {*tasks}  # all receivers that there are
        self._asked: deque[Move | Barrier] = deque()
        self._moves: dict[int, set[str]] = {}  # in flight, and the tasks that still miss marks
        self._barrier = 0  # in flight; 0: none
        self._behind: set[str] = set()  # the tasks that have not passed it

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight, and nothing is asked for."""
        return not (self._asked or self._moves or self._barrier)

    def ask(self, what: Move | Barrier) -> list[Move | Barrier]:
        self._asked.append(what)
        return self._next()

    def come(self, task: str) -> None:
        """There is one more receiver, and all senders are told so."""
        self.tasks.add(task)

    def marked(self, task: str, version: int) -> list[Move | Barrier]:
        """A task has the marks of all its channels."""
        self._mark(task, version)
        return self._next()

    def passed(self, task: str, number: int) -> list[Move | Barrier]:
        """A task has passed a barrier."""
        if number == self._barrier:
            self._behind.discard(task)
        return self._next()

    def gone(self, task: str) -> list[Move | Barrier]:
        """A task has ended or is told to: it has all marks and barriers that will come to it."""
        self.tasks.discard(task)
        for version in [*self._moves]:
            self._mark(task, version)
        self._behind.discard(task)
        return self._next()

    def _mark(self, task: str, version: int) -> None:
        if (missing := self._moves.get(version)) is not None:
            missing.discard(task)
            if not missing:
                del self._moves[version]

    def _next(self) -> list[Move | Barrier]:
        begun: list[Move | Barrier] = []
        if not self._behind:
            self._barrier = 0
        while self._asked and not self._barrier:
            what = self._asked[0]
            if isinstance(what, Barrier):
                if self._moves:
                    break
                if self.tasks:
                    self._barrier, self._behind = what.number, {*self.tasks}
            elif tasks := self.tasks & {*what.involved}:
                self._moves[what.version] = tasks
            begun.append(self._asked.popleft())
        return begun
