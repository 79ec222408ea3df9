"""What is drawn once per run: how large it is, and how likely each fault is (ranges as in VOPR)."""

from random import Random


class Faults:
    """How likely each fault is, drawn once per run."""

    def __init__(self, rng: Random) -> None:
        def upto(most: float) -> float:
            return rng.random() * most if rng.random() < 0.6 else 0.0

        self.loss = upto(0.3)
        self.duplicates = upto(0.5)
        self.stale = upto(0.1)  # a message from long ago comes once more
        self.disorder = upto(1.0)  # another message than the oldest is delivered
        self.disk = upto(0.1)
        self.partition = upto(0.03)
        self.pause = upto(0.02)
        self.crash = upto(0.02)
        self.chief = upto(0.02)
        self.suspect = upto(0.01)
        self.clock = upto(0.02)
        self.whims = upto(0.03)  # a participant gives back, aborts, refuses
        self.misled = upto(0.01)  # somebody asks the wrong participant
        # One leaf goes to and fro quickly, and messages about its earlier leases come late. Other
        # faults would only keep it from moving.
        self.is_to_and_fro = rng.random() < 0.15
        if self.is_to_and_fro:
            self.stale, self.chief = 0.25, 0.0
            self.partition = self.pause = self.suspect = self.clock = self.disk = 0.0


def draw_size(rng: Random) -> tuple[int, int, int]:
    """Workers, leaves, steps. Small runs are quick and find nearly everything."""
    size = rng.random()
    if size < 0.9:
        return 2 + (size > 0.5), 4, 60 + int(rng.random() * 140)
    if size < 0.99:
        return 4, 8, 100 + int(rng.random() * 200)
    return rng.randint(4, 8), rng.choice((16, 32, 64, 128)), 600
