"""Checkpoints made of checkpoints, without a provider: what does not change is not decoded.

rescale.py   the key-groups of some workers shared out to others; merge: to one
regroup.py   another number of key-groups
compact.py   chains folded, garbage left behind
edit.py      one entry set or deleted
build.py     the first checkpoint, of what a store holds
diff.py      how two checkpoints differ
fold.py      the chain of a leaf put together
copying.py   segments of packs taken over as they are; what all of the above share

Every result is published like any checkpoint (checkpoint/writer.py): it is there as a whole, or not
at all. The sources are pinned while they are read, so that no garbage collection takes them away.
All of a source is verified first, even what is only referred to. A new checkpoint that refers to
damage would be the newest one, and the older ones, which may be good, would be collected some day.
"""
