"""One key a call: each typed state against plain dicts, dict + msgpack, LMDB and rocksdict.

    python benchmarks/bench_single.py [--quick] [--only WORD]
        what is promised beside what was measured; writes results/single.json.
        --quick: small sizes, into single_quick.json. --only: the rows with the word in their name;
        the other results stay as they were.

Each statement is timed twice. *Cold*: 100,000 keys, a new order in each round, so that every access
misses the caches, of which a dict loses as much as a store does. *Hot*: always the same key.
Contenders take turns, round by round (compare.py). All have the same keys and values, in their best
ordinary form (contenders.py): LMDB does a whole round in one transaction, its files are in memory.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from random import Random
from typing import Any

import lmdb
import msgspec
from compare import Contender, Report, Row, arguments, measure, medians, ratio
from contenders import Profile, compile_loop, make_profile, scratch_folder
from msgpack import packb, unpackb
from rocksdict import Options, Rdict

import statekit as sk

DATA = bytes(range(100))
APPENDED = 1000  # lists that take turns where one would grow too long


@dataclass(frozen=True)
class Sizes:
    keys: int = 100_000
    rounds: int = 9


QUICK = Sizes(5_000, 3)


@dataclass(frozen=True)
class Promise:
    """A ratio that is promised: of the contender's time to statekit's, or the other way round."""

    against: str
    bound: float
    of_time: bool  # statekit may take `bound` times as long; else it is `bound` times as fast
    hot: bool = False


@dataclass(frozen=True)
class Case:
    """One operation. The statements have k, a key, and v, its value; s is statekit's state."""

    name: str
    declare: Callable[[sk.KVProvider], Any]
    make: Callable[[int], Any]
    statement: str
    others: dict[str, str]  # by contender
    promises: tuple[Promise, ...] = ()
    pack: str = "packb(v)"  # how contenders that keep bytes store a value


def at_most(against: str, bound: float, hot: bool = False) -> Promise:
    return Promise(against, bound, True, hot)


def faster(against: str, bound: float) -> Promise:
    return Promise(against, bound, False)


def _ints(kv: sk.KVProvider) -> Any:
    return kv.value("ints", int)


def _with_default(kv: sk.KVProvider) -> Any:
    return kv.value("defaults", int, default=0)


def _small_list(i: int) -> list[int]:
    return list(range(i, i + 10))


def _small_map(i: int) -> dict[str, int]:
    return {f"field-{j}": i + j for j in range(10)}


def _nested(i: int) -> dict[str, list[int]]:
    return {"open": _small_list(i), "done": _small_list(i + 1)}


INT = Case("int get", _ints, lambda i: 100_000 + i, "s[k]", {})
BYTES = Case("bytes 100 get", lambda kv: kv.value("bytes", bytes), lambda i: DATA, "s[k]", {},
    pack="v")  # fmt: skip
CLASS = Case("dataclass get", lambda kv: kv.value("classes", Profile), make_profile, "s[k]", {},
    pack="encode(v)")  # fmt: skip
LIST = Case("list get", lambda kv: kv.list("lists", int), _small_list, "s.copy(k)", {})
MAP = Case("map get", lambda kv: kv.map("maps", str, int), _small_map, "s.copy(k)", {})
NESTED = Case("nested get", lambda kv: kv.state("nested", dict[str, list[int]]), _nested,
    "s.copy(k)", {})  # fmt: skip

_GET = {"dict": "d[k]", "dict + msgpack": "unpackb(p[k])", "lmdb": "unpackb(txn.get(k.encode()))",
    "rocksdict": "unpackb(r[k.encode()])"}  # fmt: skip
_SET = {"dict": "d[k] = v", "dict + msgpack": "p[k] = packb(v)",
    "lmdb": "txn.put(k.encode(), packb(v))", "rocksdict": "r[k.encode()] = packb(v)"}  # fmt: skip
_WHOLE_GET = {name: _GET[name] for name in ("dict + msgpack", "lmdb")}
_WHOLE_SET = {name: _SET[name] for name in ("dict + msgpack", "lmdb")}
_CHANGE = "x = unpackb(p[k]); {}; p[k] = packb(x)"

CASES = [
    replace(INT, others=_GET, promises=(at_most("dict + msgpack", 0.7), faster("lmdb", 2.5),
        faster("rocksdict", 4.5), at_most("dict", 3.5, hot=True))),
    replace(INT, name="int set", statement="s[k] = v", others=_SET,
        promises=(at_most("dict + msgpack", 0.6), faster("lmdb", 4), faster("rocksdict", 10),
            at_most("dict", 5, hot=True))),
    replace(INT, name="int add", statement="s.add(k, 1)",
        others={"dict": "d[k] += 1", "dict + msgpack": _CHANGE.format("x += 1")},
        promises=(at_most("dict + msgpack", 0.6), at_most("dict", 4, hot=True))),
    replace(INT, name="int miss with default", declare=_with_default, statement="s[k + '?']",
        others={"statekit hit": "s[k]", "dict": "d.get(k + '?', 0)"},
        promises=(at_most("statekit hit, as long a key", 1),)),
    replace(BYTES, others={"dict": "d[k]", "lmdb": "txn.get(k.encode())"},
        promises=(faster("lmdb", 1.3),)),
    replace(BYTES, name="bytes 100 set", statement="s[k] = v",
        others={"dict": "d[k] = v", "lmdb": "txn.put(k.encode(), v)"},
        promises=(faster("lmdb", 1.7),)),
    replace(CLASS, others={"dict + msgspec": "decode(p[k])",
        "lmdb + msgspec": "decode(txn.get(k.encode()))"},
        promises=(faster("lmdb + msgspec", 1.2),)),
    replace(CLASS, name="dataclass set", statement="s[k] = v",
        others={"dict + msgspec": "p[k] = encode(v)",
            "lmdb + msgspec": "txn.put(k.encode(), encode(v))"},
        promises=(faster("lmdb + msgspec", 1.2),)),
    *[case for of in (LIST, MAP, NESTED) for case in (
        replace(of, others=_WHOLE_GET, promises=(faster("lmdb", 1),)),
        replace(of, name=of.name.replace("get", "set"), statement="s[k] = v", others=_WHOLE_SET,
            promises=(faster("lmdb", 1),)))],
    replace(MAP, name="map get of an element", statement="s[k]['field-5']",
        others={"dict + msgpack": "unpackb(p[k])['field-5']"},
        promises=(Promise("dict + msgpack", 5, False, hot=True),)),
    replace(MAP, name="map put of an element", statement="s[k]['field-5'] = 7",
        others={"dict + msgpack": _CHANGE.format("x['field-5'] = 7")},
        promises=(Promise("dict + msgpack", 5, False, hot=True),)),
    replace(LIST, name="list append", statement="s[k].append(7)",
        others={"dict + msgpack": _CHANGE.format("x.append(7)")},
        promises=(Promise("dict + msgpack", 5, False, hot=True),)),
    replace(LIST, name="list index", statement="s[k][5]",
        others={"dict + msgpack": "unpackb(p[k])[5]"}),
]  # fmt: skip


