"""Scaling: the steps of a rescale, as a script over a deployment.

new processes start          while all others work
their channels are opened    first at the next stage, then by their senders
one move                     old owners hand over, new ones take on: align.py, strategies.py
tasks that have nothing      end when all that they handed over has arrived
"""

from typing import NamedTuple

from statekit.engine.deployment import Deployment, Script
from statekit.engine.items import Change, Move
from statekit.engine.job import Stage


class Rescale(NamedTuple):
    """What a rescale did."""

    stage: str
    before: int
    after: int
    strategy: str
    moved: int  # key-groups


def scaling(job: Deployment, stage: Stage, workers: int, strategy: str) -> Script:
    """Gives the stage so many tasks, while records flow."""
    before = job.tasks(stage)
    new = _new_names(job, stage, workers - len(before))
    gone = before[workers:]
    for name in new:
        job.spawn(name, stage)
    yield lambda: all(job.processes[name].control for name in new)
    if new:
        yield from _introducing(job, stage, new)
    target = rebalance(job.owners[stage.name], [*before[:workers], *new])
    yield from _moving(job, stage, target, strategy)
    if gone:
        yield from _retiring(job, stage, gone, strategy)
    job.parallelism[stage.name] = workers


def _new_names(job: Deployment, stage: Stage, count: int) -> list[str]:
    """Names that no task of this generation ever had."""
    found: list[str] = []
    at = 0
    while len(found) < count:
        name = f"{stage.name}-{at}"
        if name not in job.processes:
            found.append(name)
        at += 1
    return found


def _introducing(job: Deployment, stage: Stage, new: list[str]) -> Script:
    """New tasks come: first the next stage hears of their channels, then their senders do."""
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


def _moving(job: Deployment, stage: Stage, target: list[str], strategy: str) -> Script:
    """One move gives all key-groups to those who are to have them."""
    changes: dict[tuple[str, str], set[int]] = {}
    for group, (old, new) in enumerate(zip(job.owners[stage.name], target, strict=True)):
        if old != new:
            changes.setdefault((old, new), set()).add(group)
    if not changes:
        return
    job.version += 1
    version = job.version
    move = Move(version, tuple(Change(frozenset(g), a, b) for (a, b), g in changes.items()))
    job.owners[stage.name] = target
    job.unsettled[version] = {*move.involved}
    providers = {name: job.processes[name].provider for name in move.involved}
    for name in move.involved:  # before the senders: a mark must not come first
        job.processes[name].tell("plan", version=version, strategy=strategy, providers=providers)
    job.begin(job.turns.ask(move))
    yield lambda: version not in job.unsettled


def _retiring(job: Deployment, stage: Stage, gone: list[str], strategy: str) -> Script:
    """Tasks go. All that they had was moved away; some of it may still be on its way."""
    if strategy == "on_demand":  # else nobody would ever ask for the rest
        job.completed = set()
        staying = {*job.tasks(stage)} - {*gone}
        for name in staying:
            job.processes[name].tell("complete")
        yield lambda: staying <= job.completed
    job.holds_barriers = True
    yield lambda: job.is_calm
    for name in gone:
        job.begin(job.turns.gone(name))
        job.tell_senders(stage, "leave", task=name)
    yield lambda: all(job.processes[name].is_finished for name in gone)
    job.holds_barriers = False


def rebalance(owners: list[str], tasks: list[str]) -> list[str]:
    """Owners of key-groups among these tasks, as even as can be, with the fewest moves."""
    least, more = divmod(len(owners), len(tasks))
    held = {name: owners.count(name) for name in tasks}
    # Who has most keeps one more than the others.
    by_most = sorted(tasks, key=lambda name: -held[name])
    room = {name: least + (at < more) for at, name in enumerate(by_most)}
    target: list[str | None] = []
    for owner in owners:
        stays = room.get(owner, 0) > 0
        target.append(owner if stays else None)
        if stays:
            room[owner] -= 1
    free = (name for name in tasks for _ in range(room[name]))
    return [next(free) if owner is None else owner for owner in target]
