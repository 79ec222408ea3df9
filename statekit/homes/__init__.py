"""Homes: where the entries are that memory does not hold.

home.py       what a home is, its URL, and how one is registered
rocksdb.py    a RocksDB directory
looking.py    a private copy of one, to look at
redis.py      a Redis server or cluster
rows.py       an entry as its home keeps it
ledger.py     commits: rows that count, and rows that do not count yet
record.py     what a provider keeps about itself at home
"""

from statekit.homes.home import (
    Home,
    HomeSnapshot,
    HomeUrl,
    Row,
    open_home,
    parse_bytes,
    register_home,
)

__all__ = [
    "Home",
    "HomeSnapshot",
    "HomeUrl",
    "Row",
    "open_home",
    "parse_bytes",
    "register_home",
]
