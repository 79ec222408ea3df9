"""Who owns which leaf: pure state machines, the same in the simulator and in processes.

messages.py      what participants say to each other, and ask of the process around them
calls.py         the calls between processes as plain data, and what answers them
participant.py   who has which lease
coordinator.py   tables, checkpoints and recoveries of many participants
known.py         what a participant knows of others
routing.py       who is to have which leaf

See docs/protocol.md.
"""
