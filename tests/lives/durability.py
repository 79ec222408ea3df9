"""Steps about homes: opening, closing, flushing, committing, rolling back, and killing processes.

What must be there after a kill:

    memory    nothing
    a home    exactly the last commit, or the one that was being made
"""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .host import Host
from .model import HomeModel, Kv, World, copied

if TYPE_CHECKING:
    from .life import Life, Options

MEMORY = ("400KB", "800KB", "2MiB", "64MiB")
UNKNOWN = "unknown"  # a position: a process was killed in a commit, which may have been made


class DurabilitySteps:
    """Of a Life."""

    rng: random.Random
    world: World
    options: "Options"
    directory: Path
    hosts: dict[int, Host]
    kinds: list[str]

    # ---- Opening

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
            del settings["key_groups"], settings["subgroups"]  # the home knows them
        url = self.url_of(home)
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

    def url_of(self: "Life", home: HomeModel | None) -> str:
        if home is None:
            return "memory:"
        url = f"{home.url}memory={self.rng.choice(MEMORY)}"
        if home.kind == "rocksdb":
            url += f"&sync={int(self.rng.random() < 0.1)}"
        return url

    # ---- Closing

    def close(self: "Life", kv: Kv) -> None:
        """Closes a provider: what was in memory is lost, what is in a home is at rest there."""
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
        if home.kind == "redis" and count < len(groups):  # several may open a home on a server
            self.open_provider(home, {*groups} - kv.owned, evolve=False)
            self.world.note_shared()  # what one of them declares, the other need not know
        if rng.random() < 0.5:
            self.check(kv)
        self.check_position(kv)

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
        if not self.world.kvs:
            return
        kv, rng = self.rng.choice(self.world.kvs), self.rng
        metadata = rng.choice((None, {"offset": rng.randrange(100)}))
        self.say(f"{kv}: commit {metadata}")
        if kv.home is None:
            for call in (("commit",), ("commit", {"offset": 1}), ("rollback",)):
                command = lambda call=call: self.call(kv, "call", *call)  # noqa: E731
                if not self.refused(("CommitError",), command):
                    raise AssertionError(f"{kv}: {call} of memory was accepted")
            return
        self.call(kv, "call", "commit", *([] if metadata is None else [metadata]))
        self.committed(kv, metadata)
        self.check_position(kv)
        self.check_clean(kv)

    def committed(self: "Life", kv: Kv, metadata: Any) -> None:
        assert kv.home is not None
        self.world.settle(kv)
        for group in kv.owned:
            kv.home.positions[group] = metadata

    def check_position(self: "Life", kv: Kv) -> None:
        """The positions of the last commits are there, each with its key-groups."""
        assert kv.home is not None
        known = [kv.home.positions.get(group) for group in kv.owned]
        if UNKNOWN in known:
            return
        expected: list[Any] = []
        expected += [one for at, one in enumerate(known) if one and one not in known[:at]]
        if len(expected) > 1:
            if not self.refused(("CommitError",), lambda: self.call(kv, "committed")):
                raise AssertionError(f"{kv}: there is one position, should be {expected}")
            return
        found = self.call(kv, "committed")
        if found != (expected[0] if expected else None):
            raise AssertionError(f"{kv}: committed is {found}, should be {expected}")

    def step_rollback(self: "Life") -> None:
        able = [kv for kv in self.world.kvs if kv.home is not None]
        if able:
            kv = self.rng.choice(able)
            self.say(f"{kv}: rollback")
            self.call(kv, "call", "rollback")
            self.rolled_back(kv)
            if self.rng.random() < 0.6:
                self.check(kv)

    def rolled_back(self: "Life", kv: Kv) -> None:
        assert kv.home is not None
        for group in kv.owned:
            self.world.content[group] = copied(kv.home.base[group])
        self.world.upgrade(kv, kv.owned)

    # ---- Threads and kills

    def certain(self: "Life") -> list[Kv]:
        """Providers with a home of which the model knows what was committed there.

        Another process that shared the home (Redis) may have been killed in a commit.
        """
        return [kv for kv in self.world.kvs if kv.home is not None and not kv.home.is_torn]

    def step_beside(self: "Life") -> None:
        """A flush or commit while another thread writes."""
        rng = self.rng
        able = [kv for kv in self.certain() if kv.owned and kv.declared]
        if not able:
            return
        kv = rng.choice(able)
        assert kv.home is not None
        before = {**kv.home.base}
        ops, cuts = self.make_steps(kv, rng.choice((5, 20)))
        method = rng.choice(("commit", "commit", "flush"))
        self.say(f"{kv}: {method} beside {len(ops)} operations")
        _, results = self.call(kv, "beside", [op for op, _ in ops], ("call", kv.pid, method))
        self.expect_ops(kv, ops, results)
        if method == "commit":
            self.committed(kv, None)
        then = rng.choice(("rollback", "kill", "commit"))
        if then == "kill" and not self.may_kill(kv.host):
            then = "commit"
        if then == "commit":
            self.call(kv, "call", "commit")
            self.committed(kv, None)
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
        able = [kv for kv in self.certain() if self.may_kill(kv.host)]
        if not able:
            return
        kv = rng.choice(able)
        home = kv.home
        assert home is not None
        lines = int(10 ** rng.uniform(0, 4))
        what = rng.choice(("commit", "flush", "close", "ops", "sweep"))
        if what == "close" and any(move.source.host == kv.host for move in world.moves_of(kv)):
            # What is given back would be at the home of an old owner that is killed with it.
            self.finish_moves(kv)
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
            if what == "commit" and is_done:
                self.committed(kv, None)
            elif what == "commit":
                home.positions.update(dict.fromkeys(kv.owned, UNKNOWN))
            if what != "sweep":
                home.alternatives = [{**before, **after}] + ([] if is_done else [before])
        self.kill(kv.host)

    def may_kill(self: "Life", host: int) -> bool:
        """Whether the model knows what must be there after a kill."""
        world = self.world
        for kv in world.kvs:
            is_moving = kv.host == host and kv.home is not None and world.moves_of(kv)
            if is_moving and self.knows("1.3", "1.4"):
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
            goes_on = any(move.home is home for move in world.torn_moves)
            if home.is_torn and (goes_on or (not world.users_of(home) and self.rng.random() < 0.8)):
                self.open_torn(home)

    def torn(self: "Life", home: HomeModel) -> None:
        """A process that had the home open was killed."""
        home.is_torn = True
        if not home.alternatives:
            home.alternatives = [{**home.base}]

    def open_torn(self: "Life", home: HomeModel) -> None:
        """Opens a home after a kill, and finds out what is there."""
        world = self.world
        groups = world.at_rest(home)
        goes_on = any(move.home is home for move in world.torn_moves)
        if not groups and not goes_on:
            home.is_torn = False
            home.alternatives = []
            return
        for group in groups:
            world.content[group] = copied(home.base[group])
        host = self.hosts[self.rng.choice([*self.hosts])]
        told = host.call("unfinished", self.url_of(home))
        unfinished, returned = ({*some} & groups for some in told)
        kv = self.open_provider(home, sorted(groups - unfinished - returned), evolve=False)
        self.go_on(home, kv, unfinished)
        for group in returned & world.at_rest(home):  # and whom it was given back to is dead
            home.forget(group)
            del world.content[group]
        self.resolve(kv)
        self.check_position(kv)

    def resolve(self: "Life", kv: Kv) -> None:
        """Finds out which of several cuts is there: one of them, as a whole."""
        world = self.world
        assert kv.home is not None
        cuts, kv.home.alternatives, kv.home.is_torn = kv.home.alternatives, [], False
        owned = [
            world.upgraded({group: cut[group] for group in kv.owned}, kv.stored) for cut in cuts
        ]
        found = self.fitting(kv, owned, kv.owned)
        for group in kv.owned:
            kv.home.settle(group, found[0][group])
            world.content[group] = copied(found[0][group])
        self.drop_doubtful(kv, found)
