"""What travels from the driver to Python workers, and what is said if it does not arrive.

A function that Spark calls in its workers is pickled by value, since it is made here as a closure;
so it can tell what is wrong where statekit cannot be imported. All else travels inside it as bytes.
"""

import pickle
import socket
from collections.abc import Callable
from typing import Any

from statekit.errors import StatefulOpError, package
from statekit.version import __version__


def pack(thing: Any) -> Callable[[], bytes]:
    """Pickles a thing. What is returned travels in a closure; called in a worker, it gives the
    bytes to unpack(), if statekit is there as it is here.
    """
    package("pyarrow", "a StatefulOp")
    from pyspark import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(thing)
    except Exception as error:  # of any __reduce__
        raise StatefulOpError(
            f"the function of the StatefulOp cannot be sent to the executors: {error} It, or "
            "something that it refers to from outside, cannot be pickled: a session, a "
            "connection, a lock, an open file. Make that inside the function, or in open() of the "
            "class form, which is called in the executor."
        ) from error
    version = __version__

    def arrived() -> bytes:
        try:
            import statekit
        except ImportError as error:
            import socket
            import sys

            raise RuntimeError(
                f"statekit cannot be imported on {socket.gethostname()} ({error}). A StatefulOp "
                f"needs statekit {version} where its tasks run, too: install it for "
                f"{sys.executable} on all executors, for example with "
                f"`pip install statekit[spark]=={version}`."
            ) from None
        if statekit.__version__ != version:
            import socket

            raise RuntimeError(
                f"statekit {statekit.__version__} is installed on {socket.gethostname()}, and the "
                f"driver has {version}. Install the same version on the driver and all executors."
            )
        return data

    return arrived


def unpack(data: bytes) -> Any:
    """In a worker: the thing that pack() was given."""
    try:
        return pickle.loads(data)
    except ImportError as error:
        error.add_note(
            f"The function of the StatefulOp needs that module, and {socket.gethostname()} does "
            "not have it. Send it with spark.addArtifacts(..., pyfile=True), or install it there."
        )
        raise
