"""Moving leaves between live processes: lazy, prioritised, exact. See docs/protocol.md.

messages.py     what participants say to each other, and ask of the process around them
participant.py  who has which lease: a pure state machine, the same in the simulator and here
coordinator.py  tables, checkpoints and recoveries of many participants: pure, too
routing.py      who is to have which leaf
departure.py    the old owner's side: leaves are shut, and read out
arrival.py      the new owner's side: leaves come when they are touched, and by themselves
peer.py         a provider among others: carries out what the participant says, answers calls
moving.py       the part of KVProvider that users see: serve, fetch_from, migrate, prefetch
"""
