"""What is here and what is not.

residence.py   a store and its home: all of the following as one
writeback.py   what is here goes home, and leaves memory
fetch.py       what is not here is brought, and operations that wait for it are done
commits.py     what is at home is made to count, or undone
scan.py        whole states
transfer.py    leaves that change hands
assemble.py    a leaf as one whole: what is here over its base
freeze.py      the state at one moment
sources.py     what leaves come from that are neither here nor at home: checkpoints, processes
loading.py     bringing what sources have
moving_in.py   the same where there is a home, to which it goes
"""
