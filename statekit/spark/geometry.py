"""Into how many leaves the state of an op is cut: by its size, unless the user says.

A batch reads and writes the leaves in which it touches a key, and each of them costs some 40 us
however small it is; and a leaf is read and verified as a whole, however little of it is wanted. So
few leaves are cheap while the state is small, and large leaves are dear when little of them is
touched. The state begins with one leaf for each key-group. When its leaves have more than
LARGE_BYTES on average, the next batch cuts each in two, or in as many as it takes:

    leaves of 128 key-groups    state, as it is stored
    128 x 1                     up to 256 MiB
    128 x 2, x 4, x 8, ...      up to 512 MiB, 1 GiB, 2 GiB, ...

The batch that does so is an ordinary one, but for one thing: its tasks restore the base with more
sub-groups (statekit.restore(subgroups=)), and so they write all of the state, and not only what
they changed. Nothing else has to know: the version before stays as it was, for whoever reads it or
goes back to it; a retry does the same again; and whatever the geometry of a version is, it says so
itself. A state is never joined to fewer leaves. Key-groups stay, since the parallelism counts in
them.
"""

from statekit.checkpoint.reader import Checkpoint

LARGE_BYTES = 2 << 20  # of a leaf
_LEAVES_MAX = 1 << 16


def subgroups_of(base: Checkpoint | None, wanted: int | None, key_groups: int) -> int:
    """The number of sub-groups that a batch is to have. wanted: what the user says."""
    if wanted is not None:
        return wanted
    if base is None:
        return 1
    subgroups = base.subgroups
    while (
        base.bytes > LARGE_BYTES * key_groups * subgroups
        and 2 * key_groups * subgroups <= _LEAVES_MAX
    ):
        subgroups *= 2
    return subgroups
