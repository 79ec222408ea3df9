"""Chief: the process around a Coordinator. Its record is stored slowly: see Run.land."""

from typing import Any

from statekit.protocol.messages import Completed, Persist, Send, Take

WRITES_MAX = 20  # of the record, under way at once


class Chief:
    """The process around a Coordinator."""

    def __init__(self, run: Any, number: int) -> None:
        self.run = run
        self.name = f"c.{number}"
        self.coordinator = run.coordinator_class(self.name, run.world.leaves)
        self.is_alive = True
        self.is_paused = False

    def act(self, orders: list[Any]) -> None:
        run = self.run
        for order in orders:
            if not self.is_alive:
                return
            kind = type(order)
            if kind is Send:
                message = order.message
                run.world.told(message)
                if type(message) is Take:
                    run.world.barrier(message.number, message.generation)
                run.send(self.name, order.to, message)
            elif kind is Persist:
                if len(run.writes) < WRITES_MAX:
                    run.writes.append((self, order))
            else:
                assert kind is Completed
                run.world.completed(order)

    def on(self, sender: str, message: Any) -> None:
        self.run.step("on", self.name, message)
        self.act(self.coordinator.on(sender, message))

    def crash(self) -> None:
        self.is_alive = False
