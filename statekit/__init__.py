"""statekit: elastic keyed state for Python stream processing.

>>> import statekit as sk
>>> store = sk.Store()
>>> visits = store.state("visits", "i64")
>>> visits.add("alice")
1
>>> visits.get("alice"), visits.get("bob")
(1, None)
"""

from statekit import errors
from statekit.errors import StateKitError
from statekit.keys import key_hash, leaf_of
from statekit.store import Store

__all__ = ["StateKitError", "Store", "__version__", "errors", "key_hash", "leaf_of"]

__version__ = "0.1.0"
