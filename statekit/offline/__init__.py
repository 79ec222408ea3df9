"""Checkpoints made of checkpoints, without a provider: nothing is decoded that does not change.

rescale.py   the key-groups of some workers shared out to others; merge: to one
regroup.py   another number of key-groups
compact.py   chains folded, garbage left behind
edit.py      one entry set or deleted
build.py     from nothing: of what a store holds
diff.py      what two checkpoints have that differs
fold.py      the chain of a leaf put together
copying.py   segments of packs taken over as they are; what all of the above share

Every result is published as any checkpoint is (checkpoint/writer.py): it is there complete, or not
at all. The sources are pinned while they are read, so that no garbage collection takes them away.
All of a source is verified first, also what is only referred to. A new checkpoint over damage would
be the newest one, and the old ones, which might have been good, would be collected some day.
"""
