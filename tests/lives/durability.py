"""Steps about homes: opening, closing, flushing, committing, rolling back, and killing processes.

What must be there after a kill:

    memory                    nothing
    a home that has commits   the last commit, exactly; or the one that was going on
    any other home            of each entry the version of the last flush, or a later one
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .forms import FORMS, MISSING, canon
from .host import Host, HostError
from .model import Cut, HomeModel, Kv, World, copied, differences

if TYPE_CHECKING:
    from .life import Life, Options

MEMORY = ("100KB", "300KB", "2MiB", "64MiB")
SMALL = ("100KB", "300KB")


class DurabilitySteps:
    """Of a Life."""

    rng: random.Random
    world: World
    options: "Options"
    directory: Path
    hosts: dict[int, Host]
    kinds: list[str]
    has_commit: bool

    # ---- Opening

    def has_commits(self: "Life", home: HomeModel) -> bool:
        return self.has_commit and home.kind == "rocksdb"

    def open_lost(self: "Life") -> None:
        """Providers for all key-groups that nobody has, with nothing in them."""
        groups = sorted(self.world.lost())
        self.rng.shuffle(groups)
        while groups:
            count = self.rng.choice((1, len(groups) // 2 or 1, len(groups), len(groups)))
            part, groups = groups[:count], groups[count:]
            self.open_new(part)

    def open_new(self: "Life", groups: Iterable[int]) -> Kv:
        """A provider of key-groups that are lost, in a home that is new."""
        groups = [*groups]
        for group in groups:
            self.world.content[group] = {}
        kind = self.rng.choice(self.kinds)
        if kind == "memory":
            return self.open_provider(None, groups)
        return self.open_provider(self.new_home(kind), groups)

    def new_home(self: "Life", kind: str) -> HomeModel:
        name = self.name("home")
        if kind == "redis":
            home = HomeModel(name, kind, f"{self.options.redis}?prefix={self.seed}-{name}&")
        else:
            home = HomeModel(name, kind, f"{kind}:{self.directory}/{name}?")
        self.world.homes.append(home)
        return home

    def open_provider(
        self: "Life", home: HomeModel | None, groups: Iterable[int], evolve: bool = True
    ) -> Kv:
        """Opens a home, or memory, with key-groups whose content the model has."""
        world, rng = self.world, self.rng
        stored = {} if home is None else home.stored
        kv = Kv(self.name("kv"), rng.choice([*self.hosts]), home, set(), stored)
        kv.family = self._counter
        if home is None:
            kv.stored = {}
        names = [*world.specs]
        if evolve:
            names = rng.sample(names, rng.choice((1, len(names), len(names))))
        versions = self.versions(kv, names, evolve)
        settings = {
            "key_groups": world.groups,
            "subgroups": world.subgroups,
            "owned": sorted(groups),
        }
        if home is not None and home.base and rng.random() < 0.5:
            del settings["key_groups"], settings["subgroups"]  # the home knows
        url, kv.is_small = self.url_of(home)
        self.say(f"{kv}: open {url} {sorted(groups)}, declares {versions}")
        declared = [(world.specs[name], version) for name, version in versions.items()]
        found = self.call(kv, "open", url, settings, self.times, declared, rng.random() < 0.5)
        assert set(found) == set(settings["owned"]), found
        world.kvs.append(kv)
        kv.owned.update(settings["owned"])
        self.declared(kv, versions)
        if home is not None:
            for group in kv.owned - set(home.base):
                home.settle(group, world.content[group])
            for place in world.places:
                if place.owner not in world.kvs and place.line == home.name:
                    place.owner = kv
        return kv

    def url_of(self: "Life", home: HomeModel | None) -> tuple[str, bool]:
        if home is None:
            return "memory:", False
        memory = self.rng.choice(MEMORY)
        url = f"{home.url}memory={memory}"
        if home.kind == "rocksdb":
            url += f"&sync={int(self.rng.random() < 0.1)}"
        return url, memory in SMALL

    # ---- Closing

    def close(self: "Life", kv: Kv) -> None:
        """What is in memory is lost, what is in a home is at rest there."""
        self.say(f"{kv}: close")
        self.call(kv, "close")
        self.world.settle(kv)
        self.gone(kv)

    def gone(self: "Life", kv: Kv) -> None:
        world = self.world
        world.kvs.remove(kv)
        if kv.home is None:
            for group in kv.owned:
                del world.content[group]
        for place in world.places:
            if place.owner is kv:
                place.line = kv.pid if kv.home is None else kv.home.name

    def close_all(self: "Life") -> None:
        for kv in self.rng.sample(self.world.kvs, len(self.world.kvs)):
            self.close(kv)

    def step_close(self: "Life") -> None:
        able = [kv for kv in self.world.kvs if kv.home is not None or self.rng.random() < 0.2]
        if able:
            kv = self.rng.choice(able)
            self.finish_moves(kv)
            self.close(kv)

    def step_reopen(self: "Life") -> None:
        """Closes a home and opens it anew, with other options."""
        world, rng = self.world, self.rng
        homes = [home for home in world.homes if home.base and world.users_of(home)]
        if not homes:
            return
        home = rng.choice(homes)
        for kv in world.users_of(home):
            self.finish_moves(kv)
        users = world.users_of(home)
        for kv in rng.sample(users, len(users)):
            self.close(kv)
        self.open_at_rest(home)

    def open_at_rest(self: "Life", home: HomeModel) -> None:
        """Opens a home with some of the key-groups that it has."""
        rng = self.rng
        if home.is_torn:
            self.open_torn(home)
            return
        groups = sorted(self.world.at_rest(home))
        count = rng.choice((len(groups), len(groups), rng.randrange(1, len(groups) + 1)))
        kv = self.open_provider(home, rng.sample(groups, count))
        if rng.random() < 0.5:
            self.check(kv)
        if self.has_commits(home) and len(groups) == count and home.metadata is not MISSING:
            self.expect_metadata(kv, home.metadata)

    # ---- Flushing and committing

    def step_flush(self: "Life") -> None:
        if self.world.kvs:
            kv = self.rng.choice(self.world.kvs)
            self.say(f"{kv}: flush")
            self.call(kv, "call", "flush")
            self.world.settle(kv)
            self.check_clean(kv)

    def check_clean(self: "Life", kv: Kv) -> None:
        """Nothing is left to be written home."""
        if kv.home is not None:
            found = self.call(kv, "metrics")["states"]
            if dirty := {name: one["dirty"] for name, one in found.items() if one["dirty"]}:
                raise AssertionError(f"{kv}: dirty after a flush: {dirty}")

    def step_commit(self: "Life") -> None:
        if not self.world.kvs or not self.has_commit:
            return
        kv, rng = self.rng.choice(self.world.kvs), self.rng
        metadata = rng.choice((None, {"offset": rng.randrange(100)}))
        self.say(f"{kv}: commit {metadata}")
        if kv.home is None or not self.has_commits(kv.home):
            self._refuse_commit(kv, metadata)
            return
        self.call(kv, "call", "commit", *([] if metadata is None else [metadata]))
        self.world.settle(kv)
        if metadata is not None:
            is_alone = self.world.users_of(kv.home) == [kv]
            kv.home.metadata = metadata if is_alone else MISSING
            self.expect_metadata(kv, metadata)
        self.check_clean(kv)

    def _refuse_commit(self: "Life", kv: Kv, metadata: Any) -> None:
        if kv.home is not None:
            return  # of another kind: it may be able to
        for call in (("commit",), ("commit", metadata), ("rollback",)):
            try:
                self.call(kv, "call", *call)
            except HostError:
                continue
            raise AssertionError(f"{kv}: {call} of memory was accepted")

    def expect_metadata(self: "Life", kv: Kv, metadata: Any) -> None:
        found = self.call(kv, "committed")
        if found != metadata:
            raise AssertionError(f"{kv}: committed is {found}, should be {metadata}")

    def step_rollback(self: "Life") -> None:
        able = [kv for kv in self.world.kvs if kv.home is not None and self.has_commits(kv.home)]
        if able:
            kv = self.rng.choice(able)
            self.say(f"{kv}: rollback")
            self.call(kv, "call", "rollback")
            self.rolled_back(kv)
            self.check(kv)

    def rolled_back(self: "Life", kv: Kv) -> None:
        assert kv.home is not None
        for group in kv.owned:
            self.world.content[group] = copied(kv.home.base[group])
        self.world.upgrade(kv, kv.owned)

    # ---- Threads and kills

    def step_beside(self: "Life") -> None:
        """A flush or commit while another thread writes."""
        world, rng = self.world, self.rng
        able = [kv for kv in world.kvs if kv.home is not None and kv.owned and kv.declared]
        if not able:
            return
        kv = rng.choice(able)
        assert kv.home is not None
        cuts = []
        ops = []
        before = {**kv.home.base}
        for _ in range(rng.choice((5, 20))):
            ops += self.make_ops(kv, 1)
            cuts.append(world.cut(kv))
        if not ops:
            return
        commits = self.has_commits(kv.home)
        method = "commit" if commits and rng.random() < 0.7 else "flush"
        self.say(f"{kv}: {method} beside {len(ops)} operations")
        _, results = self.call(kv, "beside", [op for op, _ in ops], ("call", kv.pid, method))
        self.expect_ops(kv, ops, results)
        if not commits:
            return  # what may be there after a kill is what was there at any time
        then = rng.choice(("rollback", "kill", "commit"))
        if then == "commit":
            self.call(kv, "call", "commit")
            world.settle(kv)
            return
        kv.home.alternatives = [{**before, **cut} for cut in cuts]
        if then == "kill":
            self.kill(kv.host)
            return
        self.say(f"{kv}: rollback")
        self.call(kv, "call", "rollback")
        self.resolve(kv)

    def step_doomed(self: "Life") -> None:
        """Kills a process in the middle of something, at any line of it."""
        world, rng = self.world, self.rng
        able = [kv for kv in world.kvs if kv.home is not None and self.may_kill(kv.host)]
        if not able:
            return
        kv = rng.choice(able)
        home = kv.home
        assert home is not None
        lines = int(10 ** rng.uniform(0, 4))
        what = rng.choice(("commit", "flush", "close", "ops", "sweep"))
        if what == "commit" and not self.has_commits(home):
            what = "flush"
        self.say(f"{kv}: {what}, killed after {lines} lines")
        before, after = {**home.base}, world.cut(kv)
        if what == "ops":
            ops = self.make_ops(kv, 30) if kv.owned and kv.declared else []
            is_done, results = self.on(kv).call_doomed(lines, "ops", kv.pid, [op for op, _ in ops])
            if is_done:
                self.expect_ops(kv, ops, results)
        else:
            command = ("close", kv.pid) if what == "close" else ("call", kv.pid, what)
            is_done, _ = self.on(kv).call_doomed(lines, *command)
            if what != "sweep":
                home.alternatives = [{**before, **after}] + ([] if is_done else [before])
        self.kill(kv.host)

    def may_kill(self: "Life", host: int) -> bool:
        """Whether the model knows what must be there then."""
        world = self.world
        for kv in world.kvs:
            if kv.host == host and kv.home is not None and world.moves_of(kv):
                if self.knows("1.3", "1.4") or not self.has_commits(kv.home):
                    return False
        return True

    def step_kill(self: "Life") -> None:
        host = self.rng.choice([*self.hosts])
        if self.may_kill(host):
            self.kill(host)

    def kill(self: "Life", number: int) -> None:
        """kill -9 of a process with all its providers."""
        world = self.world
        dead = [kv for kv in world.kvs if kv.host == number]
        self.say(f"host {number} is killed, with {dead}")
        self.hosts[number].kill()
        moves = [move for move in world.moves if {move.source.host, move.target.host} & {number}]
        for kv in dead:
            self.gone(kv)
            if kv.home is not None:
                self.torn(kv.home)
        self.bereave(moves, number)
        self.start_host(number)
        for home in [*world.homes]:
            if home.is_torn and not world.users_of(home):
                if self.rng.random() < 0.8:
                    self.open_torn(home)

    def torn(self: "Life", home: HomeModel) -> None:
        """A process was killed that had it open."""
        home.is_torn = True
        if not home.alternatives and self.has_commits(home):
            home.alternatives = [home.base]

    def open_torn(self: "Life", home: HomeModel) -> None:
        """Opens a home after a kill, and finds out what is there."""
        world = self.world
        groups = sorted(world.at_rest(home))
        if not groups:
            home.is_torn = False
            home.alternatives = []
            return
        for group in groups:
            world.content[group] = copied(home.base[group])
        kv = self.open_provider(home, groups, evolve=False)
        if self.has_commits(home):
            self.resolve(kv)
        else:
            self.adopt(kv)

    def resolve(self: "Life", kv: Kv) -> None:
        """One of several cuts is there, all of it."""
        world = self.world
        assert kv.home is not None
        cuts, kv.home.alternatives, kv.home.is_torn = kv.home.alternatives, [], False
        dump = self.call(kv, "dump")
        wrong: list[list[str]] = []
        for cut in cuts:
            upgraded = world.upgraded({group: cut[group] for group in kv.owned}, kv.stored)
            wrong.append(self.compare(kv, dump, upgraded, kv.owned))
            if not wrong[-1]:
                for group in kv.owned:
                    kv.home.settle(group, upgraded[group])
                    world.content[group] = copied(upgraded[group])
                return
        told = "\n    ".join(min(wrong, key=len))
        raise AssertionError(f"{kv} is none of {len(cuts)} that it may be. The nearest:\n    {told}")

    def adopt(self: "Life", kv: Kv) -> None:
        """A home without commits: of each entry any version since the last flush is there."""
        world = self.world
        home = kv.home
        assert home is not None
        home.is_torn, home.alternatives = False, []
        dump = self.call(kv, "dump")
        unclear: list[tuple[str, Any]] = []
        for name, (items, _, _) in dump.items():
            spec = world.specs[name]
            found = {key: value for key, value in items}
            shown = FORMS[spec.form].shown
            for group in kv.owned:
                held = world.content[group].get(name)
                known = {} if held is None else held.entries
                past = home.history.get(group, {})
                keys = {*known, *(key for state, key in past if state == name)}
                keys |= {key for key in found if world.group_of(spec.key, key) == group}
                for key in keys:
                    versions = [known.get(key), *past.get((name, key), ())]
                    there = canon(found.get(key, MISSING))
                    fits = [
                        one
                        for one in versions
                        if there == canon(MISSING if not one or not world.is_alive(spec, one[1])
                                          else shown(one[0]))
                    ]
                    if not fits:
                        seen = {canon(one and one[0]) for one in versions}
                        raise AssertionError(
                            f"{kv}: after a kill {name} has {key!r}: {found.get(key, MISSING)!r}; "
                            f"since the last flush it was {seen}"
                        )
                    entries = world.content[group].setdefault(name, _nothing(kv, name)).entries
                    if fits[-1] is None:
                        entries.pop(key, None)
                    else:
                        entries[key] = fits[-1]
                    if len({canon(one and [*one]) for one in fits}) > 1 and key in found:
                        unclear.append((name, key))  # whose stamp nobody knows
        for group in kv.owned:
            home.history.pop(group, None)
        ops = [(name, ("discard", key)) for name, key in unclear]
        self.call(kv, "ops", ops)
        for name, op in ops:
            self.do_model(kv, world.specs[name], op)
        self.say(f"{kv}: adopted; {len(ops)} are unclear and dropped")
        self.call(kv, "call", "flush")
        world.settle(kv)
        self.check(kv)


def _nothing(kv: Kv, name: str) -> Any:
    from .model import Held

    return Held(kv.stored.get(name, 0), {})


__all__ = ["Cut", "DurabilitySteps", "differences"]
