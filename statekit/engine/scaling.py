"""Scaling: the steps of a rescale, as a script over a deployment.

new processes start          while all others work
their channels are opened    first at the next stage, then by their senders
what can be copied is        while the old owners go on (strategies.py)
moves, one after another     old owners hand over, new ones take on: align.py, hand_over.py
tasks that have nothing      end when all that they handed over has arrived

Between two moves every key-group belongs to one task, and the job is as good as any. So there a
rescale can be cut short. If it was *aborted*, the key-groups go back by the same strategy, and what
came leaves again: the stage is as it was. If it was *superseded*, all stays as it is, for the one
that follows to go on from there.
"""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from time import monotonic

from statekit.assignment import group_ranges, show_groups
from statekit.engine.balance import rebalance, weigh
from statekit.engine.deployment import Deployment, Script
from statekit.engine.frames import groups_to_plain
from statekit.engine.items import Change, Move
from statekit.engine.job import Stage
from statekit.engine.rescales import Rescale
from statekit.engine.strategies import How
from statekit.errors import EngineError, shorten


@dataclass(frozen=True)
class Goal:
    """What a stage is to become: so many tasks; or without one; or key-groups of one's own choice.

    One of these is given.
    """

    workers: int = 0
    without: str = ""
    groups: frozenset[int] = frozenset()
    to: str = ""

    def check(self, key_groups: int) -> None:
        """EngineError if no stage of so many key-groups could be so."""
        if self.to and not self.groups:
            raise EngineError("no key-groups are named that are to move.")
        if not self.groups <= {*range(key_groups)}:
            raise EngineError(
                f"key-group {max(self.groups)} is none: the stage has 0 to {key_groups - 1}."
            )
        if self.without or self.to:
            return
        if type(self.workers) is not int or not 1 <= self.workers <= key_groups:
            raise EngineError(
                f"a stage cannot have {shorten(self.workers)} workers. It has {key_groups} "
                "key-groups: ask for 1 to that many."
            )

    def check_tasks(self, tasks: Sequence[str]) -> None:
        """EngineError if it cannot be so with these tasks."""
        for name in (self.without, self.to):
            if name and name not in tasks:
                raise EngineError(f"the stage has no worker {name!r}. It has {', '.join(tasks)}.")
        if self.without and len(tasks) == 1:
            raise EngineError(
                f"{self.without!r} is the last worker of its stage: nobody could take its "
                "key-groups. Add one first."
            )

    def __str__(self) -> str:
        if self.to:
            return f"key-groups {show_groups(group_ranges(self.groups))} to {self.to}"
        return f"without {self.without}" if self.without else f"{self.workers} workers"

    def names(self, job: Deployment, stage: Stage) -> list[str]:
        """The tasks that there will be."""
        now = job.tasks(stage)
        if self.without or self.to:
            return [name for name in now if name != self.without]
        return [*now[: self.workers], *_new_names(job, stage, self.workers - len(now))]

    def owners(self, now: Sequence[str], names: Sequence[str], weights: list[float]) -> list[str]:
        """The task of each key-group that there will be."""
        if self.to:
            return [self.to if g in self.groups else owner for g, owner in enumerate(now)]
        return rebalance(now, names, weights)


def rescaling(
    job: Deployment, stage: Stage, goal: Goal, rescale: Rescale, copy: Callable[[], Script]
) -> Script:
    """See above. copy: takes a checkpoint, for strategies that begin with one."""
    before, owners = job.tasks(stage), job.owners[stage.name]
    names, how = goal.names(job, stage), rescale.how
    rescale.enter("starting")
    if new := [name for name in names if name not in before]:
        yield from _introducing(job, stage, new)
    weights = yield from weighing(job, stage)
    target = goal.owners(owners, names, weights)
    rescale.groups = sum(old != now for old, now in zip(owners, target, strict=True))
    if how.row.copied and rescale.groups and not rescale.wanted_end:
        rescale.enter("copying")
        copying = _shading(job, stage, target, how) if how.row.copied == "shadow" else copy()
        yield from _until_cut_short(copying, rescale)
    if not rescale.wanted_end:
        rescale.enter("moving")
        yield from _moving(job, stage, target, rescale)
    if rescale.wanted_end == "aborted":
        rescale.enter("returning")
        yield from _moving(job, stage, owners, rescale)
        names = before
    if how.row.copied == "shadow":
        for process in job.living(stage):
            process.tell("unshade")
    if rescale.wanted_end != "superseded":
        rescale.enter("arriving")
        yield lambda: not job.arriving
        rescale.enter("leaving")
        if gone := [name for name in job.tasks(stage) if name not in names]:
            yield from _retiring(job, stage, gone)
    job.note_shares(stage)
    rescale.after = len(job.tasks(stage))


def _new_names(job: Deployment, stage: Stage, count: int) -> list[str]:
    """Names that no task of this generation ever had."""
    found: list[str] = []
    at = 0
    while len(found) < count:
        name = f"{stage.name}-{at}"
        if name not in job.names_used:
            found.append(name)
        at += 1
    return found


