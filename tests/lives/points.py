"""Steps about checkpoints: taking them beside writers, looking at old ones, starting anew."""

import random
from typing import TYPE_CHECKING, Any

from .host import HostError
from .model import Cut, HomeModel, Kv, Place, Point, World, copied

if TYPE_CHECKING:
    from .life import Life

PLACES_MAX = 8
LEAVES_MAX = 1024


class PointSteps:
    """Of a Life."""

    rng: random.Random
    world: World

    # ---- Taking

    def step_checkpoint(self: "Life") -> None:
        world, rng = self.world, self.rng
        able = [kv for kv in world.kvs if kv.owned]
        if not able:
            return
        kv = rng.choice(able)
        places = [place for place in world.places if place.owner is kv]
        if not places or rng.random() < 0.3:
            places = [Place(str(self.directory / self.name("place")), kv)]
            world.places.append(places[0])
            del world.places[:-PLACES_MAX]
        place = rng.choice(places)
        metadata = rng.choice((None, {"offset": rng.randrange(100)}))
        settings: dict[str, Any] = {"metadata": metadata}
        settings["compression"] = rng.choice((None, None, "zstd", "lz4"))
        if rng.random() < 0.2:
            settings["base"] = None
        how = rng.choice(("plain", "before", "beside")) if kv.declared else "plain"
        cuts = [world.cut(kv)]
        stored = dict(kv.stored)
        self.say(f"{kv}: checkpoint to {place.url} {settings}, {how}")
        if how == "plain":
            number = self.call(kv, "checkpoint", place.url, settings)
        elif how == "before":  # operations while it is being written are not in it
            job = self.name("job")
            self.call(kv, "checkpoint_start", job, place.url, settings)
            for _ in range(3):
                ops = self.make_ops(kv, 5)
                self.expect_ops(kv, ops, self.call(kv, "ops", [op for op, _ in ops]))
            number = self.on(kv).call("checkpoint_wait", job)
        else:
            ops, cuts = self.make_steps(kv, 20)
            number, results = self.call(
                kv,
                "beside",
                [op for op, _ in ops],
                ("checkpoint", kv.pid, place.url, settings),
            )
            self.expect_ops(kv, ops, results)
        if place.points and number <= place.points[-1].number:
            raise AssertionError(f"{kv}: checkpoint {number} after {place.points[-1].number}")
        place.points.append(Point(place, number, cuts, stored, metadata, kv.is_sibling))

    def step_parts(self: "Life") -> None:
        """All providers write their parts of one checkpoint, and somebody publishes it."""
        world, rng = self.world, self.rng
        stored = self.common_versions()
        writers = [kv for kv in world.kvs if kv.owned]
        if stored is None or {group for kv in writers for group in kv.owned} != set(
            range(world.groups)
        ):
            return
        self.finish_moves()
        shared = [place for place in world.places if place.writers and place.owner is None]
        if shared and rng.random() < 0.7:
            place = rng.choice(shared)
        else:
            place = Place(str(self.directory / self.name("place")), None)
        number = 1 + (place.points[-1].number if place.points else 0)
        metadata = rng.choice((None, {"offset": rng.randrange(100)}))
        is_known = all(kv in place.writers for kv in writers) or not place.points
        self.say(f"parts of {[*map(str, writers)]} to {place.url}, number {number}")
        parts: dict[str, str] = {}  # the last part of each provider
        cut: Cut = {}
        try:
            for kv in rng.sample(writers, len(writers)):
                for _ in range(rng.choice((1, 1, 1, 2))):  # a task that is repeated counts once
                    settings: dict[str, Any] = {"number": number}
                    settings["compression"] = rng.choice((None, None, "zstd"))
                    if rng.random() < 0.2:
                        settings["base"] = None
                    parts[kv.pid] = self.call(kv, "write_part", place.url, settings)
                    cut |= world.cut(kv)
                    ops = self.make_ops(kv, 3) if kv.declared else []
                    self.expect_ops(kv, ops, self.call(kv, "ops", [op for op, _ in ops]))
            host = self.hosts[rng.choice([*self.hosts])]
            for _ in range(rng.choice((1, 2))):  # publishing again gives the same
                made = host.call("publish", place.url, [*parts.values()], number, metadata)
                assert made == number
        except HostError as error:
            # A writer that was not among the last writers is treated as one that was replaced. Or
            # it was restored from a point before the last one, which the others go on from.
            is_older = error.kind == "CheckpointError" and "goes on from checkpoint" in error.text
            if is_known or not (is_older or error.kind == "FencedError"):
                raise
            if place in world.places:
                world.places.remove(place)
            return
        if place not in world.places:
            world.places.append(place)
            del world.places[:-PLACES_MAX]
        place.writers = writers
        place.points.append(Point(place, number, [cut], stored, metadata))

    def common_versions(self: "Life") -> dict[str, int] | None:
        """The versions of all states, if all providers have the same ones; else None."""
        versions: dict[str, set[int]] = {}
        for kv in self.world.kvs:
            for name, version in kv.stored.items():
                versions.setdefault(name, set()).add(version)
        if any(len(some) > 1 for some in versions.values()):
            return None
        return {name: min(some) for name, some in versions.items()}

    def step_collect(self: "Life") -> None:
        places = [place for place in self.world.places if place.points]
        if not places:
            return
        place, keep = self.rng.choice(places), self.rng.choice((1, 1, 2, 3))
        host = self.hosts[self.rng.choice([*self.hosts])]
        self.say(f"collect {place.url}, keep {keep}")
        kept, removed = host.call("collect", place.url, keep)
        numbers = [point.number for point in place.points]
        there = sorted([*kept, *removed])
        if there != numbers or not {*numbers[-keep:]} <= {*kept}:
            raise AssertionError(f"of {numbers} {kept} are kept and {removed} removed")
        place.points = [point for point in place.points if point.number in kept]
        found = host.call("checkpoints", place.url)
        if found != [(point.number, point.metadata or {}) for point in place.points]:
            raise AssertionError(f"{place.url} has {found}")

    # ---- Restoring

    def step_look_back(self: "Life") -> None:
        """Restores a checkpoint beside the living providers, compares it, and lets go of it."""
        points = [point for place in self.world.places for point in place.points]
        if points:
            point = self.rng.choice(points)
            self.look_at([point], point.cuts, point.stored)

    def look_at(self: "Life", points: list[Point], cuts: list[Cut], stored: dict[str, int]) -> None:
        world, rng = self.world, self.rng
        settings: dict[str, Any] = {"lazy": rng.random() < 0.7}
        groups = world.groups
        covered = set(cuts[0])
        if rng.random() < 0.3:
            groups = self._other_groups(covered == set(range(groups)))
            settings["regroup"] = groups
            factor = max(1, groups // world.groups)
            covered = {g * factor + i for g in covered for i in range(factor)}
            if groups < world.groups:
                covered = set(range(groups))
            cuts = [world.regrouped(cut, groups) for cut in cuts]
        if covered and rng.random() < 0.3:
            covered = set(rng.sample(sorted(covered), rng.randrange(1, len(covered) + 1)))
            settings["key_groups"] = sorted(covered)
        kv = Kv(self.name("look"), rng.choice([*self.hosts]), None, set(covered), dict(stored))
        kind = rng.choice(self.kinds)
        home = None
        if kind != "memory" and rng.random() < 0.4:
            home = self.new_home(kind)
            world.homes.remove(home)
            settings["home"] = self.url_of(home)
        if settings["lazy"] and rng.random() < 0.5:
            settings["background"] = False
        if len(points) > 1 and "key_groups" not in settings and covered != set(range(groups)):
            if not self.refused(("ArgumentError",), lambda: self._restore(kv, points, settings)):
                raise AssertionError(f"{kv}: a list with holes was restored, of {sorted(covered)}")
            settings["missing"] = "ok"
        self._restore(kv, points, settings)
        cuts = [
            {group: cut.get(group, {}) for group in covered}
            for cut in (world.upgraded(cut, kv.stored) for cut in cuts)
        ]
        self.fitting(kv, cuts, covered)
        self.call(kv, "close")

    def _other_groups(self: "Life", is_all: bool) -> int:
        """Another number of key-groups: a larger one, or any if all key-groups are there."""
        world = self.world
        least = 1 if is_all else world.groups
        return self.rng.choice([n for n in (1, 2, 4, 8, 16, 32, 64, 128) if n >= least])

    def _restore(self: "Life", kv: Kv, points: list[Point], settings: dict[str, Any]) -> None:
        """Restores points, and declares states there."""
        world, rng = self.world, self.rng
        names = [*world.specs]
        if rng.random() < 0.3:
            names = rng.sample(names, rng.randrange(1, len(names) + 1))
        versions = self.versions(kv, names, True)
        places = [(point.place.url, point.number) for point in points]
        self.say(f"{kv}: restore {places} {settings}, declares {versions}")
        declared = [(world.specs[name], version) for name, version in versions.items()]
        found = self.call(kv, "restore", places, settings, self.times, declared, rng.random() < 0.5)
        if set(found) != kv.owned:
            raise AssertionError(f"{kv} owns {found}, should own {sorted(kv.owned)}")
        if any(point.by_sibling for point in points):
            known = set(self.call(kv, "schemas"))
            kv.stored = {name: version for name, version in kv.stored.items() if name in known}
        kv.declared |= versions
        kv.stored |= versions

    # ---- Going on from checkpoints

    def step_recover(self: "Life") -> None:
        """A provider takes what nobody has: from a home, from a checkpoint, or from nothing."""
        world, rng = self.world, self.rng
        homes = [
            home
            for home in world.homes
            if world.at_rest(home) and (home.kind == "redis" or not world.users_of(home))
        ]
        if homes and (not world.lost() or rng.random() < 0.6):
            self.open_at_rest(rng.choice(homes))
            return
        lost = world.lost()
        if not lost:
            return
        points = [point for place in world.places for point in place.points if point.groups & lost]
        if not points or rng.random() < 0.3:
            self.open_new(rng.sample(sorted(lost), rng.randrange(1, len(lost) + 1)))
            return
        point = rng.choice(points)
        groups = point.groups & lost
        if rng.random() < 0.3:
            groups = set(rng.sample(sorted(groups), rng.randrange(1, len(groups) + 1)))
        kind = rng.choice(self.kinds)
        home = None if kind == "memory" else self.new_home(kind)
        settings: dict[str, Any] = {"lazy": rng.random() < 0.8, "key_groups": sorted(groups)}
        self.restore_into_world([point], point.cuts, point.stored, groups, home, settings)

    def restore_into_world(
        self: "Life",
        points: list[Point],
        cuts: list[Cut],
        stored: dict[str, int],
        groups: set[int],
        home: HomeModel | None,
        settings: dict[str, Any],
    ) -> Kv:
        """A provider of key-groups that nobody has, from checkpoints."""
        world, rng = self.world, self.rng
        kv = Kv(self.name("kv"), rng.choice([*self.hosts]), home, set(groups), dict(stored))
        kv.family = self._counter
        if home is not None:
            settings["home"] = self.url_of(home)
        if settings.get("lazy") and rng.random() < 0.5:
            settings["background"] = False
        self._restore(kv, points, settings)
        if home is not None:
            home.stored |= kv.stored
            kv.stored = home.stored
        cuts = [
            world.upgraded({group: cut.get(group, {}) for group in groups}, kv.stored)
            for cut in cuts
        ]
        if len(cuts) > 1:
            cuts = self.fitting(kv, cuts, groups)
        if len(cuts) > 1 and len(kv.declared) < len(world.specs):
            self.say(f"{kv}: declares all, to know which one it is")
            names = [name for name in world.specs if name not in kv.declared]
            versions = self.versions(kv, names, False)
            self.call(kv, "declare", [(world.specs[n], v) for n, v in versions.items()])
            kv.declared |= versions
            kv.stored |= versions
            cuts = self.fitting(kv, cuts, groups)
        for group in groups:
            world.content[group] = copied(cuts[0][group])
        world.kvs.append(kv)
        world.settle(kv)
        self.drop_doubtful(kv, cuts)
        if home is not None and len(points) == 1:
            home.positions.update(dict.fromkeys(groups, points[0].metadata))
        for point in points:
            if point.place.owner not in world.kvs and not point.place.writers:
                point.place.owner = kv
        if rng.random() < 0.3:
            self.check(kv)
        return kv

    def step_restart(self: "Life") -> None:
        """All providers are checkpointed, closed or killed, and restored, perhaps regrouped."""
        world, rng = self.world, self.rng
        if not world.kvs or any(home.is_torn for home in world.homes):
            return
        stored = self.common_versions()
        if stored is None:
            return
        self.finish_moves()
        covered = {group for kv in world.kvs for group in kv.owned}
        points = []
        for kv in [*world.kvs]:
            place = Place(str(self.directory / self.name("place")), kv)
            self.say(f"{kv}: last checkpoint to {place.url}")
            number = self.call(kv, "checkpoint", place.url, {})
            point = Point(place, number, [world.cut(kv)], dict(kv.stored), None, kv.is_sibling)
            place.points.append(point)
            points.append(point)
        cut = {group: content for point in points for group, content in point.cuts[0].items()}
        groups = self._other_groups(covered == set(range(world.groups)))
        leaves = max(groups, world.groups * world.subgroups)
        if leaves > LEAVES_MAX:
            return
        if rng.random() < 0.5:
            self.close_all()
        for number in self.hosts:
            self.hosts[number].kill()
            self.start_host(number)
        world.kvs, world.homes, world.moves, world.content = [], [], [], {}
        cut = world.regrouped(cut, groups)
        factor = max(1, groups // world.groups)
        covered = {g * factor + i for g in covered for i in range(factor)}
        if groups < world.groups:
            covered = set(range(groups))
        self.say(f"restart: {groups} x {leaves // groups}, was {world.groups} x {world.subgroups}")
        world.groups, world.subgroups = groups, leaves // groups
        world.places = []
        left = rng.sample(sorted(covered), len(covered))
        while left:
            count = rng.choice((1, len(left) // 2 or 1, len(left), len(left)))
            part, left = set(left[:count]), left[count:]
            kind = rng.choice(self.kinds)
            home = None if kind == "memory" else self.new_home(kind)
            settings = {"regroup": groups, "key_groups": sorted(part), "lazy": rng.random() < 0.8}
            self.restore_into_world(points, [cut], stored, part, home, settings)
