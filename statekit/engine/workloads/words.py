"""Word count: lines of made-up text, split into words. Small state, and some very frequent keys.

The words are as frequent as those of a natural language (Zipf and Mandelbrot), and one in a
thousand was never there before, so that the state grows.
"""

import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from statekit.engine.job import Job, KeyedOperator
from statekit.engine.workloads.base import DUE, Workload, in_order
from statekit.engine.workloads.draws import Ranks, uniform
from statekit.engine.workloads.pace import source_of

if TYPE_CHECKING:
    from statekit.provider.provider import KVProvider

WORDS_OF_A_LINE = 12
_NEW = 0.001  # the share of words that never come again
_ONSETS = (
    "b",
    "d",
    "f",
    "g",
    "h",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "br",
    "kl",
    "sch",
    "tr",
)
_RIMES = ("a", "e", "i", "o", "u", "ai", "au", "ei", "an", "en", "in", "on", "ar", "er", "or")


class WordCount(Workload, frozen=True, kw_only=True):
    """A record is a line; a result is a word."""

    name: ClassVar[str] = "word_count"
    stage: ClassVar[str] = "count"
    key: ClassVar[str] = "word"

    vocabulary: int = 100_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.vocabulary <= 10_000_000:
            raise ValueError(f"vocabulary = {self.vocabulary}: pass 1 to 10,000,000")

    def events(self, numbers: Any) -> dict[str, Any]:
        words, ranks = _vocabulary(self.vocabulary)
        columns = []
        for at in range(WORDS_OF_A_LINE):
            drawn = words[ranks.of(self.seed, numbers, 2 * at)]
            is_new = uniform(self.seed, numbers, 2 * at + 1) < _NEW
            drawn[is_new] = [f"x{number}x{at}" for number in np.asarray(numbers)[is_new]]
            columns.append(drawn)
        return {"line": [" ".join(line) for line in zip(*columns, strict=True)], "seq": numbers}

    def job(self, folder: "str | Path") -> Job:
        return (
            Job(self.name)
            .source(self.read(folder), parallelism=self.sources)
            .map(words)
            .key_by("word")
            .process(_Count, parallelism=self.workers, name=self.stage)
            .sink(folder, due=DUE)
        )

    def wrong(self, results: pa.Table, records: int) -> str:
        """Of text that was made with single spaces, split() is a tokenizer that is none of ours."""
        expected: dict[tuple[str, int], int] = {}
        lines = self.events(np.arange(records))["line"]
        for seq, line in enumerate(lines):
            for word in line.split():
                expected[word, seq] = expected.get((word, seq), 0) + 1
        word, count, seq = (results[name].to_numpy() for name in ("word", "count", "seq"))
        found: dict[tuple[str, int], int] = {}
        for pair in zip(word, seq.tolist(), strict=True):
            found[pair] = found.get(pair, 0) + 1
        for pair in expected.keys() | found.keys():
            if expected.get(pair, 0) != found.get(pair, 0):
                return f"{pair[0]!r} of line {pair[1]} came {found.get(pair, 0)} times"
        # Words of a line may be alike, and have one number: their order is that of their counts.
        return in_order(
            word, count, seq * len(word) + count, source_of(seq, self.rows, self.sources)
        )


def words(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A word is a longest run of letters, digits and apostrophes, whatever its case."""
    some, of = [], []
    for at, line in enumerate(batch.column("line").to_pylist()):
        text = unicodedata.normalize("NFKC", line).casefold()
        found = "".join(c if c.isalnum() or c == "'" else " " for c in text).split()
        some += found
        of += [at] * len(found)
    rest = batch.select([name for name in batch.schema.names if name != "line"])
    rest = rest.take(pa.array(of, pa.int64()))
    columns = dict(zip(rest.schema.names, rest.columns, strict=True))
    return pa.record_batch({"word": pa.array(some, pa.string()), **columns})


@cache
def _vocabulary(size: int) -> tuple[Any, Ranks]:
    """Words of one to four syllables, none of them twice."""
    rng = random.Random(1)
    syllables = [a + b for a in _ONSETS for b in _RIMES]
    found: dict[str, None] = {}
    while len(found) < size:
        some = [syllables[int(rng.random() * len(syllables))] for _ in range(4)]
        found["".join(some[: 1 + int(rng.random() * 4)])] = None
    return np.array([*found], object), Ranks(size, 1.0, 2.7)


class _Count(KeyedOperator):
    def open(self, kv: "KVProvider") -> None:
        self._counts = kv.value("counts", int, default=0)

    def process(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        counts = self._counts.add_many(batch.column("word"), returning=True)
        assert counts is not None
        return batch.append_column("count", counts.to_arrow())
