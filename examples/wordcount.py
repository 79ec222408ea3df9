"""Word count: batches of words, split between two workers half-way, merged again at the end.

Words come in batches, as Arrow strings if pyarrow is installed, else as lists. The first third is
counted by one provider. Then its key-groups are split between two, each of which gets the words
it owns; for the last third they are merged again. collections.Counter says whether it is right.

    python examples/wordcount.py
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import statekit as sk

try:
    import pyarrow
except ImportError:
    pyarrow = None

SEED = 7
WORDS = 150_000
VOCABULARY = 5_000
BATCH = 10_000


def batches() -> Iterator[list[str]]:
    """Batches of words, a few of them frequent and most of them rare, as in a text."""
    rng = random.Random(SEED)
    vocabulary = [f"word{number}" for number in range(VOCABULARY)]
    weights = [1 / (rank + 1) for rank in range(VOCABULARY)]
    for _ in range(WORDS // BATCH):
        yield rng.choices(vocabulary, weights, k=BATCH)


def column(words: list[str]) -> Any:
    """Words in the form with which a batch is fastest: an Arrow array."""
    return words if pyarrow is None else pyarrow.array(words, pyarrow.string())


def main() -> None:
    kv = sk.open("memory:")
    counts = kv.value("counts", int, default=0)
    expected: Counter[str] = Counter()
    stream = list(batches())
    third = len(stream) // 3
    for batch in stream:
        expected.update(batch)

    for batch in stream[:third]:
        counts.add_many(column(batch))
    print(f"one worker has counted {third * BATCH:,} words, {len(counts):,} different ones")

    # Scale out. Each word goes to the worker that owns its key-group.
    workers = kv.split(sk.assign(kv.key_group_count, 2))
    owners = {word: kv.owner_of(word) for word in expected}
    for batch in stream[third : 2 * third]:
        shares = defaultdict(list)
        for word in batch:
            shares[owners[word]].append(word)
        for worker in workers:
            worker["counts"].add_many(column(shares[worker]))
    sizes = " and ".join(f"{len(worker['counts']):,}" for worker in workers)
    print(f"two workers have gone on, with {sizes} words each")

    # Scale in. The handle from the beginning works again.
    for worker in workers:
        kv.merge(worker)
        worker.close()
    for batch in stream[2 * third :]:
        counts.add_many(column(batch))

    found = dict(counts.items())
    kv.close()
    top = sorted(found.items(), key=lambda item: (-item[1], item[0]))[:3]
    print("one worker has finished:", ", ".join(f"{word} {count:,}" for word, count in top))
    if found != expected:
        raise SystemExit(f"the counts are wrong (seed {SEED})")
    print(f"all {len(found):,} counts are those of collections.Counter")


if __name__ == "__main__":
    main()
