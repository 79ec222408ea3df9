"""What the bytes of a checkpoint mean: no storage, no threads.

manifest.py      the file that makes a checkpoint exist: which segments of which packs it is made of
description.py   what a manifest says about the states and the place
pack.py          files of frames, the contents
compression.py   zstd and lz4
"""
