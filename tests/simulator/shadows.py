"""ShadowRun: a PeerRun in which leaves are copied ahead, and many hand-overs are steps of a shadow.

The process around the shadow machines is modelled as migration/shading.py and migration/shadow.py
are: rounds are sent leaf by leaf while records go on, from whatever the leaf has when its turn
comes; messages of rounds and steps are lost, repeated, late and old like all others; processes die
with all that they know of shadows. Several shadows of the same leaves are usual, and so are
hand-overs of leaves that others shadow.

What a store knows of changes is an exact history here: the contents of each leaf when an epoch
ended. Whether leaf contents that became state are right is for the World to see, as ever.
"""

from typing import Any, NamedTuple

from statekit.protocol.messages import Begin, Fetch, Here, Serve, migration_id, runs_of
from statekit.protocol.participant import EXPECTED, OFFERED, OWNED
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
    Unshade,
)

from .peers import PeerRun
from .worker import Copy, Worker

SHADOWS_MAX = 3  # of one worker


class Delta(NamedTuple):
    """The content of a Here that completes a copy."""

    shadow: str
    base: int
    changes: dict[int, int]


class Sending(NamedTuple):
    """What is left of a round: it goes on while records do."""

    target: str
    asked: Round
    epoch: int
    plan: list[tuple[int, int]]
    copies: int