class Bench:
    """A case, with its state and its contenders loaded."""

    def __init__(self, case: Case, sizes: Sizes, folder: str) -> None:
        self.case, self.sizes = case, sizes
        self.kv = sk.open("memory:")
        self.state = case.declare(self.kv)
        self.entries = [(f"user-{i:07d}", case.make(i)) for i in range(sizes.keys)]
        pack = eval(f"lambda v: {case.pack}", {"packb": packb, "encode": msgspec.msgpack.encode})
        packed = [(key, pack(value)) for key, value in self.entries]
        self.env = lmdb.open(f"{folder}/lmdb-{case.name}", map_size=4 << 30, sync=False)
        self.rocks = Rdict(f"{folder}/rocks-{case.name}", Options(raw_mode=True))
        with self.env.begin(write=True) as txn:
            for key, value in packed:
                txn.put(key.encode(), value)
        for key, value in packed if "rocksdict" in case.others else ():
            self.rocks[key.encode()] = value
        for key, value in self.entries:
            self.state[key] = value
        self.names = {
            "s": self.state,
            "d": dict(self.entries),
            "p": dict(packed),
            "r": self.rocks,
            "packb": packb,
            "unpackb": unpackb,
            "encode": msgspec.msgpack.encode,
            "decode": msgspec.msgpack.Decoder(Profile).decode,
            "txn": None,
        }
        self.random = Random(1)

    def contender(self, name: str, statement: str, hot: bool) -> Contender:
        loop = compile_loop(statement, [*self.names])

        def prepare() -> Any:
            if hot:
                # Lists grow by the round, so several take turns, and each round begins with short
                # ones: what is compared is small containers.
                keys = APPENDED if "append" in self.case.name else 1
                for key, value in self.entries[:keys] if keys > 1 else ():
                    self.state[key], self.names["p"][key] = value, packb(value)
                pairs = self.entries[:keys] * (len(self.entries) // keys)
            else:  # other objects than those of the load, as keys that come from outside are
                pairs = [(str(key.encode(), "ascii"), value) for key, value in self.entries]
                self.random.shuffle(pairs)
            writes = "put" in statement
            return pairs, self.names | {"txn": self.env.begin(write=writes)}

        def run(given: Any) -> None:
            pairs, names = given
            loop(pairs, **names)

        return Contender(name, run, prepare, self.sizes.keys)

    def times(self, hot: bool) -> dict[str, list[float]]:
        case = self.case
        statements = {"statekit": case.statement, **case.others}
        if "miss" in case.name:  # a hit that makes as long a key first
            statements["statekit hit, as long a key"] = "s[k + '?'[:0]]"
        found = [self.contender(name, text, hot) for name, text in statements.items()]
        measure(found, 1)
        return measure(found, self.sizes.rounds)

    def close(self) -> None:
        self.kv.close()
        self.rocks.close()
        self.env.close()


def run_case(report: Report, case: Case, sizes: Sizes) -> None:
    with scratch_folder() as folder:
        bench = Bench(case, sizes, folder)
        gc.freeze()
        for hot in (False, True):
            temperature = "hot" if hot else "cold"
            times = bench.times(hot)
            table = report.series.setdefault("ns per call", {}).setdefault(case.name, {})
            table[temperature] = medians(times)
            shown = ", ".join(f"{name} {ns:,.0f}" for name, ns in medians(times).items())
            print(f"     {case.name}, {temperature}: {shown} ns", flush=True)
            for promise in case.promises:
                if promise.hot != hot:
                    continue
                slow, fast = promise.against, "statekit"
                if promise.of_time:
                    slow, fast = fast, slow
                report.add(
                    Row(
                        f"{case.name}, {temperature}, vs {promise.against}",
                        ratio(times, slow, fast),
                        "x the time" if promise.of_time else "x",
                        promise.bound,
                        promise.of_time,
                        {f"{name} ns": ns for name, ns in medians(times).items()},
                    )
                )
        gc.unfreeze()
        bench.close()


def main() -> None:
    given = arguments(__doc__ or "")
    sizes = QUICK if given.quick else Sizes()
    report = Report("single_quick" if given.quick else "single")
    chosen = (case for case in CASES if given.only in case.name)
    for case in islice(chosen, len(CASES)):
        run_case(report, case, sizes)
    report.write(keep=bool(given.only))


if __name__ == "__main__":
    main()
