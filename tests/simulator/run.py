"""Run: participants and coordinators on a virtual network, from one seed.

A run has two phases. In the first anything may fail, and nothing may be wrong (World checks each
step). In the second nothing fails any more, the dead stay dead or come back, and within a bounded
number of rounds everything must be in its place (I9).

There is no time: what happens next is drawn. A slow network and a paused process are the same thing
here: somebody's turn does not come. A worker's clock only says how often it repeats things.
"""

from typing import Any

from statekit.protocol.messages import Fetch, life_of

from .chief import Chief
from .faults import Faults
from .stage import Stage
from .worker import Worker
from .world import Violation

CALM_ROUNDS_MAX = 60  # until everything is in its place: I9
CALM_STEPS_MAX = 20_000
CLOCKS = (0.0, 0.1, 1.0, 4.0)  # a clock stands still, is slow, is right, jumps ahead


class Run(Stage):
    """One run, with coordinators."""

    # ---- The first phase

    def play(self) -> None:
        """Plays the whole run. Violation if anything is wrong."""
        rng = self.rng
        self.boot()
        self.faults = Faults(rng)
        random = rng.random
        # A leaf must come and go several times before a late message can be about an earlier lease.
        for _ in range(self.steps * (4 if self.faults.is_to_and_fro else 1)):
            self.faulty_step(random())
        self.heal()
        self.calm()
        self.check_end()
        self.epilogue()

    def boot(self) -> None:
        rng = self.rng
        self.start_chief()
        self.calm(is_boot=True)
        if rng.random() < 0.4:
            for leaf in range(0, self.world.leaves, 2):
                self.world.emit(leaf, 0)
            self.calm()  # begins from a complete checkpoint

    def faulty_step(self, draw: float) -> None:
        """Does what comes next, by the draw."""
        if draw < 0.42:
            if self.network:
                self._deliver_faulty()
            else:
                self._tick()
        elif self.faults.is_to_and_fro and draw < 0.52:
            self._order()
        elif draw < 0.60:
            self._record()
        elif draw < 0.67:
            self._job()
        elif draw < 0.74:
            worker = self.rng.choice(list(self.workers.values())) if self.workers else None
            if worker and not worker.is_paused and self.rng.random() < self.streaming:
                self.stream(worker, 1)
        elif draw < 0.82:
            self._storage()
        elif draw < 0.87:
            self._order()
        elif draw < 0.93:
            self._fault()
        else:
            self._tick()

    def _deliver_faulty(self) -> None:
        faults, random, network = self.faults, self.rng.random, self.network
        index = int(random() * len(network)) if random() < faults.disorder else 0
        if random() < faults.loss:
            self.lose(network.pop(index)[2])
            return
        entry = network[index]
        if self.blocked and (entry[1], entry[0]) in self.blocked:
            self.lose(network.pop(index)[2])
            return
        if faults.misled and type(entry[2]) is Fetch and random() < faults.misled * 10:
            to = self.rng.choice(list(self.workers) or [entry[0]])
            network.append((to, entry[1], entry[2]))
        if faults.stale:
            old = self.old_messages
            if old and random() < faults.stale:
                network.append(old[int(random() * len(old))])
                self.deliver(len(network) - 1)
                return
            if not faults.is_to_and_fro or hasattr(entry[2], "epoch"):
                old.append(entry)
        if random() < faults.duplicates:
            network.append(entry)
        self.deliver(index)

    def _record(self) -> None:
        world, random = self.world, self.rng.random
        leaf = int(random() * world.leaves)
        if world.waiting < 2 * world.leaves and random() < 0.5:
            world.emit(leaf, int(random() * world.keys))
        else:
            for _ in range(world.leaves):
                if world.pending[leaf]:
                    self.process_record(leaf)
                    return
                leaf = (leaf + 1) % world.leaves

    def _job(self) -> None:
        workers = [w for w in self.workers.values() if w.jobs and not w.is_paused]
        if workers:
            worker = self.rng.choice(workers)
            index = int(self.rng.random() * len(worker.jobs))
            worker.finish(index, self.rng.random() < self.faults.disk)

    def _storage(self) -> None:
        random = self.rng.random
        if self.writes and (not self.replies or random() < 0.5):
            index = int(random() * len(self.writes))
            write = self.writes[index]
            self.land(index, random() < self.faults.disk)
            if random() < self.faults.disk * 3:
                self.writes.append(write)  # carried out once more, much later
        elif self.replies:
            index = int(random() * len(self.replies))
            if random() < self.faults.disk * 2:
                self.replies.pop(index)
            elif not self.replies[index][0].is_paused:
                self.answer(index)

    def _order(self) -> None:
        """The user, or the engine, asks the coordinator for something."""
        chief = self.leader()
        if chief is None:
            if self.rng.random() < 0.1 and len(self.chiefs) < 3:
                self.start_chief()
            return
        coordinator = chief.coordinator
        if self.rng.random() < (0.1 if self.faults.is_to_and_fro else 0.5):
            self.step("checkpoint", chief.name, "")
            chief.act(coordinator.checkpoint())
        else:
            self._rescale(chief)

    def _rescale(self, chief: Chief) -> None:
        rng = self.rng
        workers = chief.coordinator.workers()
        if not workers:
            return
        leaves = self.world.leaves
        kind = rng.random()
        if self.faults.is_to_and_fro:
            stored = chief.coordinator.wanted
            owners = [life_of(name)[0] for name in stored.owners]
            owners[0] = workers[stored.version % len(workers)]
        elif kind < 0.4:
            owners = [rng.choice(workers) for _ in range(leaves)]
        elif kind < 0.8:
            some = rng.sample(workers, rng.randint(1, len(workers)))
            owners = [some[leaf * len(some) // leaves] for leaf in range(leaves)]
        else:
            owners = [life_of(name)[0] for name in chief.coordinator.wanted.owners]
            owners = [owner if owner in workers else workers[0] for owner in owners]
            if not owners:
                return
            owners[rng.randrange(leaves)] = rng.choice(workers)
        self.step("rescale", chief.name, owners)
        chief.act(chief.coordinator.rescale(owners))

    def _tick(self) -> None:
        rng = self.rng
        names = list(self.workers) + list(self.chiefs)
        process: Any = self.workers.get(name := rng.choice(names)) if names else None
        if process is not None:
            if not process.is_paused and rng.random() < process.clock:
                for _ in range(max(1, int(process.clock))):
                    self.tick(process)
        elif names:
            chief = self.chiefs[name]
            if not chief.is_paused:
                self.step("says again", name, "")
                chief.act(chief.coordinator.resend())

    def _fault(self) -> None:
        rng, faults = self.rng, self.faults
        scale = 16  # this is drawn in one of 16 steps
        random = rng.random
        if random() < faults.partition * scale:
            names = list(self.workers) + list(self.chiefs)
            if self.blocked and random() < 0.5:
                self.blocked.clear()
            elif len(names) > 1:
                one, other = rng.sample(names, 2)
                self.blocked[one, other] = None
                if random() < 0.5:
                    self.blocked[other, one] = None
                self.step("partition", one, other)
        if random() < faults.pause * scale:
            processes = [*self.workers.values(), *self.chiefs.values()]
            if processes:
                process = rng.choice(processes)
                process.is_paused = not process.is_paused
                self.step("pause", process.name, process.is_paused)
        if random() < faults.crash * scale:
            self._crash_or_restart()
        if random() < faults.chief * scale:
            if self.chiefs and random() < 0.6:
                self.crash(rng.choice(list(self.chiefs)))
            if len(self.chiefs) < 3:
                self.start_chief()
        if random() < faults.suspect * scale:
            chief = self.leader()
            if chief is not None and (workers := chief.coordinator.workers()):
                worker = rng.choice(workers)
                self.step("suspects", chief.name, worker)
                chief.act(chief.coordinator.suspect(worker))
        if faults.clock and self.workers and random() < faults.clock * scale:
            rng.choice(list(self.workers.values())).clock = rng.choice(CLOCKS)
        if random() < faults.whims * scale:
            self._whim()
        for worker in self.workers.values():
            if worker.participant.generation < self.world.generation:
                for leaf in worker.copies:
                    worker.ghost(leaf)

    def _crash_or_restart(self) -> None:
        rng = self.rng
        dead = [w for w, i in self.incarnations.items() if f"{w}.{i}" not in self.workers]
        if dead and rng.random() < 0.5:
            self.start_worker(rng.choice(dead))
        elif self.workers:
            name = rng.choice(list(self.workers))
            self.crash(name)
            if rng.random() < 0.5:
                self.start_worker(life_of(name)[0])

    def _whim(self) -> None:
        rng = self.rng
        workers = list(self.workers.values())
        if not workers:
            return
        worker = rng.choice(workers)
        participant = worker.participant
        kind = rng.random()
        if kind < 0.3:
            for migration in list(participant._incoming):
                self.step("gives back", worker.name, migration)
                worker.act(participant.give_back(migration))
        elif kind < 0.6:
            for migration in list(participant._outgoing):
                self.step("aborts", worker.name, migration)
                worker.act(participant.abort(migration)[0])
        elif kind < 0.8:
            for migration in list(participant._asks):
                self.step("does not want", worker.name, migration)
                self.unwanted.add(migration)
                worker.act(participant.unask(migration))
        else:
            for migration, incoming in list(participant._incoming.items()):
                if incoming.is_streaming:  # as its reader believes
                    self.step("stream ends", worker.name, migration)
                    worker.act(participant.stream_ended(migration, incoming.stream))

    # ---- The second phase

    def heal(self) -> None:
        """Faults stop. Some of the dead come back, enough of them to go on."""
        rng = self.rng
        self.step("faults stop", "", "")
        self.blocked.clear()
        self.is_calm = True
        for worker in self.workers.values():
            worker.is_paused = False
        for chief in self.chiefs.values():
            chief.is_paused = False
        for worker, incarnation in list(self.incarnations.items()):
            name = f"{worker}.{incarnation}"
            if name not in self.workers and (rng.random() < 0.5 or not self.workers):
                self.start_worker(worker)

    def epilogue(self) -> None:
        """Sometimes a worker that has nothing any more leaves; then nothing is to be restored."""
        if self.rng.random() > 0.1:
            return
        chief = self.leader()
        assert chief is not None
        workers = chief.coordinator.workers()
        if len(workers) < 2:
            return
        chief.act(chief.coordinator.rescale([workers[0]] * self.world.leaves))
        self.calm()
        generation = self.world.generation
        self.crash(f"{workers[1]}.{self.incarnations[workers[1]]}")
        self.calm()
        self.check_end()
        if self.world.generation != generation:
            raise Violation(f"{workers[1]} had nothing, and everything was restored")

    def calm(self, is_boot: bool = False) -> None:
        """Goes on without faults until everything is in its place."""
        steps = 0
        stage = 0  # boot: 0 first table, 1 settled. Else: 0 settle, 1 checkpoint under way
        number = 0
        for _ in range(CALM_ROUNDS_MAX):
            busy = True
            while busy:
                steps += 1
                if steps > CALM_STEPS_MAX:
                    raise Violation("I9: there is no end to it")
                busy = self._calm_step()
            chief = self.leader()
            if chief is None:
                if not any(c.coordinator._writing for c in self.chiefs.values()):
                    self.start_chief()
            else:
                self._detect(chief)
                coordinator = chief.coordinator
                if not coordinator.record.owners:
                    workers = coordinator.workers()
                    if len(workers) == len(self.workers):
                        used = workers[:-1] if self.spares and is_boot else workers
                        leaves = self.world.leaves
                        owners = [used[leaf * len(used) // leaves] for leaf in range(leaves)]
                        chief.act(coordinator.rescale(owners))
                        continue
                elif (
                    coordinator.is_settled
                    and coordinator.is_recovered
                    and not self.world.waiting
                    and not self._zombies()
                ):
                    if is_boot:
                        return
                    if not stage and not coordinator.taking:
                        number = coordinator.wanted.next_number
                        self.step("checkpoint", chief.name, number)
                        chief.act(coordinator.checkpoint())
                        stage = 1
                        continue
                    if stage and coordinator.record.complete >= number:
                        return
                    if not coordinator.taking:
                        stage = 0
            for worker in list(self.workers.values()):
                self.tick(worker)
            for chief in list(self.chiefs.values()):
                chief.act(chief.coordinator.resend())
        raise Violation("I9: faults have stopped, and it does not settle")

    def _calm_step(self) -> bool:
        if self.network:
            for _ in range(len(self.network)):
                self.deliver(0)
            return True
        if self.writes:
            self.land(0)
            return True
        if self.replies:
            self.answer(0)
            return True
        for worker in list(self.workers.values()):
            if worker.jobs:
                self.finish_job(worker)
                return True
            if worker.participant._outgoing and self.stream(worker, 100):
                return True
        world = self.world
        if world.waiting:
            before = world.waiting
            for leaf in range(world.leaves):
                while (waiting := world.waiting) and world.pending[leaf]:
                    self.process_record(leaf)
                    if world.waiting == waiting:
                        break
            return world.waiting < before
        return False

    def _zombies(self) -> bool:
        """Whether somebody still works in an old generation."""
        return any(
            worker.copies and worker.participant.generation != self.world.generation
            for worker in self.workers.values()
        )

    def finish_job(self, worker: Worker) -> None:
        worker.finish(0, False)

    def _detect(self, chief: Chief) -> None:
        """The coordinator learns which workers are dead."""
        for worker in chief.coordinator.workers():
            name = f"{worker}.{chief.coordinator._seen[worker]}"
            if name not in self.workers:
                self.step("suspects", chief.name, worker)
                chief.act(chief.coordinator.suspect(worker))

    def check_end(self) -> None:
        world = self.world
        stored = world.stored
        assert stored is not None
        if world.acknowledged != stored.complete:
            raise Violation(f"I9: nobody was told that checkpoint {stored.complete} is complete")
        for leaf in range(world.leaves):
            worker = world.opener[leaf]
            if worker is None or worker.name != stored.owners[leaf]:
                raise Violation(f"I9: leaf {leaf} is not at {stored.owners[leaf]}")
            copy = worker.copies[leaf]
            if not (copy.is_open and copy.is_whole):
                raise Violation(f"I1: leaf {leaf} is not whole")
            world.compare(worker, leaf, copy.content, True)
            if world.done[leaf] != world.emitted[leaf]:
                raise Violation(
                    f"I3: leaf {leaf} has {world.done[leaf]}, not {world.emitted[leaf]}"
                )
