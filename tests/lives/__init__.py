"""Random lives: providers that are opened, filled, split, merged, handed over and killed at random.

forms.py       the forms of state: declaring them, random operations, and the same on plain dicts
model.py       what is true, in plain dicts
host.py        a process with providers, which can be killed
life.py        one life, from one seed: operations, time, and comparing with the model
durability.py  its steps about homes, commits and kills
moves.py       its steps about key-groups that change hands or are copied ahead, and barriers
points.py      its steps about checkpoints
known.py       findings that are not fixed yet, which lives avoid
run.py         many lives, in several processes
"""
