"""Steps about key-groups that change hands: split, merge, hand-overs back and forth, barriers."""

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .model import Copies, Cut, HomeModel, Kv, Move, Place, Point, World, copied

if TYPE_CHECKING:
    from .life import Life

STRATEGIES = ("prioritised", "on_demand", "order_unaware", "gradual_batched", "all_at_once")
STEPPED = ("fluid", "batched", "seamless")
PROVIDERS_MAX = 6
COPIES_MAX = 3


class MoveSteps:
    """Of a Life."""

    rng: random.Random
    world: World
    _barrier = 0

    # ---- Within a process

    def step_split(self: "Life") -> None:
        world, rng = self.world, self.rng
        able = [kv for kv in world.kvs if kv.owned]
        if not able or len(world.kvs) >= PROVIDERS_MAX:
            return
        kv = rng.choice(able)
        if self.knows("1.1", "1.3") and kv.home is not None:
            self.finish_moves(kv)
        groups = rng.sample(sorted(kv.owned), rng.randrange(len(kv.owned) + 1))
        cut = rng.randrange(len(groups) + 1)
        parts = [groups, []][: rng.choice((1, 1, 2))]
        if len(parts) == 2:
            parts = [groups[:cut], groups[cut:]]
        made = [(self.name("kv"), sorted(part)) for part in parts]
        self.say(f"{kv}: split {made}")
        self.call(kv, "split", made, self.times)
        for pid, part in made:
            stored = kv.stored if kv.home is not None else dict(kv.stored)
            other = Kv(pid, kv.host, kv.home, set(part), stored, dict(kv.declared), kv.family)
            kv.owned -= other.owned
            self.moved_on(other.owned)
            world.kvs.append(other)
        self.check_owned()

    def step_merge(self: "Life") -> None:
        world, rng = self.world, self.rng
        pairs = [
            (a, b)
            for a in world.kvs
            for b in world.kvs
            if a is not b and a.host == b.host and (b.owned or rng.random() < 0.1)
        ]
        if pairs:
            self.merge(*rng.choice(pairs))

    def merge(self: "Life", kv: Kv, other: Kv) -> None:
        world = self.world
        is_same = kv.home is other.home and kv.home is not None
        if self.knows("1.1", "1.3"):
            self.finish_moves(kv)
            self.finish_moves(other)
            self.call(kv, "let_go")
            self.call(other, "let_go")
        if self.knows("1.1") and not is_same:
            shared = [one for one in (kv, other) if one.home and len(world.users_of(one.home)) > 1]
            if shared:
                return
        if is_same and kv.family != other.family:
            self.say(f"{kv}: merge {other}, refused: each has opened the home by itself")
            if not self.refused(("ArgumentError",), lambda: self.call(kv, "merge", other.pid)):
                raise AssertionError(f"{kv} was merged with {other}, of the same home")
            self.check_owned()
            return
        refused = any(kv.stored.get(name, v) != v for name, v in other.stored.items())
        self.say(f"{kv}: merge {other}{', refused' if refused else ''}")
        if self.refused(("SchemaError",), lambda: self.call(kv, "merge", other.pid)) != refused:
            raise AssertionError(f"{kv} has states {kv.stored}, {other} {other.stored}")
        if refused:
            self.check_owned()
            return
        groups = set(other.owned)
        self.moved_on(groups)
        other.owned.clear()
        world.take_in(kv, groups, other.stored)
        self.declared(kv, {n: v for n, v in other.declared.items() if n not in kv.declared})
        if not is_same:
            for group in groups:
                if other.home is not None:
                    other.home.forget(group)
                if kv.home is not None:
                    kv.home.settle(group, world.content[group])
        self.check_owned()
        if self.rng.random() < 0.4:
            self.check(kv)
        if self.rng.random() < 0.6 or len(world.kvs) >= PROVIDERS_MAX:
            self.finish_moves(other)
            self.close(other)

    # ---- Between processes, or as between processes

    def step_begin_move(self: "Life") -> None:
        able = [kv for kv in self.world.kvs if kv.owned]
        if able:
            self.begin_move(self.rng.choice(able))

    def begin_move(
        self: "Life", source: Kv, may_migrate: bool = True, ahead: Copies | None = None
    ) -> Move | None:
        """ahead: key-groups that were copied, and are taken over now."""
        world, rng = self.world, self.rng
        if self.knows("1.1") and source.home and len(world.users_of(source.home)) > 1:
            return None
        targets = [
            kv
            for kv in world.kvs
            if kv is not source
            and (kv.home is None or (kv.home is not source.home and not kv.home.is_torn))
        ]
        if len(world.kvs) < PROVIDERS_MAX and (not targets or rng.random() < 0.3):
            kind = rng.choice(self.kinds)
            targets = [self.open_provider(None if kind == "memory" else self.new_home(kind), ())]
        if not targets:
            return None
        target = rng.choice(targets) if ahead is None else ahead.target
        able = source.owned if ahead is None else source.owned & ahead.groups
        groups = set(rng.sample(sorted(able), rng.randrange(1, len(able) + 1)))
        strategy = rng.choice((*STRATEGIES, *STEPPED) if may_migrate else STRATEGIES)
        strategy = strategy if ahead is None else "taken"
        settings: dict[str, Any] = {"strategy": strategy, "timeout": 60.0}
        bases = [place for place in world.places if place.owner is source and place.points]
        base = None
        by_source = may_migrate and rng.random() < 0.3 and ahead is None
        is_plain = strategy in STRATEGIES
        if bases and rng.random() < 0.6 and not by_source and is_plain:
            place = rng.choice(bases)
            settings["base"], base = place.url, (place.url, place.points[-1].number)
        move = Move(
            self.name("move"),
            source,
            target,
            groups,
            strategy,
            {group: copied(world.content[group]) for group in groups},
            {} if source.home is None else {**source.home.positions},
            by_source,
            target.home,
            base,
        )
        refused = any(target.stored.get(n, v) < v for n, v in source.stored.items())
        self.say(
            f"{target}: {'is given' if by_source else 'fetches'} {sorted(groups)} from {source}, "
            f"{strategy}{', from a base' if 'base' in settings else ''} as {move.mid}"
            f"{', refused' if refused else ''}"
        )
        kv, peer = (source, target) if by_source else (target, source)
        for one in (source, target):
            one.address = one.address or self.call(one, "serve")
        command = "migrate" if by_source else "fetch"
        if ahead is not None:
            command, settings = "take", {"sid": ahead.sid, "waits": rng.random() < 0.7}
            ahead.groups -= groups
        for _ in range(30 if self.knows("1.12") else 1):
            kinds = ("SchemaError", "PeerError", "MigrationError") if refused else ()
            if self.knows("1.12"):
                kinds = (*kinds, "PeerError")
            is_refused = self.refused(
                kinds,
                lambda: self.call(kv, command, move.mid, peer.address, sorted(groups), settings),
            )
            if refused or not is_refused:
                break
        if is_refused != refused:
            raise AssertionError(f"{source} has states {source.stored}, {target} {target.stored}")
        if refused:
            self.check_owned()
            return None
        self.moved_on(groups)
        source.owned -= groups
        if source.home is not None:
            for group in groups:
                source.home.forget(group)
        world.take_in(target, groups, source.stored)
        if target.home is not None:
            for group in groups:  # leaves move in outside of commits: as they were handed over
                target.home.settle(group, world.content[group])
        world.moves.append(move)
        self.check_owned()
        if strategy in STEPPED or (strategy == "all_at_once" and not by_source):
            self.finish_move(move)
        return move

    # ---- Copying ahead

    def step_copy_ahead(self: "Life") -> None:
        """A provider begins to copy key-groups of another, which goes on with them."""
        world, rng = self.world, self.rng
        pairs = [
            (source, target)
            for source in world.kvs
            for target in world.kvs
            if source.owned
            and target is not source
            and (target.home is None or (target.home is not source.home))
            and not (target.home is not None and target.home.is_torn)
        ]
        if not pairs or len(world.copies) >= COPIES_MAX:
            return
        source, target = rng.choice(pairs)
        groups = set(rng.sample(sorted(source.owned), rng.randrange(1, len(source.owned) + 1)))
        refused = any(target.stored.get(n, v) < v for n, v in source.stored.items())
        source.address = source.address or self.call(source, "serve")
        ahead = Copies(self.name("copies"), source, target, groups)
        self.say(f"{target}: copies {sorted(groups)} of {source} as {ahead.sid}")
        call = lambda: self.call(target, "shadow", ahead.sid, source.address, sorted(groups))  # noqa: E731
        if self.refused(("SchemaError",) if refused else (), call) != refused:
            raise AssertionError(f"{source} has states {source.stored}, {target} {target.stored}")
        if not refused:
            world.take_in(target, (), source.stored)
            world.copies.append(ahead)
        self.check_owned()

    def step_take_over(self: "Life") -> None:
        """Some of what was copied ahead is taken over; or the copies are dropped."""
        world, rng = self.world, self.rng
        world.copies = [
            one for one in world.copies if one.source in world.kvs and one.target in world.kvs
        ]
        if not world.copies:
            return
        ahead = rng.choice(world.copies)
        for _ in range(rng.randrange(3)):
            self.step_ops()
        if ahead.groups & ahead.source.owned and rng.random() < 0.9:
            self.begin_move(ahead.source, ahead=ahead)
        else:
            self.say(f"{ahead.target}: {ahead.sid} is dropped")
            self.call(ahead.target, "drop_shadow", ahead.sid)
            world.copies.remove(ahead)

    def step_torn_move(self: "Life") -> None:
        """A process is killed into whose home leaves are coming from another process."""
        world, rng = self.world, self.rng
        moves = [
            move
            for move in world.moves
            if move.home is not None and move.source.host != move.target.host
        ]
        if moves:
            move = rng.choice(moves)
        else:
            able = [kv for kv in world.kvs if kv.owned]
            begun = self.begin_move(rng.choice(able), may_migrate=False) if able else None
            if begun is None or begun.home is None or begun not in world.moves:
                return
            move = begun
        for _ in range(rng.randrange(3)):
            self.step_ops()
        if move.target in world.kvs and self.may_kill(move.target.host):
            if rng.random() < 0.5:
                self.call(move.target, "call", "commit")
                self.committed(move.target, None)
            self.kill(move.target.host)

    def moved_on(self: "Life", groups: Iterable[int]) -> None:
        """Key-groups move on: for them, the hand-overs that brought them are over."""
        for move in [*self.world.moves]:
            move.groups -= {*groups}
            if not move.groups:
                self.world.moves.remove(move)

    def step_finish_move(self: "Life") -> None:
        if self.world.moves:
            self.finish_move(self.rng.choice(self.world.moves))
            if self.world.kvs:
                self.check(self.rng.choice(self.world.kvs))

    def finish_moves(self: "Life", kv: Kv | None = None) -> None:
        for move in [*self.world.moves]:
            if kv is None or kv in (move.source, move.target):
                self.finish_move(move)

    def finish_move(self: "Life", move: Move) -> None:
        self.say(f"{move.target}: {move.mid} from {move.source} is waited for")
        self.call(move.target, "finish")
        if move in self.world.moves:
            self.world.moves.remove(move)
        if self.knows("1.3"):
            self.call(move.source, "let_go")
        if self.knows("1.1", "1.4") and move.source.home is not None:
            self.call(move.source, "call", "flush")
            self.world.settle(move.source)

    def step_undo_move(self: "Life") -> None:
        """The new owner gives back what has not come, or the old one takes it back."""
        world, rng = self.world, self.rng
        if not world.moves:
            return
        move = rng.choice(world.moves)
        if move.begun_by_source or rng.random() < 0.5:
            self.say(f"{move.source}: {move.mid} is aborted")
            told = self.call(move.source, "abort", sorted(move.groups), {})
            self.trace[-1] += f": {told}"
        else:
            self.say(f"{move.target}: {move.mid} is given back")
            back = self.on(move.target).call("move_call", move.mid, "give_back", {})
            self.trace[-1] += f": {back}"
        self.call(move.target, "finish")  # then the target knows of it
        found = set(self.call(move.source, "owned"))
        self.returned(move, found - move.source.owned)
        world.moves.remove(move)
        if self.knows("1.3"):
            self.call(move.source, "let_go")
        if move.source.home is not None:
            self.call(move.source, "call", "flush")
            world.settle(move.source)
        self.check_owned()
        self.check(move.source)
        self.check(move.target)

    def returned(self: "Life", move: Move, groups: set[int]) -> None:
        """Key-groups belong to the old owner again, as they were."""
        world = self.world
        if not groups <= move.groups:
            raise AssertionError(f"{move.source} took back {groups}, of {move.groups}")
        for group in groups:
            changed = [
                name
                for name, spec in world.specs.items()
                if world.alive(spec, world.content, [group])
                != world.alive(spec, world.upgraded(move.frozen, move.target.stored), [group])
            ]
            if changed:
                raise AssertionError(f"key-group {group} was given back, but {changed} had changed")
            world.content[group] = copied(move.frozen[group])
        move.target.owned -= groups
        if move.home is not None:
            for group in groups:
                move.home.forget(group)
        self._take_back(move, groups)

    def _take_back(self: "Life", move: Move, groups: set[int]) -> None:
        home = move.source.home
        if home is not None:
            home.positions |= {group: move.positions.get(group) for group in groups}
        self.world.take_in(move.source, groups, {})

    def go_on(self: "Life", home: HomeModel, kv: Kv, unfinished: set[int]) -> None:
        """Hand-overs into a home whose process was killed go on where the old owner is alive."""
        world = self.world
        for move in [move for move in world.torn_moves if move.home is home]:
            world.torn_moves.remove(move)
            groups = move.groups & unfinished
            settings: dict[str, Any] = {"strategy": self.rng.choice(STRATEGIES), "timeout": 60.0}
            if move.base:
                settings["base_at"] = move.base
            self.say(f"{kv}: goes on with {sorted(groups)} of {move.mid} from {move.source}")
            # If nothing is left to come, the old owner is told so all the same.
            address, wanted = move.source.address, sorted(groups) or sorted(kv.owned)[:1]
            fetch = lambda at=address, some=wanted, how=settings: self.call(  # noqa: E731
                kv, "fetch", self.name("move"), at, some, how
            )
            expected = "NoCheckpointError" if groups else "OccupiedError"
            is_refused = self.refused((expected, "ArgumentError"), fetch)
            if groups and not is_refused:
                kv.owned |= groups
                unfinished -= groups
                self.call(kv, "finish")
            unfinished -= self.regained(move)
        for group in unfinished & set(home.base):
            self.say(f"{kv}: key-group {group} will never be complete")
            home.forget(group)
            world.content.pop(group, None)

    def regained(self: "Life", move: Move) -> set[int]:
        """Key-groups that a new owner gave back while it was being killed. Which ones."""
        found = {*self.call(move.source, "owned")} & move.groups - move.source.owned
        for group in found:
            self.say(f"{move.source}: key-group {group} of {move.mid} was given back")
            self.world.content[group] = copied(move.frozen[group])
            self._take_back(move, {group})
            move.groups.discard(group)
            if move.home is not None:
                move.home.forget(group)
        return found

    def bereave(self: "Life", moves: Iterable[Move], dead: int) -> None:
        """A process was killed: the other sides of its hand-overs are told."""
        world = self.world
        moves = [*moves]
        survivors: list[Kv] = []
        for move in moves:
            world.moves.remove(move)
            source, target = move.source, move.target
            if source.host != dead and move.home is not None:
                world.torn_moves.append(move)  # its home goes on with it
                self.regained(move)
            elif source.host != dead:
                told = self.call(source, "abort", sorted(move.groups), {"target_is_dead": True})
                self.say(f"{source}: {move.mid} is aborted, {target} is dead: {told}")
                survivors.append(source)
            elif target.host != dead:
                gone = self.call(target, "abandon", source.address)
                self.say(f"{target}: {move.mid} is abandoned, {source} is dead: {gone}")
                survivors.append(target)
        for kv in dict.fromkeys(survivors):
            found = set(self.call(kv, "owned"))
            for group in found - kv.owned:
                origin = next(
                    (one for one in moves if one.source is kv and group in one.groups), None
                )
                if origin is None or group not in origin.target.owned:
                    raise AssertionError(f"{kv} has got key-group {group} of nobody")
                world.content[group] = copied(origin.frozen[group])
                self._take_back(origin, {group})
            for group in kv.owned - found:
                if not any(one.target is kv and group in one.groups for one in moves):
                    raise AssertionError(f"{kv} has lost key-group {group}, which was its own")
                kv.owned.discard(group)
                del world.content[group]
                if kv.home is not None:
                    kv.home.forget(group)
            if kv.home is not None:
                self.call(kv, "call", "flush")
                world.settle(kv)
        for kv in dict.fromkeys(survivors):
            self.check(kv)

    # ---- Barriers

    def step_barrier(self: "Life") -> None:
        """All providers take their part of one checkpoint, while state moves between them."""
        world, rng = self.world, self.rng
        if not world.kvs:
            return
        self._barrier += 1
        number = self._barrier
        taken: Cut = {}
        parts: list[Point] = []
        passed: list[Kv] = []
        moves: list[Move] = []
        while waiting := [kv for kv in world.kvs if kv not in passed]:
            if len(world.kvs) < 20 and rng.random() < 0.4:
                able = [kv for kv in world.kvs if kv.owned]
                move = self.begin_move(rng.choice(able), may_migrate=False) if able else None
                if move is not None:
                    moves.append(move)
                    self._late_part(move, passed, taken, parts)
                continue
            if rng.random() < 0.5:
                self.step_ops()
            kv = rng.choice(waiting)
            parts.append(self._pass(kv, number, taken))
            passed.append(kv)
        for kv in world.kvs:  # but not those that are opened later
            self.call(kv, "call", "end_barrier", number)
        if set(taken) != {group for kv in world.kvs for group in kv.owned}:
            raise AssertionError(f"the model of the barrier is wrong: {sorted(taken)}")
        versions: dict[str, set[int]] = {}
        for part in parts:
            for name, version in part.stored.items():
                versions.setdefault(name, set()).add(version)
        if all(len(some) == 1 for some in versions.values()):
            stored = {name: min(some) for name, some in versions.items()}
            self.look_at(parts, [taken], stored)

    def _pass(self: "Life", kv: Kv, number: int, taken: Cut) -> Point:
        """The barrier passes a provider."""
        world = self.world
        place = Place(str(self.directory / self.name("place")), kv)
        mine = {group: copied(world.content[group]) for group in kv.owned if group not in taken}
        taken |= mine
        self.say(f"{kv}: barrier {number} with {sorted(mine)} to {place.url}")
        stored = dict(kv.stored)
        count = self.call(kv, "checkpoint", place.url, {"barrier": number})
        point = Point(place, count, [mine], stored, None, kv.is_sibling)
        place.points.append(point)
        world.places.append(place)
        return point

    def _late_part(
        self: "Life", move: Move, passed: list[Kv], taken: Cut, parts: list[Point]
    ) -> None:
        """Adds to the target's part what came to it after its barrier, from a source before its
        own.
        """
        if move.target not in passed:
            return
        late = {group: move.frozen[group] for group in move.groups if group not in taken}
        found = self.on(move.target).call("late", move.mid)
        if bool(late) != (found is not None):
            raise AssertionError(f"late parts of {sorted(late)}: {found}")
        if found is None:
            return
        late = self.world.upgraded(late, move.target.stored)
        taken |= late
        url, number = found
        place = next(one for one in self.world.places if one.url == url)
        point = Point(place, number, [late], dict(move.target.stored), None, move.target.is_sibling)
        place.points.append(point)
        parts.append(point)
        self.say(f"{move.target}: late part of {sorted(late)} is {number} in {url}")
