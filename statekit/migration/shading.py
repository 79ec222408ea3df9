"""Shading: the source's side of shadows. Leaves are read out while they go on being used.

No gate is shut and no snapshot is open: a round begins an epoch of the store, and each leaf is
encoded under its own lock, so whoever changes the leaf waits for that at most. What was read may
have some changes of the epoch that has just begun; they come once more with the next round, which
does no harm (protocol/shadow.py).

    pace    so many bytes a second, if the target says so. Else as much as goes unnoticed: about a
            fifth of one core, and less when this thread has to wait for its turn, since others then
            wait for theirs
    rest    leaves that are not whole in memory are not copied: they come with the hand-over. So
            nothing is copied of a provider with a home, or of one that is still being restored
    end     a shadow that nobody asks about for SHADE_SECONDS is forgotten
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING

from statekit.assignment import leaf_ranges, show_groups, subtract
from statekit.errors import ArgumentError, ClosedError, MigrationError, NotOwnedError, shorten
from statekit.migration.departure import ID_BYTES, bound_to, pieces_of, place_of
from statekit.protocol.calls import CopyCall, Piece, PieceKind, ShadeCall
from statekit.protocol.shadow import Round, Shade, Shades, Unknown

if TYPE_CHECKING:
    from statekit.migration.shell import Shell
    from statekit.residence.residence import Residence

SHADE_SECONDS = 30.0  # after which a shadow that nobody asks about is forgotten
SHADES_MAX = 64  # at once
WORK_SECONDS = 0.001  # of copying between two pauses
REST_SHARE = 4  # times as long as it has worked, it rests
REST_SECONDS_MAX = 0.05
LATE_SECONDS = 0.002  # more than it asked for: then others need this core


class Shading:
    """The shadows that others have of leaves here."""

    def __init__(self, shell: "Shell", residence: "Residence", name: str) -> None:
        self._shell = shell
        self._residence = residence
        self._name = name
        self._lock = threading.Lock()  # of all below
        self._machine: Shades | None = None
        self._heard: dict[str, float] = {}  # by shadow: when it was last asked about
        self._copying: dict[str, int] = {}  # by shadow: rounds that are being sent
        self._timer: threading.Timer | None = None
        self._is_closed = False
        self.bytes_sent = 0

    def __len__(self) -> int:
        return len(self._heard)

    def _machine_now(self) -> Shades:
        generation = self._shell.generation
        if self._machine is None:
            self._machine = Shades(self._name, generation)
        if self._machine.generation != generation:
            for shadow in [*self._heard]:
                self._drop(shadow)
            self._machine.fence(generation)
        return self._machine

    # ---- Calls

    def shade(self, call: ShadeCall, owned: tuple[range, ...]) -> int:
        """Opens a shadow, or ends it. About how many bytes its leaves take."""
        _check_name(call.shadow)
        if call.is_dropped:
            with self._lock:
                if self._machine_now().target_of(call.shadow) in ("", call.target):
                    self._drop(call.shadow)
            return 0
        if missing := subtract(call.key_groups, owned):
            raise NotOwnedError(
                f"key-groups {show_groups(missing)} are not this provider's, which has "
                f"{show_groups(owned)}. Shadow what it has."
            )
        leaves = leaf_ranges(call.key_groups, self._shell.subgroups)
        shade = Shade(call.shadow, call.generation, leaves)
        with self._lock:
            machine = self._machine_now()
            if call.shadow not in machine and len(machine) >= SHADES_MAX:
                raise MigrationError(
                    f"{len(machine)} shadows are made of this provider already. Drop one, or take "
                    "these key-groups over without one."
                )
            if machine.on_shade(call.target, shade) is None:
                raise MigrationError(f"shadow {call.shadow} is another process'.")
            self._note(call.shadow)
        sizes = self._residence.store.leaf_sizes()
        return sum(sum(sizes[part.start : part.stop]) for part in leaves)

    def copy(self, call: CopyCall) -> Iterator[Piece]:
        """One round."""
        store, tracking = self._residence.store, self._residence.tracking
        asked = Round(call.shadow, call.generation, call.round, call.leases)
        with self._lock:
            machine = self._machine_now()
            epoch = store.advance_epoch()
            plan = machine.on_round(machine.target_of(call.shadow), asked, store.epoch)
            if isinstance(plan, Unknown):
                raise MigrationError(
                    f"shadow {call.shadow} is not known here, or not any more: nobody asked for "
                    f"it for {SHADE_SECONDS:.0f} s, or this process was started anew. Drop it, and "
                    "make another."
                )
            if plan is None:
                return
            tracking.hold(call.shadow, machine.needed(call.shadow) or epoch)
            self._note(call.shadow)
            self._copying[call.shadow] = self._copying.get(call.shadow, 0) + 1
        try:
            yield from self._send(call, plan, epoch)
        finally:
            with self._lock:
                self._copying[call.shadow] -= 1
                if not self._copying[call.shadow]:
                    del self._copying[call.shadow]
                if call.shadow in machine:
                    self._note(call.shadow)

    def _send(self, call: CopyCall, plan: dict[int, int], epoch: int) -> Iterator[Piece]:
        store = self._residence.store
        oldest = min((since for since in plan.values() if since), default=0)
        changed = store.changed_leaves(oldest) if oldest else b""
        pacer = _Pacer(call.pace, lambda: self._is_over(call.shadow))
        copies = 0
        for leaf, since in plan.items():
            if since and not changed[leaf]:
                continue
            began = perf_counter()
            place = place_of(leaf, epoch)
            bound = bound_to(call.shadow, since, self._name)
            is_here = self._is_copyable(leaf)
            blocks = store.encode_bound(leaf, None, since, bound, place) if is_here else b""
            if not (is_here and self._is_copyable(leaf)):  # it may have gone meanwhile
                yield Piece(PieceKind.NEVER, leaf, 0)
                continue
            if since and not blocks:
                continue  # another leaf has made it look at this one
            copies += 1
            self.bytes_sent += len(blocks)
            told = bound + blocks if since else blocks
            yield from pieces_of(leaf, epoch, told, is_delta=since > 0)
            pacer.did(len(blocks), perf_counter() - began)
            if self._is_over(call.shadow):
                return
        yield Piece(PieceKind.ROUND, 0, epoch, bytes_total=copies)

    def _is_over(self, shadow: str) -> bool:
        return self._is_closed or shadow not in self._heard

    def _is_copyable(self, leaf: int) -> bool:
        """Whether all of the leaf is in memory, and ours."""
        residence = self._residence
        if residence.ledger is not None or leaf in residence.shut_leaves:
            return False
        return residence.store.residency(leaf) == "whole"

    def since(self, target: str, shadow: str, generation: int, leaf: int, held: int) -> int:
        """In a step: see Shades.since()."""
        with self._lock:
            if shadow not in self._heard or self._residence.ledger is not None:
                return 0
            self._note(shadow)
            return self._machine_now().since(target, shadow, generation, leaf, held)

    # ---- The end of shadows

    def _note(self, shadow: str) -> None:
        """Somebody asks about the shadow. The lock is held."""
        if self._is_closed:
            return
        self._heard[shadow] = monotonic()
        if self._timer is None:
            self._arm(SHADE_SECONDS)

    def _arm(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._tidy)
        self._timer.name, self._timer.daemon = "statekit-shading", True
        self._timer.start()

    def _tidy(self) -> None:
        """Forgets shadows that nobody asks about."""
        with self._lock:
            if self._is_closed:
                return
            self._timer = None
            now = monotonic()
            for shadow, heard in [*self._heard.items()]:
                if now - heard >= SHADE_SECONDS and shadow not in self._copying:
                    self._drop(shadow)
            if self._heard:
                oldest = min(self._heard.values())
                self._arm(max(0.1, oldest + SHADE_SECONDS - now))

    def _drop(self, shadow: str) -> None:
        if self._machine is not None:
            self._machine.drop(shadow)
        if self._heard.pop(shadow, None) is not None:
            with suppress(ClosedError):  # the provider is being closed: nobody needs changes
                self._residence.tracking.release(shadow)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True  # a round that is being sent arms no timer any more
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._heard.clear()


class _Pacer:
    """How fast a round goes."""

    def __init__(self, pace: int, is_over: Callable[[], bool]) -> None:
        self._pace = pace  # bytes a second; 0: to be found
        self._is_over = is_over  # whether nobody waits for the rest
        self._began = perf_counter()
        self._bytes = 0
        self._worked_s = 0.0
        self._share = float(REST_SHARE)

    def did(self, size: int, seconds: float) -> None:
        self._bytes += size
        self._worked_s += seconds
        if self._pace:
            early = self._bytes / self._pace - (perf_counter() - self._began)
            while early > WORK_SECONDS and not self._is_over():
                # In pieces: at a low pace, one leaf takes hours.
                sleep(min(early, REST_SECONDS_MAX))
                early = self._bytes / self._pace - (perf_counter() - self._began)
        elif self._worked_s >= WORK_SECONDS:
            rest = min(self._share * self._worked_s, REST_SECONDS_MAX)
            before = perf_counter()
            sleep(rest)
            is_late = perf_counter() - before - rest > LATE_SECONDS
            self._share = min(4.0 * REST_SHARE, 1.5 * self._share) if is_late else self._share * 0.9
            self._share = max(self._share, REST_SHARE / 2)
            self._worked_s = 0.0


def _check_name(shadow: str) -> None:
    if len(shadow) != 2 * ID_BYTES or not set(shadow) <= set("0123456789abcdef"):
        raise ArgumentError(f"{shorten(shadow)} is no shadow: 32 hexadecimal digits are.")
