"""Moving leaves between live processes: lazy, prioritised, exact. See docs/protocol.md.

api.py          the part of KVProvider that users see: serve, fetch_from, migrate, prefetch
peer.py         a provider among others: it is reached, and answers
shell.py        carries out what its participant (statekit/protocol) says
old_owner.py    the old owner's side of that
departure.py    one hand-over as the old owner sees it: leaves are shut, and read out
new_owner.py    the new owner's side
asking.py       what was asked for, and nobody has answered
returning.py    what does not come after all: it is given back, or lost
barriers.py     what comes, and checkpoints that several providers take together
going_on.py     what a home remembers of that, and how a later life goes on with it
arrival.py      one hand-over as the new owner sees it
strategies.py   when ownership moves, and how state follows: the names
steps.py        hand-overs whose ownership moves in steps
shadow.py       copies of leaves before they are taken over, as the new owner sees them
shading.py      the same for the old owner: leaves are read out while they are used
channels.py     connections that stay warm between hand-overs
fetch.py        leaves that come because somebody needs them
stream.py       leaves that come by themselves
report.py       what the old owner is told
waits.py        how long callers waited, and what for
kept.py         leaves as they came, for a checkpoint that was begun before
"""
