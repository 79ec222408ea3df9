"""A deterministic simulator of the migration protocol; see docs/protocol.md.

world.py        what is true, and the invariants
worker.py       the process around a Participant, on a model of content
chief.py        the process around a Coordinator
stage.py        the processes, the network, and every single thing that can happen
faults.py       how likely each fault is
run.py          a run with coordinators, from one seed
peers.py        a run without any: hand-overs that are asked for directly
script.py       one migration, with crashes at chosen events
shadows.py      a run in which leaves are copied ahead
transitions.py  counts which transitions were visited
"""

from typing import Any

from .peers import PeerRun
from .run import Run
from .shadows import ShadowRun
from .world import Violation, World

__all__ = ["PeerRun", "Run", "ShadowRun", "Violation", "World", "explain", "run_of"]


def run_of(seed: int, **arguments: Any) -> Run:
    """The run of this seed: every fourth seed gives one without a coordinator."""
    return (Run if seed % 4 else PeerRun)(seed, **arguments)


def explain(seed: int) -> str:
    """Runs it once more. Returns its steps and what is wrong; "" if nothing is."""
    trace: list[str] = []
    try:
        run_of(seed, trace=trace).play()
    except Exception as error:
        return "\n".join([*trace, f"seed {seed}: {type(error).__name__}: {error}"])
    return ""
