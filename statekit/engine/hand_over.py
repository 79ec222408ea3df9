"""Hand-over: state that goes from a task to others, and comes from others. The task's part of it.

    old owner                 coordinator               new owner
    has all marks
    let_go  ──────────────────────────────> take ─────> takes the key-groups over: they are its own
    stands still                                        now, whatever has come of them
    goes on <──────────────── taken <────────────────── taken
              handed_over <──────────────────────────── arrived: it may begin; at once, or when all
                        └─────────────────────────────> of it is there (strategies.py)
                              delivered <────────────── all of it is there

The new owner takes (KVProvider.fetch_from(), Shadow.take()), as it may have copies already. Threads
do that, and wait for state: its records go on. The old owner stands still until it is rid of the
key-groups, or time would fire timers that are not its own any more.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import statekit as sk
from statekit.assignment import group_ranges, subtract
from statekit.engine.align import HandOver
from statekit.engine.control import Control
from statekit.engine.frames import groups_from_plain, groups_to_plain
from statekit.engine.strategies import STRATEGIES, Strategy
from statekit.errors import ClosedError
from statekit.migration.arrival import Arrival
from statekit.migration.shadow import Shadow

Message = dict[str, Any]
POLL_SECONDS = 0.2  # in which a shadow says how far it is


class HandOvers:
    """Of one keyed task."""

    def __init__(
        self,
        kv: sk.KVProvider,
        control: Control,
        place: str,
        hear: Callable[[], Message],
        later: deque[Message],
        fail: Callable[[], None],
    ) -> None:
        """place: of the stage's checkpoints. fail: says why this task cannot go on.

        hear: waits for the next message. later: for those that are not for us, and came when we
        stood still.
        """
        self._kv = kv
        self._control = control
        self._place = place
        self._hear = hear
        self._later = later
        self._fail = fail
        self._plans: dict[int, Message] = {}  # by version: how, and where whose state is
        self._shadows: list[Shadow] = []
        self._counted: dict[str, int] = {}  # by shadow: bytes that the coordinator knows of
        self._is_over = False
        self._undone = 0  # times that shadows were not wanted any more

    def on(self, message: Message) -> bool:
        """Whether the message was for us."""
        kind = message["kind"]
        if kind == "plan":
            self._plans = {message["version"]: message}  # one move after the other
        elif kind == "take":
            plan = self._plans[message["version"]]
            self._in_thread(lambda: self._take(message, plan))
        elif kind == "shade":
            undone = self._undone
            self._in_thread(lambda: self._shade(message, undone))
        elif kind == "unshade":
            self._undone += 1
            shadows, self._shadows = self._shadows, []
            for shadow in shadows:
                self._in_thread(shadow.drop)
        elif kind == "complete":
            self._in_thread(self._bring_all)
        else:
            return False
        return True

    def give_up(self) -> None:
        """The task is over: nothing that fails now matters."""
        self._is_over = True

    # ---- The old owner

    def let_go(self, action: HandOver) -> None:
        """When this returns, the key-groups are the new owner's, and refused here."""
        groups = groups_to_plain(action.groups)
        self._control.send(
            "let_go",
            version=action.version,
            to=action.to,
            groups=groups,
            watermark=action.watermark,
        )
        while (message := self._hear()) != {
            "kind": "taken", "version": action.version, "by": action.to
        }:  # fmt: skip
            if not self.on(message):
                self._later.append(message)

    def leave(self) -> None:
        """What others have taken over must be there before this task may end."""
        for departure in self._kv.migrations:
            departure.wait()

    # ---- The new owner

    def _shade(self, message: Message, undone: int) -> None:
        """Copies key-groups until copying does not bring them nearer any more."""
        groups = group_ranges(groups_from_plain(message["groups"]))
        shadow = self._kv.shadow(message["provider"], key_groups=groups, pace=message["pace"])
        self._shadows.append(shadow)
        if undone != self._undone:  # meanwhile
            shadow.drop()
        is_ready = False
        while not is_ready:
            try:
                shadow.wait(POLL_SECONDS)
                is_ready = True
            except TimeoutError:
                pass  # not yet: it says how far it is
            except ClosedError:
                return
            self._count(shadow, old=message["old"], is_ready=is_ready)

    def _count(self, shadow: Shadow, old: str, is_ready: bool) -> None:
        copied = shadow.progress.bytes
        new = copied - self._counted.get(shadow.id, 0)
        self._counted[shadow.id] = copied
        self._control.send("copied", old=old, bytes=new, is_ready=is_ready)

    def _take(self, message: Message, plan: Message) -> None:
        strategy = STRATEGIES[plan["strategy"]]
        about = {name: message[name] for name in ("version", "old", "groups", "watermark")}
        arrival = self._take_over(message["old"], plan["providers"], message["groups"], strategy)
        self._control.send("taken", version=message["version"], old=message["old"])
        if strategy.is_complete_first:
            arrival.wait()
        self._control.send("arrived", **about)
        if strategy.library != "on_demand":
            arrival.wait()
            self._control.send("delivered", **about, bytes=arrival.bytes_received)

    def _take_over(
        self, old: str, providers: dict[str, str], plain: Any, strategy: Strategy
    ) -> Arrival:
        provider, groups = providers[old], group_ranges(groups_from_plain(plain))
        for shadow in self._shadows:
            if shadow.source == provider and not subtract(groups, shadow.key_groups):
                arrival = shadow.take(groups)
                self._count(shadow, old, is_ready=True)
                return arrival
        base = self._place if strategy.copied == "checkpoint" else None
        return self._kv.fetch_from(
            provider, key_groups=groups, strategy=strategy.library, base=base
        )

    def _bring_all(self) -> None:
        for arrival in self._kv.migrations:
            arrival.wait()
        self._control.send("completed")

    def _in_thread(self, call: Callable[[], Any]) -> None:
        """Does something that takes long; if it fails, so does the task."""

        def run() -> None:
            try:
                call()
            except Exception:
                if not self._is_over:
                    self._fail()

        threading.Thread(target=run, daemon=True).start()
