"""A thin stream engine, to see the library do a real job: not a product. docs/engine.md

items.py     what travels in a channel: records, watermarks, barriers, marks, the end
sender.py    who gets what, and what is sent besides records when the routing changes
align.py     the order of records at a receiver, across moves and barriers
turns.py     barriers and moves take turns
records.py   records as Arrow batches: their key-groups, and who gets which
frames.py    items as bytes
channel.py   the sockets between tasks, bounded by credit

The first four are pure: no sockets, threads or clocks. tests/engine/ordering.py drives them.
"""
