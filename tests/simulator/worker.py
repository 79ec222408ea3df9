"""Worker: the process around a Participant, as the engine and the gRPC shell will be.

It carries out what the participant asks for, on a model of content: a copy of a leaf is a dict of
key: count. Storage is slow: parts of checkpoints and restores are jobs, which the run finishes
(or fails) later.
"""

from typing import Any

from statekit.protocol.messages import (
    Action,
    AddToPart,
    Begin,
    Drop,
    Expect,
    Fence,
    Here,
    Install,
    Lost,
    Reopen,
    Restore,
    Send,
    Serve,
    Shut,
    Take,
    TakeBack,
    Unexpect,
    WritePart,
    instance,
)

from .world import Violation


class Copy:
    """A leaf, or as much of it as is here."""

    __slots__ = ("content", "frozen", "is_open", "is_whole")

    def __init__(self, content: dict[int, int], is_whole: bool, is_open: bool) -> None:
        self.content = content
        self.is_whole = is_whole
        self.is_open = is_open
        self.frozen: dict[int, dict[int, int]] = {}  # by checkpoint: what of the leaf was here


class Worker:
    def __init__(self, run: Any, worker: str, incarnation: int) -> None:
        self.run = run
        self.world = run.world
        self.worker = worker
        self.incarnation = incarnation
        self.name = instance(worker, incarnation)
        self.participant = run.participant_class(
            self.name, run.first_generation, run.subgroups, run.window
        )
        self.copies: dict[int, Copy] = {}
        self.jobs: list[tuple[Any, ...]] = []  # ("part", number, leaves) or ("restore", Restore)
        self.is_alive = True
        self.is_paused = False
        self.streamed: set[tuple[str, int]] = set()  # messages of streams that have come
        self.clock = 1.0  # how fast its clock goes: how likely it says things again
        self.do = {
            Send: self._send,
            Shut: self._shut,
            TakeBack: self._take_back,
            Reopen: self._reopen,
            Drop: self._drop,
            Serve: self._serve,
            Expect: self._expect,
            Unexpect: self._unexpect,
            Install: self._install,
            WritePart: self._write_part,
            AddToPart: self._add_to_part,
            Fence: self._fence,
            Restore: self._restore,
            Lost: self._lost,
        }

    def act(self, actions: list[Action]) -> None:
        do = self.do
        for action in actions:
            if not self.is_alive:
                return
            do[type(action)](action)

    def on(self, sender: str, message: Any) -> None:
        if type(message) is Take:
            participant = self.participant
            if (
                message.generation == participant.generation
                and message.number > participant.barrier
                and not self.world.is_aligned(message.number)
            ):
                return  # the barrier has not come through yet; Take is said again
        self.run.step("on", self.name, message)
        participant = self.participant
        if type(message) is Begin and message.generation == participant.generation:
            self._make_way(sender, message)
        self.act(participant.on(sender, message))
        if type(message) is Here and message.stream:
            self._received(sender, message)
        self.run.open_streams(self)

    def _make_way(self, sender: str, begin: Begin) -> None:
        if not self.participant.why_over(begin.migration, begin.leaves):
            self.act(self.participant.make_way(sender, begin.leaves))

    def _received(self, sender: str, here: Here) -> None:
        """A message came by a stream, which brings each message once."""
        if (sender, here.sequence) not in self.streamed:
            self.streamed.add((sender, here.sequence))
            self.act(self.participant.received(here.migration, here.stream, len(here.content)))

    def tick(self) -> None:
        """Time has passed: calls without an answer are over, and so are streams that broke off."""
        participant = self.participant
        for migration, incoming in [*participant._incoming.items()]:
            participant.unanswered(migration, sorted(incoming.asked))
            if incoming.is_streaming and self.run.is_broken(migration, incoming):
                self.act(participant.stream_ended(migration, incoming.stream))
            if self.run.is_calm and not self.run.streaming:  # somebody touches every leaf
                self.act(participant.want(migration, sorted(incoming.missing)))
        self.act(participant.resend())
        self.run.open_streams(self)

    def crash(self) -> None:
        self.is_alive = False
        self.copies = {}
        self.jobs = []

    # ---- Actions

    def _send(self, action: Send) -> None:
        self.run.send(self.name, action.to, action.message)

    def _shut(self, action: Shut) -> None:
        for leaf in action.leaves:
            self.copies[leaf].is_open = False
            self.world.shut(self, leaf)

    def _take_back(self, action: TakeBack) -> None:
        if self.run.record_fails():
            self.run.step("cannot record", self.name, action.leaves)
            return
        self.act(self.participant.taken_back(action.leaves))

    def _reopen(self, action: Reopen) -> None:
        for leaf in action.leaves:
            copy = self.copies[leaf]
            copy.is_open = True
            self.world.opened(self, leaf, copy.content, True)

    def _drop(self, action: Drop) -> None:
        self.world.dropped(self, action.leaf)
        del self.copies[action.leaf]

    def _serve(self, action: Serve) -> None:
        reply = action.reply
        copy = self.copies[reply.leaf]
        if action.keys and self.run.is_large(reply.leaf):
            content = {key: copy.content[key] for key in action.keys}
            is_whole = len(content) == len(copy.content)
        else:
            content, is_whole = dict(copy.content), True
        if is_whole and action.keys:
            self.participant.served_whole(reply.migration, reply.leaf)
        if reply.stream:
            self.run.streams(reply.migration, reply.stream, len(content))
            self.participant.sent(reply.migration, reply.stream, len(content))
        self.run.send(self.name, action.to, reply._replace(content=content, is_whole=is_whole))

    def _expect(self, action: Expect) -> None:
        migration = self.participant._leaves[action.leaves[0]].migration
        if migration in self.run.unwanted:
            raise Violation(f"{self.name} takes on {migration}, which it does not want any more")
        for leaf in action.leaves:
            self.copies[leaf] = Copy({}, False, False)

    def _unexpect(self, action: Unexpect) -> None:
        for leaf in action.leaves:
            self.world.unexpected(self, leaf)
            self.copies.pop(leaf, None)

    def _install(self, action: Install) -> None:
        copy = self.copies[action.leaf]
        # What is here is newer.
        copy.content = {**action.content, **copy.content}
        copy.is_whole = action.is_whole
        copy.is_open = True
        self.world.opened(self, action.leaf, copy.content, action.is_whole)
        if action.is_whole and copy.frozen:
            for number, content in copy.frozen.items():
                self._write(number, {action.leaf: {**action.content, **content}})
            copy.frozen = {}

    def _write_part(self, action: WritePart) -> None:
        parts = {}
        for leaf in action.leaves:
            copy = self.copies[leaf]
            if leaf in action.unfinished:
                copy.frozen[action.number] = dict(copy.content)
            else:
                parts[leaf] = dict(copy.content)
        if parts:
            self._write(action.number, parts)

    def _add_to_part(self, action: AddToPart) -> None:
        for leaf in action.leaves:
            copy = self.copies[leaf]
            if copy.is_whole:
                self._write(action.number, {leaf: dict(copy.content)})
            else:
                copy.frozen[action.number] = dict(copy.content)

    def _write(self, number: int, parts: dict[int, dict[int, int]]) -> None:
        self.jobs.append(("part", number, parts))

    def _fence(self, action: Fence) -> None:
        if action.generation <= self.world.generation:
            self.world.fenced(self, self.copies)
        self.copies = {}
        self.jobs = []

    def _restore(self, action: Restore) -> None:
        self.jobs.append(("restore", action))

    def _lost(self, action: Lost) -> None:
        self.run.lost(self, action)

    # ---- Jobs

    def finish(self, index: int, fails: bool) -> None:
        job = self.jobs.pop(index)
        if job[0] == "restore":
            self._finish_restore(job[1])
            return
        _, number, parts = job
        if fails:
            self.run.step("part fails", self.name, number)
            self.act(self.participant.part_failed(number))
            return
        for leaf, content in parts.items():
            if len(content) != self.world.keys:
                raise AssertionError(f"{self.name} writes a part of leaf {leaf}: {content}")
            written = [content[key] for key in range(self.world.keys)]
            self.world.written(number, leaf, self, written)
        self.run.step("part written", self.name, (number, tuple(parts)))
        if self.is_alive:
            self.act(self.participant.part_written(number, tuple(parts)))

    def _finish_restore(self, restore: Restore) -> None:
        participant = self.participant
        self.run.step("restored", self.name, restore)
        if not self.is_alive or restore.generation != participant.generation:
            return
        actions = participant.own(restore.leaves, restore.number, restore.generation)
        for leaf in restore.leaves:
            content = self.world.restored(restore.generation, restore.number, leaf)
            self.copies[leaf] = Copy(content, True, True)
            self.world.opened(self, leaf, content, True)
        self.act(actions)

    # ---- Records

    def ghost(self, leaf: int) -> None:
        """A process of an old generation goes on working: nothing of it may ever count."""
        copy = self.copies[leaf]
        if copy.is_open:
            for key in copy.content:
                copy.content[key] += 1000
