"""Checkpoints made from checkpoints, without a provider.

rework.py    rescaled, merged, compacted, edited
copying.py   segments of packs, taken over as they are
diff.py      what two checkpoints have that differs
"""
