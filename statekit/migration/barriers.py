"""Barriers: the new owner's part of a checkpoint that several providers take together.

A leaf is in the part of whoever owned it when the barrier passed there. If it had passed here, and
not at the old owner, the leaf is in no part yet: it is added to ours as it comes. docs/protocol.md
has the argument.
"""

import logging
from typing import NamedTuple

from statekit.assignment import show_groups
from statekit.errors import CheckpointError
from statekit.live.job import CheckpointJob, PartJob
from statekit.migration.arrival import Arrival
from statekit.migration.shell import AddLate, Owner, Shell, groups_of
from statekit.protocol.messages import Leases, Offer, WritePart
from statekit.protocol.participant import NUMBERS_MAX
from statekit.residence.residence import Residence

_log = logging.getLogger("statekit")


class _Passed(NamedTuple):
    """Our part of a checkpoint: how to add to it, and what was added."""

    add: AddLate
    late: list[CheckpointJob | PartJob]


class Barriers(Shell):
    """The part of a NewOwnerShell (new_owner.py) that knows of checkpoints."""

    _arrivals: dict[str, Arrival]

    def __init__(self, owner: Owner, residence: Residence, leases: Leases) -> None:
        super().__init__(owner, residence, leases)
        self._parts: dict[int, _Passed] = {}  # by number: of the last checkpoints

    def take(self, barrier: int, add_late: AddLate) -> tuple[range, ...]:
        """Barrier n has passed here. The key-groups that belong into our part of checkpoint n.

        Not those that came from a process whose part has them. Those that come later from a
        process that n has not passed are added then, with add_late. The owner's lock is held.
        """
        with self._lock:
            actions = self._participant.take(barrier)
            if not actions:
                raise CheckpointError(
                    f"barrier {barrier} cannot pass here: {self._participant.barrier} has. "
                    "Number barriers upwards, and take the part of each once."
                )
            self._carry_out(actions, WritePart)
            (part,) = (action for action in actions if isinstance(action, WritePart))
            # And those that nothing has come of: nobody changes them before they are here, so
            # they are as the barrier found them when they come.
            covered = self._participant.covered_of
            expected = [
                leaf
                for arrival in self._arrivals.values()
                for leaf in [*arrival.state.missing]
                if covered(leaf) < barrier
            ]
            self._parts[barrier] = _Passed(add_late, [])
            while len(self._parts) > NUMBERS_MAX:
                del self._parts[next(iter(self._parts))]
        leaves = (*part.leaves, *expected)
        return groups_of(leaves, self.subgroups)

    def end_barrier(self, number: int) -> None:
        """Nothing is added any more to our part of checkpoint n. The owner's lock is held."""
        with self._lock:
            self._participant.end(number)

    def _cover(self, arrival: Arrival, offer: Offer) -> None:
        """Key-groups that no part of a checkpoint has are added to ours, as they come."""
        ended = self._participant.ended
        for number in [one for one in self._parts if one > ended]:
            late = [leaf for one in offer.grants if one.covered < number for leaf in one.leaves]
            if late:
                groups = groups_of(late, self.subgroups)
                arrival.late_checkpoint = self.add_late(number, groups)

    def add_late(self, number: int, groups: tuple[range, ...]) -> CheckpointJob | PartJob | None:
        try:
            job = self._parts[number].add(groups)
        except Exception as error:  # whatever it is, that checkpoint will not be complete
            _log.warning(
                "key-groups %s are in no part of checkpoint %d: %s",
                show_groups(groups),
                number,
                error,
            )
            return None
        self._parts[number].late.append(job)
        return job

    def late_parts(self, number: int) -> tuple[CheckpointJob | PartJob, ...]:
        """See KVProvider.late_parts()."""
        part = self._parts.get(number)
        return () if part is None else tuple(part.late)