def _introducing(job: Deployment, stage: Stage, new: list[str]) -> Script:
    """New tasks come: first the next stage hears of their channels, then their senders do."""
    for name in new:
        job.spawn(name, stage)
    yield from job.joining(new)
    job.holds_barriers = True  # a channel is opened while nothing is under way
    yield lambda: job.is_calm
    next_stage = job.job.after(stage)
    assert next_stage is not None
    after = job.tasks(next_stage)
    for receiver in after:
        for name in new:
            job.processes[receiver].tell("channel", task=name)
    wanted = {(receiver, name) for receiver in after for name in new}
    yield lambda: wanted <= job.opened
    for name in new:
        job.send_start(job.processes[name], None)
    yield lambda: all(job.processes[name].is_ready for name in new)
    for name in new:
        job.tell_senders(stage, "open", task=name, address=job.processes[name].address)
        job.turns.come(name)
    job.holds_barriers = False


def weighing(job: Deployment, stage: Stage) -> Generator[Callable[[], bool], None, list[float]]:
    """What each key-group takes: the owners know its bytes, the senders its records."""
    assert stage.key is not None
    groups = range(stage.key.key_groups)
    job.weights = {}
    senders = job.senders(stage)
    asked = {process.name for process in (*senders, *job.living(stage))}
    for process in (*senders, *job.living(stage)):
        process.tell("weigh", stage=stage.name)
    yield lambda: asked <= job.weights.keys()
    names = [process.name for process in senders]
    records = [sum(job.weights[name][group] for name in names) for group in groups]
    sizes = [job.weights[owner][g] for g, owner in enumerate(job.owners[stage.name])]
    return weigh(records, sizes)


def _pairs(owners: Sequence[str], target: Sequence[str]) -> dict[tuple[str, str], list[int]]:
    """The key-groups that go from one task to another."""
    found: dict[tuple[str, str], list[int]] = {}
    for group, (old, new) in enumerate(zip(owners, target, strict=True)):
        if old != new:
            found.setdefault((old, new), []).append(group)
    return found


def _shading(job: Deployment, stage: Stage, target: list[str], how: How) -> Script:
    """New owners copy what they will get."""
    job.copying = set()
    for (old, new), groups in _pairs(job.owners[stage.name], target).items():
        job.copying.add((old, new))
        provider, plain = job.processes[old].provider, groups_to_plain(groups)
        job.processes[new].tell("shade", old=old, provider=provider, groups=plain, pace=how.pace)
    yield lambda: not job.copying


def _until_cut_short(script: Script, rescale: Rescale) -> Script:
    for is_due in script:
        yield lambda is_due=is_due: is_due() or bool(rescale.wanted_end)  # type: ignore[misc]
        if rescale.wanted_end:
            return


def _moving(job: Deployment, stage: Stage, target: list[str], rescale: Rescale) -> Script:
    """Moves until all key-groups are where they are to be, or the rescale is cut short."""
    how = rescale.how
    is_return, row = rescale.phase == "returning", how.row
    while pairs := _pairs(job.owners[stage.name], target):
        # Old owners by turns, so that each lets go of a few.
        columns = zip_longest(*([(pair, g) for g in groups] for pair, groups in pairs.items()))
        order = [one for column in columns for one in column if one is not None]
        changes: dict[tuple[str, str], set[int]] = {}
        for pair, group in order[: row.step or None]:
            changes.setdefault(pair, set()).add(group)
        yield from _one_move(job, stage, changes, how)
        rescale.moves += 1
        rescale.moved += (-1 if is_return else 1) * sum(map(len, changes.values()))
        if row.step:
            yield lambda: not job.arriving
        if how.gap_s and not is_return:
            until = monotonic() + how.gap_s
            job.wake_in(how.gap_s)
            yield lambda: monotonic() >= until or bool(rescale.wanted_end)  # noqa: B023
        if rescale.wanted_end and not is_return:
            return


def _one_move(
    job: Deployment, stage: Stage, changes: dict[tuple[str, str], set[int]], how: How
) -> Script:
    job.version += 1
    version = job.version
    move = Move(version, tuple(Change(frozenset(g), a, b) for (a, b), g in changes.items()))
    owners = [*job.owners[stage.name]]
    for (_, new), groups in changes.items():
        for group in groups:
            owners[group] = new
    job.owners[stage.name] = owners
    job.unsettled[version] = {*move.involved}
    if how.row.library != "on_demand":  # there the rest comes when its old owner leaves
        job.arriving |= {(version, *pair) for pair in changes}
    providers = {name: job.processes[name].provider for name in move.involved}
    for name in move.involved:  # before the senders: a mark must not come first
        job.processes[name].tell(
            "plan", version=version, strategy=how.strategy, providers=providers
        )
    job.begin(job.turns.ask(move))
    yield lambda: version not in job.unsettled


def _retiring(job: Deployment, stage: Stage, gone: list[str]) -> Script:
    """Tasks go. All that they had was moved away; some of it may still be on its way."""
    job.completed = set()
    staying = {*job.tasks(stage)} - {*gone}
    for name in staying:  # what nobody has touched since a hand-over on demand
        job.processes[name].tell("complete")
    yield lambda: staying <= job.completed
    job.holds_barriers = True
    yield lambda: job.is_calm
    for name in gone:
        job.begin(job.turns.gone(name))
        job.tell_senders(stage, "leave", task=name)
    yield lambda: all(job.processes[name].is_finished for name in gone)
    job.holds_barriers = False