class ShadowWorker(Worker):
    """A worker that copies, and is copied."""

    def __init__(self, run: Any, worker: str, incarnation: int) -> None:
        super().__init__(run, worker, incarnation)
        self.epoch = 1  # of its store
        # What each leaf was when an epoch ended: which object it was, and its entries.
        self.history: dict[int, dict[int, tuple[Copy, dict[int, int]]]] = {}
        self.shades = Shades(self.name, 0)
        self.sending: list[Sending] = []
        self.shadows: dict[str, Shadow] = {}
        self.twins: dict[str, dict[int, dict[int, int]]] = {}
        self.sources: dict[str, str] = {}  # of shadows
        self.steps: dict[str, tuple[str, tuple[int, ...]]] = {}  # by migration: shadow, leaves
        self.copied = self.completed = 0

    def on(self, sender: str, message: Any) -> None:
        kind = type(message)
        if kind.__name__ in HANDLERS:
            self.run.step("on", self.name, message)
            getattr(self, HANDLERS[kind.__name__])(sender, message)
        elif kind is Here and type(message.content) is Delta:
            self._complete(sender, message)
        else:
            super().on(sender, message)
            if kind is Begin:
                self._send_changes(sender, message)

    # ---- Being copied

    def _on_shade(self, sender: str, shade: Shade) -> None:
        if (answer := self.shades.on_shade(sender, shade)) is not None:
            self.run.send(self.name, sender, answer)

    def _on_unshade(self, sender: str, unshade: Unshade) -> None:
        if self.shades.target_of(unshade.shadow) == sender:
            self.shades.drop(unshade.shadow)

    def end_epoch(self) -> int:
        ended, self.epoch = self.epoch, self.epoch + 1
        self.history[ended] = {
            leaf: (copy, dict(copy.content)) for leaf, copy in self.copies.items()
        }
        return ended

    def _on_round(self, sender: str, asked: Round) -> None:
        ended = self.end_epoch()
        plan = self.shades.on_round(sender, asked, self.epoch)
        if plan is not None and not isinstance(plan, dict):
            self.run.send(self.name, sender, plan)
        elif plan is not None:
            self.sending.append(Sending(sender, asked, ended, [*plan.items()], 0))

    def changes(self, leaf: int, since: int) -> dict[int, int] | None:
        """None: it is not known what has changed since."""
        was = self.history.get(since, {}).get(leaf)
        copy = self.copies[leaf]
        if was is None or was[0] is not copy:
            return None
        return {key: count for key, count in copy.content.items() if was[1].get(key) != count}

    def send_round(self) -> None:
        """One more leaf of a round that was asked for."""
        index = self.run.rng.randrange(len(self.sending))
        one = self.sending[index]
        place = (one.asked.shadow, one.asked.generation, self.name, one.asked.number)
        if not one.plan:
            del self.sending[index]
            done = RoundDone(*place, one.epoch, one.copies)
            self.run.send(self.name, one.target, done)
            return
        leaf, since = one.plan.pop(0)
        copy = self.copies.get(leaf)
        if copy is None or not (copy.is_open and copy.is_whole):
            self.run.send(self.name, one.target, NotCopied(*place, leaf))
            return
        changes = self.changes(leaf, since) if since else None
        base = since if since and changes is not None else 0
        content = dict(copy.content) if changes is None else changes
        if base and not content:
            return
        self.sending[index] = one._replace(copies=one.copies + 1)
        copied = Copied(*place, leaf, base, one.epoch, content)
        self.run.send(self.name, one.target, copied)

    def _send_changes(self, sender: str, begin: Begin) -> None:
        """What goes with an offer: the changes of leaves that the target has copied."""
        name, held = self.run.held.get(begin.migration, ("", ()))
        participant = self.participant
        for leaf, epoch in held:
            since = self.shades.since(sender, name, begin.generation, leaf, epoch)
            if not since or participant.state_of(leaf) is not OFFERED:
                continue
            fetch = Fetch(begin.migration, begin.generation, 0, leaf, participant.epoch_of(leaf))
            for action in participant.on(sender, fetch):
                changes = self.changes(leaf, since)
                if isinstance(action, Serve) and changes is not None:
                    content = Delta(name, since, changes)
                    self.run.send(self.name, sender, action.reply._replace(content=content))

    # ---- Copying

    def open_shadow(self, source: str, leaves: list[int]) -> None:
        self.run.shadows_made += 1
        name = f"{self.name}/{self.run.shadows_made}"
        self.shadows[name] = Shadow(name, 0, leaves)
        self.twins[name] = {}
        self.sources[name] = source
        self.run.send(self.name, source, Shade(name, 0, runs_of(leaves)))

    def shadow_step(self, name: str) -> None:
        """Something that a shadow does by itself: it asks again, or for the next round."""
        shadow = self.shadows[name]
        if shadow.is_over:
            self.drop_shadow(name)
        elif not shadow.source:
            leaves = runs_of(sorted(shadow.held))
            self.run.send(self.name, self.sources[name], Shade(name, 0, leaves))
        else:
            self.run.send(self.name, self.sources[name], shadow.round())

    def drop_shadow(self, name: str) -> None:
        self.run.send(self.name, self.sources[name], Unshade(name, 0))
        self.shadows.pop(name).end()
        self.twins.pop(name)

    def take(self, name: str, leaves: list[int], migration: str) -> None:
        shadow = self.shadows[name]
        self.run.held[migration] = (name, shadow.step(leaves))
        self.steps[migration] = (name, tuple(leaves))
        self.act(self.participant.ask(migration, self.sources[name], runs_of(leaves)))

    def settle_steps(self) -> None:
        """Steps that did not take place: their leaves are copied anew."""
        for migration, (name, leaves) in [*self.steps.items()]:
            if self.participant.is_done(migration):
                del self.steps[migration]
                if (shadow := self.shadows.get(name)) is not None:
                    mine = self.participant.state_of
                    shadow.stepped([one for one in leaves if mine(one) is OWNED], True)
                    shadow.stepped(leaves, False)

    def _on_shaded(self, sender: str, shaded: Shaded) -> None:
        if (shadow := self.shadows.get(shaded.shadow)) is not None:
            shadow.on_shaded(shaded)

    def _on_copied(self, sender: str, copied: Copied) -> None:
        shadow = self.shadows.get(copied.shadow)
        if shadow is None or not shadow.accepts(copied):
            return
        twin = self.twins[copied.shadow]
        if self.run.is_damaged():  # it cannot be read, and nothing of the leaf is kept
            twin.pop(copied.leaf, None)
            shadow.spoiled(copied.leaf)
            return
        under = twin.get(copied.leaf, {}) if copied.base else {}
        twin[copied.leaf] = {**under, **copied.content}
        shadow.applied(copied)
        self.copied += 1

    def _on_not_copied(self, sender: str, message: NotCopied) -> None:
        if (shadow := self.shadows.get(message.shadow)) is not None:
            shadow.on_not_copied(message)

    def _on_done(self, sender: str, done: RoundDone) -> None:
        if (shadow := self.shadows.get(done.shadow)) is not None:
            shadow.on_done(done)

    def _on_unknown(self, sender: str, unknown: Unknown) -> None:
        if (shadow := self.shadows.get(unknown.shadow)) is not None:
            shadow.on_unknown(unknown)

    def _complete(self, sender: str, here: Here) -> None:
        """Changes came with an offer: onto the copy that they were made against, or not at all."""
        leaf, delta = here.leaf, here.content
        participant, shadow = self.participant, self.shadows.get(delta.shadow)
        known = participant._leaves.get(leaf)
        is_due = known is not None and known.state is EXPECTED and known.epoch == here.epoch
        if shadow is None or not is_due or not shadow.fits(sender, 0, leaf, delta.base):
            return
        twin = self.twins[delta.shadow]
        twin[leaf] = {**twin.get(leaf, {}), **delta.changes}
        self.completed += 1
        super().on(sender, here._replace(content=dict(twin[leaf])))


