"""Moving leaves between live processes: lazy, prioritised, exact. See docs/protocol.md.

departure.py    the old owner's side: leaves are shut, and read out
arrival.py      the new owner's side: leaves come when they are touched, and by themselves
member.py       what a process is among others: its participant, generation, barriers
giving.py       the old owner's part of a peer: offers, answers, takes back
taking.py       the new owner's part: takes on, gives back
peer.py         both, to be reached: a provider among others
moving.py       the part of KVProvider that users see: serve, fetch_from, migrate, prefetch
"""
