"""A life: random steps on several providers in several processes, compared with the model.

The driver, which is this process, has the model and chooses the steps; hosts have the providers.
So whatever happens to a host, the model knows what must be there afterwards.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from .durability import DurabilitySteps
from .forms import ERRORS, FORMS, Dice, Op, Spec, canon, is_one_step
from .host import Host, HostError
from .lock_order import Edges, circles
from .model import Cut, Kv, Scope, World, differences
from .moves import MoveSteps
from .points import PointSteps

TRACE_STEPS = 120  # that are told after a failure


class Wrong(AssertionError):
    """What is there is not what must be there."""


class Options:
    """What a life may do."""

    def __init__(self, known: Iterable[str], redis: str = "", is_told: bool = False) -> None:
        self.known = frozenset(known)  # findings that are not fixed, and are avoided
        self.redis = redis  # the URL of a server, or ""
        self.is_told = is_told  # print every step
        self.lock_edges: Edges = {}  # of all lives so far


class Life(DurabilitySteps, PointSteps, MoveSteps):
    """See the module."""

    def __init__(self, seed: int, options: Options) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.options = options
        self.trace: list[str] = []
        self.steps_done = 0
        self.directory = Path(tempfile.mkdtemp(prefix="lives-", dir=_fast_directory()))
        self.hosts: dict[int, Host] = {}
        self.world = World(self.rng)
        self._counter = 0
        self.kinds = self._home_kinds()

    def _home_kinds(self) -> list[str]:
        kinds = ["memory", "memory", "rocksdb", "rocksdb", "sqlite"]
        if self.options.redis:
            kinds.append("redis")
        # Lives with few kinds see longer stories of each.
        return self.rng.sample(kinds, self.rng.choice((1, 2, len(kinds))))

    def knows(self, *names: str) -> bool:
        """Whether one of these findings is not fixed."""
        return any(name in self.options.known for name in names)

    def name(self, prefix: str) -> str:
        self._counter += 1
        return f"{prefix}{self._counter}"

    def say(self, text: str) -> None:
        self.trace.append(f"{self.steps_done:4d}  {text}")
        del self.trace[:-400]
        if self.options.is_told:
            print(self.trace[-1], flush=True)

    # ---- From birth to death

    def play(self, steps: int | None = None, steps_max: int | None = None) -> None:
        """Plays `steps` steps, or as many as the seed says, but steps_max at most."""
        rng, world = self.rng, self.world
        chosen = rng.choice((50, 100, 100, 200, 500))
        steps = chosen if steps is None else steps
        if steps_max is not None:
            steps = min(steps, steps_max)
        try:
            for number in range(rng.choice((1, 1, 2))):
                self.start_host(number)
            self.say(
                f"{world.groups} x {world.subgroups}, kinds {self.kinds}, "
                f"states {', '.join(map(_show_spec, world.specs.values()))}"
            )
            self.open_lost()
            while self.steps_done < steps:
                self.steps_done += 1
                self.step()
            self.finish_moves()
            for kv in [*world.kvs]:
                self.check(kv)
            self.close_all()
            self.check_locks()
        finally:
            self.end()

    def check_locks(self) -> None:
        """Locks are taken in one order, in this life and all before it: then nothing can hang."""
        edges = self.options.lock_edges
        for host in self.hosts.values():
            edges |= host.call("lock_edges")
        if found := circles(edges):
            edges.clear()  # the next life is not to blame
            raise Wrong("locks are taken in a circle:\n" + "\n".join(found))

    def end(self) -> None:
        for host in self.hosts.values():
            host.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def step(self) -> None:
        rng, world = self.rng, self.world
        world.note_shared()
        if not world.kvs or (world.lost() and rng.random() < 0.2):
            self.step_recover()
        choice = rng.random()
        if choice < 0.55:
            self.step_ops()
        elif choice < 0.61:
            self.step_time()
        elif choice < 0.66:
            self.check(rng.choice(world.kvs))
        else:
            steps = [*self.structural_steps()]
            names, weights = zip(*steps, strict=True)
            (name,) = rng.choices(names, weights)
            getattr(self, "step_" + name)()
        if rng.random() < 0.3 and world.kvs:
            self.check_owned()

    def structural_steps(self) -> Iterable[tuple[str, float]]:
        yield from (("declare", 2), ("sweep", 1), ("foreign", 2), ("recover", 2), ("absent", 1))
        yield from (("flush", 2), ("reopen", 3), ("kill", 1.5), ("close", 0.7), ("commit", 6))
        yield from (("rollback", 4), ("beside", 2), ("doomed", 2))
        yield from (("split", 3), ("merge", 4), ("begin_move", 5), ("finish_move", 4))
        yield from (("copy_ahead", 2.5), ("take_over", 4))
        yield from (("undo_move", 2.5), ("torn_move", 2.5), ("barrier", 2))
        yield from (("checkpoint", 5), ("parts", 3), ("look_back", 4), ("collect", 2))
        yield ("restart", 1.5)

    # ---- Hosts

    def start_host(self, number: int) -> None:
        self.hosts[number] = Host(number, self.directory / f"host-{number}.log")

    def on(self, kv: Kv) -> Host:
        return self.hosts[kv.host]

    def call(self, kv: Kv, command: str, *args: Any) -> Any:
        return self.on(kv).call(command, kv.pid, *args)

    def refused(self, kinds: tuple[str, ...], call: Callable[[], Any]) -> bool:
        """Whether a call was refused with one of these errors."""
        try:
            call()
        except HostError as error:
            if error.kind not in kinds:
                raise
            return True
        return False

    @property
    def times(self) -> tuple[int, int]:
        return self.world.now, self.world.watermark

    # ---- Operations

    def step_ops(self) -> None:
        able = [kv for kv in self.world.kvs if kv.declared and kv.owned]
        if not able:
            return
        kv = self.rng.choice(able)
        ops = self.make_ops(kv, self.rng.choice((1, 2, 5, 12)))
        self.say(f"{kv}: {_show_ops(ops)}")
        self.expect_ops(kv, ops, self.call(kv, "ops", [op for op, _ in ops]))

    def make_ops(self, kv: Kv, count: int) -> list[tuple[tuple[str, Op], Any]]:
        """Random operations, done to the model, with what they must give."""
        made = []
        for _ in range(count):
            spec = self.world.specs[self.rng.choice(sorted(kv.declared))]
            op = self._random_op(kv, spec)
            if op is not None:
                made.append(((spec.name, op), self.do_model(kv, spec, op)))
        return made

    def make_steps(self, kv: Kv, count: int) -> tuple[list[tuple[tuple[str, Op], Any]], list[Cut]]:
        """The same with atomic operations; and what is there before, between and after them."""
        made: list[tuple[tuple[str, Op], Any]] = []
        cuts = [self.world.cut(kv)]
        for _ in range(count):
            spec = self.world.specs[self.rng.choice(sorted(kv.declared))]
            op = self._random_op(kv, spec)
            if op is not None and is_one_step(op):
                made.append(((spec.name, op), self.do_model(kv, spec, op)))
                cuts.append(self.world.cut(kv))
        return made, cuts

    def _random_op(self, kv: Kv, spec: Spec) -> Op | None:
        world, rng = self.world, self.rng
        keys = [k for k in world.keys[spec.key] if world.group_of(spec.key, k) in kv.owned]
        if not keys:
            return None
        if len(keys) > 8 and rng.random() < 0.5:
            keys = keys[:8]  # some are used more than others
        dice = Dice(
            rng,
            lambda: rng.choice(keys),
            Scope(world, kv, spec).get,
            kv.declared[spec.name],
            spec.ttl is not None,
        )
        return FORMS[spec.form].random_op(dice)

    def do_model(self, kv: Kv, spec: Spec, op: Op) -> Any:
        scope = Scope(self.world, kv, spec)
        try:
            result = FORMS[spec.form].model(scope, op, kv.declared[spec.name])
        except ERRORS as error:
            return ("raised", type(error).__name__)
        return ("ok", canon(result))

    def expect_ops(self, kv: Kv, ops: list[tuple[tuple[str, Op], Any]], results: Any) -> None:
        for ((name, op), expected), result in zip(ops, results, strict=True):
            found = ("ok", canon(result[1])) if result[0] == "ok" else result[:2]
            if found != expected:
                raise Wrong(f"{kv}: {name}: {op} gave {result}, should be {expected}")

    def step_foreign(self) -> None:
        """A key of somebody else is refused, and nothing changes."""
        world, rng = self.world, self.rng
        pairs = [(kv, name) for kv in world.kvs for name in sorted(kv.declared)]
        if not pairs:
            return
        kv, name = rng.choice(pairs)
        spec = world.specs[name]
        keys = [k for k in world.keys[spec.key] if world.group_of(spec.key, k) not in kv.owned]
        if not keys:
            return
        key = rng.choice(keys)
        op = rng.choice((("contains", key), ("discard", key)))
        self.say(f"{kv}: {name}: {op}, which is not its own")
        ((*found,),) = self.call(kv, "ops", [(name, op)])
        if found[:2] != ["raised", "NotOwnedError"]:
            raise Wrong(f"{kv} has {sorted(kv.owned)}, and {name}: {op} gave {found}")

    def step_declare(self) -> None:
        able = [kv for kv in self.world.kvs if len(kv.declared) < len(self.world.specs)]
        if able:
            kv = self.rng.choice(able)
            missing = [name for name in self.world.specs if name not in kv.declared]
            self.declare(kv, self.rng.sample(missing, self.rng.randrange(1, len(missing) + 1)))

    def versions(self, kv: Kv, names: Iterable[str], evolve: bool) -> dict[str, int]:
        """The versions with which states are declared."""
        found = {}
        relatives = [one for one in self.world.kvs if one.family == kv.family and one is not kv]
        if kv.home is not None:
            relatives += [one for one in self.world.users_of(kv.home) if one is not kv]
        for name in names:
            version = kv.stored.get(name, 0)
            last = FORMS[self.world.specs[name].form].versions - 1
            if not relatives and evolve and version < last and self.rng.random() < 0.2:
                version += 1
            found[name] = version
        return found

    def declare(self, kv: Kv, names: Iterable[str], evolve: bool = True) -> None:
        versions = self.versions(kv, names, evolve)
        self.say(f"{kv}: declares {versions}")
        self.call(kv, "declare", [(self.world.specs[n], v) for n, v in versions.items()])
        self.declared(kv, versions)

    def declared(self, kv: Kv, versions: dict[str, int]) -> None:
        kv.declared |= versions
        kv.stored |= versions
        self.world.upgrade(kv, kv.owned)

    def step_time(self) -> None:
        world, rng = self.world, self.rng
        if rng.random() < 0.5:
            world.now += rng.choice((1, 7, 30, 400))
        else:
            world.watermark += rng.choice((1, 7, 30, 400))
        self.say(f"time is {world.now - 4 * 10**12}, watermark {world.watermark}")
        for host in self.hosts.values():
            host.call("times", *self.times)

    def step_sweep(self) -> None:
        if self.world.kvs:
            kv = self.rng.choice(self.world.kvs)
            self.say(f"{kv}: sweep")
            self.call(kv, "call", "sweep")

    def step_absent(self) -> None:
        able = [kv for kv in self.world.kvs if kv.owned]
        if able:
            kv, rng = self.rng.choice(able), self.rng
            keys = [k for k in self.world.keys["str"] if self.world.group_of("str", k) in kv.owned]
            prefetch = rng.random() < 0.5
            self.say(f"{kv}: {'prefetch' if prefetch else 'absent'} {len(keys)} keys")
            left = self.call(kv, "absent", keys[:10], prefetch)
            if prefetch and left:
                raise Wrong(f"{kv}: {left} keys are absent after they were fetched")

    # ---- Comparing

    def check_owned(self) -> None:
        """Each provider has what the model says. (So no key-group is owned twice.)"""
        for kv in self.world.kvs:
            found = self.call(kv, "owned")
            if set(found) != kv.owned or len(found) != len(kv.owned):
                raise Wrong(f"{kv} owns {found}, should own {sorted(kv.owned)}")

    def check(self, kv: Kv) -> None:
        """Everything of a provider is as in the model."""
        self.say(f"{kv}: check")
        self.check_owned()
        wrong = self.compare(kv, self.call(kv, "dump"), self.world.content, kv.owned)
        if wrong:
            raise Wrong(f"{kv}: " + "\n    ".join(wrong))
        # Others of the same home may have declared some since.
        shares = kv.is_sibling or (kv.home is not None and kv.home.kind == "redis")
        known = kv.declared if shares else kv.stored
        if missing := set(known) - set(self.call(kv, "schemas")):
            raise Wrong(f"{kv} has forgotten the states {missing}")
        self.check_metrics(kv)

    def fitting(self, kv: Kv, cuts: list[Cut], groups: Iterable[int]) -> list[Cut]:
        """Those of several cuts that are what is there: one at least, each as a whole."""
        dump = self.call(kv, "dump")
        wrong = [self.compare(kv, dump, cut, groups) for cut in cuts]
        if fitting := [cut for cut, one in zip(cuts, wrong, strict=True) if not one]:
            return fitting
        told = "\n    ".join(min(wrong, key=len))
        raise Wrong(f"{kv} is none of {len(cuts)} that it may be, but:\n    {told}")

    def drop_doubtful(self, kv: Kv, cuts: list[Cut]) -> None:
        """Removes entries that cuts, which look alike, have with different stamps.

        An operation that refreshed an entry was the only difference. So the model, which has taken
        the first of the cuts, cannot know when the entry expires.
        """
        doubtful = set()
        for group in kv.owned:
            for name in kv.declared if len(cuts) > 1 else ():
                entries = [cut[group][name].entries if name in cut[group] else {} for cut in cuts]
                for key in set().union(*entries):
                    if len({held.get(key, (None, None))[1] for held in entries}) > 1:
                        doubtful.add((name, key))
        if not doubtful:
            return
        ops: list[tuple[tuple[str, Op], Any]] = []
        for name, key in sorted(doubtful, key=repr):
            op = ("discard", key)
            ops.append(((name, op), self.do_model(kv, self.world.specs[name], op)))
        self.say(f"{kv}: {_show_ops(ops)}, which may expire sooner or later")
        self.expect_ops(kv, ops, self.call(kv, "ops", [op for op, _ in ops]))
        self.call(kv, "call", "flush")
        self.world.settle(kv)

    def compare(self, kv: Kv, dump: dict[str, Any], cut: Cut, groups: Iterable[int]) -> list[str]:
        wrong = []
        groups = [*groups]
        for name, (items, length, keys) in dump.items():
            spec = self.world.specs[name]
            shown = FORMS[spec.form].shown
            alive = self.world.alive(spec, cut, groups)
            expected = {key: shown(value) for key, value in alive.items()}
            found = dict(items)
            wrong += [f"{name}: {one}" for one in differences(expected, found)]
            if length != len(expected) or len(items) != length or set(keys) != set(found):
                wrong.append(
                    f"{name}: len is {length}, {len(items)} items, {len(keys)} keys; "
                    f"should be {len(expected)}"
                )
        return wrong

    def check_metrics(self, kv: Kv) -> None:
        if not self.world.moves_of(kv):
            self.call(kv, "let_go")  # entries that were handed over count while they are in memory
        found = self.call(kv, "metrics")
        leaves = sum(found["leaves"].values())
        if leaves != self.world.groups * self.world.subgroups:
            raise Wrong(f"{kv}: metrics count {leaves} leaves: {found['leaves']}")
        for name, figures in found["states"].items():
            numbers = [figures[one] for one in ("entries", "bytes", "dirty", "fetches", "spills")]
            if min(numbers) < 0 or figures["hits"] > figures["operations"]:
                raise Wrong(f"{kv}: metrics of {name}: {figures}")
            spec = self.world.specs[name]
            is_moving = self.world.moves_of(kv) or self.world.has_entries_of_others(kv)
            if kv.home is None and spec.ttl is None and not is_moving:
                count = len(self.world.alive(spec, self.world.content, kv.owned))
                if figures["entries"] != count and not self.call(kv, "loading"):
                    raise Wrong(f"{kv}: metrics of {name} count {figures['entries']}, not {count}")

    # ---- Failing

    def report(self, error: BaseException) -> str:
        lines = self.trace[-TRACE_STEPS:]
        return "\n".join([*lines, f"{type(error).__name__}: {error}"])


def _fast_directory() -> str | None:
    """A directory in memory, if there is one: what was written survives a kill there, too."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else None


def _show_spec(spec: Spec) -> str:
    return spec.name if spec.ttl is None else f"{spec.name} {tuple(spec.ttl)}"


def _show_ops(ops: list[tuple[tuple[str, Op], Any]]) -> str:
    shown = [f"{name}: {op}" for (name, op), _ in ops]
    return "; ".join(one if len(one) < 100 else f"{one[:95]}…" for one in shown)