# By name: mutants of the module have classes of their own.
HANDLERS = {
    "Shade": "_on_shade",
    "Unshade": "_on_unshade",
    "Round": "_on_round",
    "Shaded": "_on_shaded",
    "Copied": "_on_copied",
    "NotCopied": "_on_not_copied",
    "RoundDone": "_on_done",
    "Unknown": "_on_unknown",
}


class ShadowRun(PeerRun):
    """A run with shadows."""

    worker_class: Any = ShadowWorker

    def __init__(self, seed: int, **arguments: Any) -> None:
        self.held: dict[str, tuple[str, tuple[tuple[int, int], ...]]] = {}  # said with a Begin
        self.shadows_made = 0
        self.completed = self.copied = 0  # by workers that have died
        super().__init__(seed, **arguments)
        self.steps *= 4  # a shadow and its steps take many messages
        self.bias = self.rng.choice((0.1, 0.25, 0.4))

    def faulty_step(self, draw: float) -> None:
        chance = self.rng.random()
        if chance < self.bias:
            self._shadow_something()
        elif chance < 0.7 and self.network:
            self._deliver_faulty()
        else:
            super().faulty_step(draw)

    def crash(self, name: str) -> None:
        if (worker := self.workers.get(name)) is not None:
            self.completed += worker.completed
            self.copied += worker.copied
        super().crash(name)

    def _shadow_something(self) -> None:
        rng = self.rng
        workers = [one for one in self.workers.values() if not one.is_paused]
        if not workers:
            return
        worker = rng.choice(workers)
        worker.settle_steps()
        kind = rng.random()
        names = [*worker.shadows]
        if worker.sending and kind < 0.6:
            worker.send_round()
        elif kind < 0.65 and names:
            worker.shadow_step(rng.choice(names))
        elif kind < 0.85 and names:
            self._take(worker, rng.choice(names))
        elif kind < 0.88 and names:
            self.step("drops", worker.name, names[0])
            worker.drop_shadow(names[0])
        elif kind < 0.9 and len(worker.shades):
            name = rng.choice([*worker.shades._shades])
            self.step("forgets", worker.name, name)
            worker.shades.drop(name)
        elif len(names) < SHADOWS_MAX:
            self._open(worker)

    # These runs are long enough for an Offer to come when all that was known of its hand-over is
    # forgotten. Nobody knows then that it was not wanted, or that its source was declared dead.

    def _whim(self) -> None:
        super()._whim()
        self.unwanted.clear()

    def tick(self, worker: Worker) -> None:
        for incoming in [*worker.participant._incoming.values()]:
            if incoming.source not in self.workers and not (incoming.missing or incoming.installed):
                self.step("is told dead again", worker.name, incoming.source)
                worker.act(worker.participant.declare_dead(incoming.source)[0])
        super().tick(worker)

    def is_damaged(self) -> bool:
        """Whether a copy arrives damaged, or does not fit into memory."""
        return not self.is_calm and self.rng.random() < 0.1

    def _open(self, worker: Any) -> None:
        others = [one for one in self.workers.values() if one is not worker]
        if not others:
            return
        source = self.rng.choice(others)
        leaves = [leaf for leaf, copy in source.copies.items() if copy.is_open and copy.is_whole]
        if leaves:
            groups = sorted({leaf // self.subgroups for leaf in leaves})
            some = self.rng.sample(groups, self.rng.randint(1, len(groups)))
            self.step("shadows", worker.name, (source.name, some))
            worker.open_shadow(source.name, self._leaves_of(some))

    def _leaves_of(self, groups: list[int]) -> list[int]:
        size = self.subgroups
        return sorted(leaf for one in groups for leaf in range(one * size, (one + 1) * size))

    def _take(self, worker: Any, name: str) -> None:
        """A step: if the source could offer these leaves, as far as anybody can know."""
        source = self.workers.get(worker.sources[name])
        if source is None or source.is_paused:
            return
        known = source.participant._leaves
        free = {leaf for leaf, one in known.items() if one.state is OWNED and one.is_closed}
        held = worker.shadows[name].held
        if not any(held.values()) and self.rng.random() < 0.9:
            return  # seldom: nothing would come with the offer
        groups = sorted({leaf // self.subgroups for leaf in held})
        groups = [one for one in groups if free.issuperset(self._leaves_of([one]))]
        if groups:
            some = self._leaves_of([self.rng.choice(groups)])
            self.migrations += 1
            self.step("takes", worker.name, (name, some))
            worker.take(name, some, migration_id(worker.name, self.migrations))
