"""PeerRun: participants without a coordinator, as KVProvider.migrate() uses them.

Nobody has a table: hand-overs are asked for directly, taken back, refused, given back. A process
may die for good if the old owners of its leaves still have them, and the new owners of leaves that
it gave away have all of them. Then an authority says so (declare_dead), and there is no new
generation: the source of records goes back for those leaves alone.
"""

from typing import Any

from statekit.protocol.messages import migration_id, runs_of
from statekit.protocol.participant import EXPECTED, NONE, NUMBERS_MAX, OFFERED, OWNED

from .run import CALM_ROUNDS_MAX, CALM_STEPS_MAX, Run
from .worker import Copy, Worker
from .world import Violation

WORKERS_MAX = 8


class PeerRun(Run):
    first_generation = 0
    migrations = 0
    over = 0  # checkpoints up to this one are complete, or given up

    def __init__(self, seed: int, **arguments: Any) -> None:
        self.subgroups = 1 + seed // 4 % 2  # leaves of a key-group
        self.givers: set[str] = set()  # who passed key-groups on
        super().__init__(seed, **arguments)

    def boot(self) -> None:
        world = self.world
        workers = list(self.workers.values())
        if self.spares:
            workers = workers[: (len(workers) + 1) // 2]  # the others own nothing yet, and may die
        count, groups, size = len(workers), world.leaves // self.subgroups, self.subgroups
        for index, worker in enumerate(workers):
            mine = range(index * groups // count * size, (index + 1) * groups // count * size)
            worker.act(worker.participant.own(mine))
            for leaf in mine:
                worker.copies[leaf] = Copy(dict.fromkeys(range(world.keys), 0), True, True)
                world.opened(worker, leaf, worker.copies[leaf].content, True)
                world.at[leaf] = worker.name

    def route(self, leaf: int) -> str:
        """Where the source sends the leaf's records: to whoever has the leaf, or is to have it."""
        owner = self.world.opener[leaf]
        if owner is not None:
            return str(owner.name)
        found = ""
        for worker in self.workers.values():
            state = worker.participant.state_of(leaf)
            if state is EXPECTED:
                return worker.name
            if state is OFFERED:
                found = worker.name
        return found

    def tick(self, worker: Worker) -> None:
        self.step("says again", worker.name, "")
        era = self.world.era
        is_due = worker.participant.barrier < era and self.world.is_aligned(era)
        if is_due and (era > self.over or self.rng.random() < 0.1):
            self.pass_barrier(worker, era)
        for outgoing in [*worker.participant._outgoing.values()]:
            if outgoing.target not in self.workers:  # it died right after its Begin: tell again
                self.step("is told dead", worker.name, outgoing.target)
                self.world.abandoned = self.world.era  # as docs/protocol.md asks of engines
                worker.act(worker.participant.declare_dead(outgoing.target)[0])
        for incoming in [*worker.participant._incoming.values()]:
            if incoming.source not in self.workers and incoming.returned:  # its offer came late
                worker.act(worker.participant.declare_dead(incoming.source)[0])
        worker.tick()

    def pass_barrier(self, worker: Worker, number: int) -> None:
        if number > self.over:
            super().pass_barrier(worker, number)
        else:  # who began after it, or was not told
            self.step("is told over", worker.name, self.over)
            worker.act(worker.participant.end(self.over))

    def _end_barrier(self, likely: float) -> None:
        """Checkpoints that are complete or given up are over: some hear of that, the others not."""
        world = self.world
        is_whole = len(world.disk.get(world.era, {})) == world.leaves
        if world.era <= world.abandoned or (self._is_taken(world.era) and is_whole):
            self.over = world.era
        for worker in self.workers.values():
            if self.rng.random() < likely and worker.participant.ended < self.over:
                self.step("is told over", worker.name, self.over)
                worker.act(worker.participant.end(self.over))

    def _pass_on(self) -> str:
        """Key-groups go to another provider of the process, as split() and merge() do it: its name.

        It may have begun after the last barrier. Then either it is told that the checkpoint
        is over, or all others know it.
        """
        rng, world = self.rng, self.world
        if self.over < world.era or len(self.workers) < 2:
            return ""
        if len(self.workers) < WORKERS_MAX and rng.random() < 0.3:
            self.start_worker(f"v{len(self.incarnations)}")
        giver, taker = rng.choice([*self.workers.values()][:-1]), [*self.workers.values()][-1]
        others = [one for one in self.workers.values() if one is not taker]
        is_told = any(one.participant.ended < self.over for one in others) or rng.random() < 0.5
        is_first = rng.random() < 0.5
        if is_told and is_first:
            taker.act(taker.participant.end(self.over))
        known = giver.participant._leaves
        leaves = [
            leaf
            for leaf, one in known.items()
            if one.state is OWNED
            and one.is_closed
            and taker.participant.state_of(leaf) is NONE
            and world.opener[leaf] is giver
        ]
        groups = {leaf // self.subgroups for leaf in leaves}
        group = rng.choice(sorted(groups)) if groups else -1
        some = [leaf for leaf in leaves if leaf // self.subgroups == group]
        if len(some) < self.subgroups or not groups:
            return ""
        self.step("passes on", giver.name, (taker.name, some))
        self.givers.add(giver.name)
        leases = giver.participant.disown(some)
        taker.participant.own(some, taker.participant.barrier, leases=leases)
        for leaf in some:
            copy = taker.copies[leaf] = giver.copies.pop(leaf)
            world.opener[leaf] = None
            world.opened(taker, leaf, copy.content, copy.is_whole)
        if is_told and not is_first:
            taker.act(taker.participant.end(self.over))
        return taker.name

    def _order(self) -> None:
        rng, world = self.rng, self.world
        if rng.random() < 0.2:
            self._end_barrier(rng.choice((0.3, 1)))
            self._pass_on()
            return
        if rng.random() < 0.25:
            if world.era == world.abandoned or self._is_taken(world.era):
                self.step("checkpoint", "", world.era + 1)
                world.barrier(world.era + 1)
                # Nobody remembers its part of older checkpoints, so late leaves are not added.
                world.abandoned = max(world.abandoned, world.era - NUMBERS_MAX)
            return
        workers = [w for w in self.workers.values() if not w.is_paused]
        if len(workers) < 2:
            return
        source, target = rng.sample(workers, 2)
        participant = source.participant
        free = [
            leaf
            for leaf, known in participant._leaves.items()
            if known.state is OWNED and known.is_closed
        ]
        groups = sorted({leaf // self.subgroups for leaf in free})
        if self.faults.is_to_and_fro:
            groups = [group for group in groups if group == 0]
        self._ask(source, target, groups)

    def _ask(self, source: Worker, target: Worker, groups: list[int]) -> None:
        rng = self.rng
        if groups:
            some = rng.sample(groups, rng.randint(1, len(groups)))
            size = self.subgroups
            leaves = sorted(leaf for g in some for leaf in range(g * size, (g + 1) * size))
            self.migrations += 1
            migration = migration_id(target.name, self.migrations)
            self.step("asks", target.name, (source.name, leaves))
            target.act(target.participant.ask(migration, source.name, runs_of(leaves)))

    def _fault(self) -> None:
        super()._fault()
        if self.faults.crash and self.rng.random() < 0.3:
            self._crash_or_restart()

    def _is_taken(self, number: int) -> bool:
        return all(worker.participant.barrier >= number for worker in self.workers.values())

    def _storage(self) -> None:
        pass

    def _job(self) -> None:
        workers = [w for w in self.workers.values() if w.jobs and not w.is_paused]
        if workers:
            worker = self.rng.choice(workers)
            fails = self.rng.random() < self.faults.disk
            if fails:
                self.world.abandoned = self.world.era
            worker.finish(int(self.rng.random() * len(worker.jobs)), fails)

    def _crash_or_restart(self) -> None:
        rng = self.rng
        dead = [w for w, i in self.incarnations.items() if f"{w}.{i}" not in self.workers]
        if dead and rng.random() < 0.5:
            self.start_worker(rng.choice(dead))
            return
        for name in rng.sample(list(self.workers), len(self.workers)):
            if len(self.workers) > 1 and self._may_die(self.workers[name]):
                self._die(self.workers[name])
                return

    def _peer_of(self, worker: Worker, leaf: int) -> Worker | None:
        return self.workers.get(worker.participant._leaves[leaf].peer)

    def _may_die(self, worker: Worker) -> bool:
        """Whether nothing would be lost with it that then only a checkpoint has.

        Nor would anybody wait for its answer for ever: it may have nothing left, and still owe one.
        """
        if worker.name in self.givers:
            return False
        participant = worker.participant
        for leaf in participant.held():
            known = participant._leaves[leaf]
            if known.state is OWNED and known.is_closed:
                return False
            peer = self._peer_of(worker, leaf)
            needed = OWNED if known.state is OFFERED else OFFERED
            if (
                peer is None
                or peer.participant.state_of(leaf) is not needed
                or peer.participant.epoch_of(leaf) != known.epoch
            ):
                return False
        return True

    def _die(self, worker: Worker) -> None:
        world = self.world
        back = []
        for leaf in worker.participant.held():
            if worker.participant.state_of(leaf) is not OFFERED:
                source = self._peer_of(worker, leaf)
                assert source is not None
                back.append((leaf, source.copies[leaf].content))
        self.crash(worker.name)
        # Leaves that the dead put into its part of a checkpoint may be in another part, too.
        world.abandoned = world.era
        for leaf, content in back:
            world.roll_back(leaf, content)
        for other in self.workers.values():
            self.step("is told dead", other.name, worker.name)
            actions, lost = other.participant.declare_dead(worker.name)
            for leaf in lost:
                # The dead had taken the leaf back before and handed it to another; this worker does
                # not know that.
                found = (w.participant.epoch_of(leaf) for w in self.workers.values() if w != other)
                if max(found, default=-1) <= other.participant.epoch_of(leaf):
                    raise Violation(f"I1: leaf {leaf} is lost at {other.name} with {worker.name}")
            other.act(actions)

    def calm(self, is_boot: bool = False) -> None:
        """Everything comes to rest; and once more, when a late-comer hands over what it has."""
        world = self.world
        steps, number, is_late = 0, 0, False
        for _ in range(CALM_ROUNDS_MAX):
            busy = True
            while busy:
                steps += 1
                if steps > CALM_STEPS_MAX:
                    raise Violation("I9: there is no end to it")
                busy = self._calm_step()
            open_ones = [
                w.name
                for w in self.workers.values()
                if w.participant._outgoing or w.participant._incoming or w.participant._asks
            ]
            if not open_ones and not world.waiting:
                if not number:
                    if self._is_taken(world.era):
                        number = world.era + 1
                        world.barrier(number)
                elif self._is_taken(number) and not any(w.jobs for w in self.workers.values()):
                    if len(world.disk.get(number, {})) != world.leaves:
                        raise Violation(f"I5: checkpoint {number} lacks leaves")
                    if is_late:
                        return
                    is_late = True
                    self._end_barrier(self.rng.choice((0, 1)))
                    source = self.workers.get(self._pass_on())
                    target = self.rng.choice([*self.workers.values()])
                    if source is None or source is target:
                        return
                    held = {leaf // self.subgroups for leaf in source.participant.held()}
                    self._ask(source, target, sorted(held))
            for worker in list(self.workers.values()):
                self.tick(worker)
        raise Violation("I9: faults have stopped, and it does not settle")

    def check_end(self) -> None:
        world = self.world
        for leaf in range(world.leaves):
            worker = world.opener[leaf]
            if worker is None:
                raise Violation(f"I1: nobody has leaf {leaf}")
            copy = worker.copies[leaf]
            if not (copy.is_open and copy.is_whole):
                raise Violation(f"I1: leaf {leaf} is not whole")
            world.compare(worker, leaf, copy.content, True)
            if world.done[leaf] != world.emitted[leaf]:
                raise Violation(
                    f"I3: leaf {leaf} has {world.done[leaf]}, not {world.emitted[leaf]}"
                )
        for number in range(world.abandoned + 1, world.era + 1):
            if len(world.disk.get(number, {})) != world.leaves:
                raise Violation(f"I5: checkpoint {number} lacks leaves")

    def epilogue(self) -> None:
        pass
