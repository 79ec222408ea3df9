"""State over the network: what processes ask of each other, by gRPC.

peer.proto    the calls of protocol/calls.py on the wire; peer_pb2.py is generated from it
wire.py       converts between the two; checks whatever a peer sent before it is used
security.py   who may connect: addresses, TLS, tokens
watch.py      cuts off peers that keep others waiting
server.py     PeerServer: bounded in threads, memory and time, whoever calls
channel.py    PeerChannel: makes the same calls to another process, with time-outs and retries
query.py      statekit.connect(): looking at the state of a running process

Nothing here decides who owns a leaf: that is statekit/protocol/. And nothing that comes over the
network is unpickled, evaluated or used as a path.

wire.py, server.py and channel.py need gRPC: import them where they are used.
"""

from statekit.errors import PeerError


def missing_package(error: ImportError) -> PeerError:
    """The exception for a process that should talk to others but has no gRPC."""
    return PeerError(
        f"talking to other processes needs gRPC, which cannot be imported ({error}). "
        "Run: pip install statekit[remote]"
    )
