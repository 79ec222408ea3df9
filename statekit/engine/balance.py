"""Balance: which task is to own which key-groups. As even as can be, and as few as possible move.

Key-groups have weights: what they take of their task's time and memory (weigh()). Without weights,
tasks get as many key-groups each.

    1. a task that has more than its share lets go of key-groups until it has not, large ones first
    2. these, and those of tasks that leave, go to whoever has least, large ones first
    3. if some task still has much more than another, single key-groups go from one to the other
"""

from collections.abc import Sequence

TOLERANCE = 0.05  # of a share: how much two tasks may differ before more key-groups move for it
COUNT_SHARE = 0.1  # of all weight is dealt out evenly: empty key-groups weigh something


def weigh(records: Sequence[int], sizes: Sequence[int]) -> list[float]:
    """Weights of key-groups by the records that came for them, and the bytes of their state."""
    weights = [COUNT_SHARE / len(records)] * len(records)
    for figures in (records, sizes):
        if total := sum(figures):
            weights = [w + figure / total for w, figure in zip(weights, figures, strict=True)]
    return weights


def rebalance(
    owners: Sequence[str], tasks: Sequence[str], weights: Sequence[float] = ()
) -> list[str]:
    """Owners of key-groups among these tasks. owners: as it is now, with tasks that leave."""
    tolerance = TOLERANCE if weights else 0.0
    weights = weights or [1.0] * len(owners)
    share = sum(weights) / len(tasks)
    target = [*owners]
    held: dict[str, list[int]] = {name: [] for name in tasks}
    free: list[int] = []
    for group in sorted(range(len(owners)), key=lambda group: (-weights[group], group)):
        held.get(owners[group], free).append(group)
    load = {name: sum(weights[group] for group in some) for name, some in held.items()}

    def move(group: int, old: str | None, new: str | None) -> None:
        if old is not None:
            held[old].remove(group)
            load[old] -= weights[group]
        if new is not None:
            held[new].append(group)
            load[new] += weights[group]
            target[group] = new

    for name, some in held.items():
        for group in [*some]:
            if len(some) > 1 and load[name] - weights[group] >= share:
                move(group, name, None)
                free.append(group)
    for group in sorted(free, key=lambda group: (-weights[group], group)):
        move(group, None, min(tasks, key=lambda name: (load[name], len(held[name]))))
    for _ in owners:  # each time, the largest difference becomes smaller
        most, least = max(tasks, key=load.__getitem__), min(tasks, key=load.__getitem__)
        difference = load[most] - load[least]
        best = min(held[most], key=lambda g: abs(difference / 2 - weights[g]), default=None)
        if best is None or difference <= tolerance * share or weights[best] >= difference * 0.999:
            break
        move(best, most, least)
    return target
