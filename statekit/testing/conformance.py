"""What every home must do, as tests: subclass HomeConformance and run pytest.

    from statekit.testing import HomeConformance

    class TestMyHome(HomeConformance):
        def open_home(self, tmp_path):
            return MyHome(tmp_path / "state")

Only pytest is needed, for its fixture tmp_path: a directory of its own for each test. A home on a
server makes a name of its own from it, such as a prefix of its keys.
"""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from statekit.errors import HomeError
from statekit.homes.home import Change, Home, Row, row_name

__all__ = ["HomeConformance"]

_LEAF_MAX = 2**20 - 1  # of a provider
_COMMITS = 2**31 - 1  # records of commits
_PENDING = 2**31  # from here on: pending rows
_ROW_LEAF_MAX = 2**32 - 2
_STATE_MAX = 2**16 - 1
_KEY_BYTES_MAX = 2**16

# Keys that are prefixes of each other, or that a home may spoil if it takes keys for text, uses
# separators or sorts.
_KEYS = (
    b"",
    b"\0",
    b"\0\0",
    b"a",
    b"a\0",
    b"a\0b",
    b"ab",
    b"a:b",
    b"a/b",
    b"{a}",
    b"%00",
    b"'\"\\",
    b"\r\n",
    b" ",
    b"None",
    b"\xc3\xa4",
    b"\x80",
    b"\xff",
    b"\xff\xff",
    b"\xff" * 40,
    bytes(range(256)),
)


class HomeConformance:
    """Tests of a home. Subclass it under a name that starts with "Test"; give it open_home()."""

    #: False for a home that forgets everything when it is closed.
    persistent = True
    #: How many random operations are tried, and from which seed; None draws one and prints it.
    random_count = 300
    random_seed: int | None = None

    def open_home(self, tmp_path: Path) -> Home:
        """A home that belongs to tmp_path: new at the first call, the same one at later calls.

        The home of the call before is closed by then, unless a test says otherwise.
        """
        raise NotImplementedError(f"{type(self).__name__} must define open_home(self, tmp_path)")

    # -- rows ------------------------------------------------------------------------------

    def test_new_home_is_empty(self, tmp_path: Path) -> None:
        with self._opened(tmp_path) as home:
            assert list(home.get([(0, 0, b"a"), (1, 2, b"")])) == [None, None]
            assert list(home.load(0, 0)) == []
            assert home.read_meta() is None

    def test_no_rows_and_no_changes_are_fine(self, tmp_path: Path) -> None:
        with self._opened(tmp_path) as home:
            home.write([])
            assert list(home.get([])) == []
            home.clear(3, 3)
            home.flush()

    def test_row_is_put_replaced_and_deleted(self, tmp_path: Path) -> None:
        row = (7, 1, b"alice")
        with self._opened(tmp_path) as home:
            for value in (b"one", b"the second one is longer", b"3"):
                home.write([(row, value)])
                assert list(home.get([row])) == [value]
                assert list(home.load(7, 1)) == [(b"alice", value)]
            home.write([(row, None)])
            assert list(home.get([row])) == [None]
            assert list(home.load(7, 1)) == []

    def test_deleting_what_is_not_there_is_fine(self, tmp_path: Path) -> None:
        with self._opened(tmp_path) as home:
            home.write([((0, 0, b"a"), None), ((0, 0, b"b"), b"1"), ((9, 9, b"c"), None)])
            assert list(home.load(0, 0)) == [(b"b", b"1")]

    def test_get_answers_in_order_with_misses_and_repeats(self, tmp_path: Path) -> None:
        a, b, c, miss = (5, 0, b"a"), (1, 0, b"b"), (5, 1, b"c"), (5, 0, b"no")
        with self._opened(tmp_path) as home:
            home.write([(a, b"A"), (b, b"B"), (c, b"C")])
            asked = [c, miss, a, b, a, miss, c, b, a]
            answers = list(home.get(asked))
            assert answers == [b"C", None, b"A", b"B", b"A", None, b"C", b"B", b"A"]

    def test_values_may_be_empty_and_large(self, tmp_path: Path) -> None:
        values = [b"", b"\0", b"\xff" * 3, bytes(range(256)), random.Random(1).randbytes(2**20)]
        changes: list[Change] = [((2, 0, b"%d" % at), value) for at, value in enumerate(values)]
        with self._opened(tmp_path) as home:
            home.write(changes)
            self._expect(home, changes)
            assert home.get([(2, 0, b"0")])[0] == b"", "an empty value is no missing row"

    def test_keys_are_any_bytes(self, tmp_path: Path) -> None:
        long = [b"k" * length for length in (255, 256, 1024, _KEY_BYTES_MAX - 1, _KEY_BYTES_MAX)]
        changes: list[Change] = [
            ((4, 2, key), b"value of %d" % at) for at, key in enumerate((*_KEYS, *long))
        ]
        with self._opened(tmp_path) as home:
            home.write(changes)
            self._expect(home, changes)

    def test_leaves_and_states_are_kept_apart(self, tmp_path: Path) -> None:
        leaves = [0, 1, 2, 11, 12, 112, 255, 256, 65535, 65536, _LEAF_MAX - 1, _LEAF_MAX]
        leaves += [_COMMITS, _PENDING, _PENDING + 1, _PENDING + _LEAF_MAX, _ROW_LEAF_MAX]
        states = (0, 1, 2, 11, 12, 255, 256, _STATE_MAX - 1, _STATE_MAX)
        keys = (b"", b"\0", b"1", b"2:1", b"\xff\xff")
        changes: list[Change] = [
            ((leaf, state, key), b"%d/%d/" % (leaf, state) + key)
            for leaf in leaves
            for state in states
            for key in keys
        ]
        with self._opened(tmp_path) as home:
            home.write(changes)
            self._expect(home, changes)

    def test_ten_thousand_changes_in_one_write(self, tmp_path: Path) -> None:
        changes: list[Change] = [
            ((at % 16, at % 3, b"key-%d" % at), b"value-%d" % at) for at in range(10_000)
        ]
        mixed: list[Change] = [
            (row, None if at % 2 else b"new") for at, (row, _) in enumerate(changes)
        ]
        with self._opened(tmp_path) as home:
            home.write(changes)
            self._expect(home, changes)
            home.write(mixed)
            self._expect(home, mixed)

    def test_clear_deletes_the_rows_of_one_leaf_and_state_only(self, tmp_path: Path) -> None:
        around = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (2, 1), (11, 1), (1, 11), (_LEAF_MAX, 1)]
        around += [(1, _STATE_MAX), (_LEAF_MAX, _STATE_MAX), (257, 1), (65536, 1)]
        for cleared in ((1, 1), (0, 0), (_LEAF_MAX, _STATE_MAX)):
            changes: list[Change] = [
                ((leaf, state, key), b"v") for leaf, state in around for key in _KEYS
            ]
            left: list[Change] = [
                (row, None if row[:2] == cleared else value) for row, value in changes
            ]
            with self._opened(tmp_path) as home:
                assert home.write_meta(b"meta", home.read_meta())
                home.write(changes)
                home.clear(*cleared)
                self._expect(home, left)
                assert home.read_meta() == b"meta"
                home.write([((*cleared, b"again"), b"1")])
                assert list(home.load(*cleared)) == [(b"again", b"1")]
                home.clear(*cleared)

    def test_clear_leaves_deletes_the_rows_of_a_range_of_leaves_only(self, tmp_path: Path) -> None:
        states = 3
        for base in (0, _PENDING):
            changes: list[Change] = [
                ((leaf, state, key), b"v")
                for leaf in (*range(base, base + 8), _COMMITS, _LEAF_MAX, _PENDING + _LEAF_MAX)
                for state in range(states)
                for key in (b"", b"a", b"\xff\xff")
            ]
            for cleared in (range(base + 2, base + 5), range(base, base + 1), range(base, base)):
                with self._opened(tmp_path) as home:
                    assert home.write_meta(b"meta", home.read_meta())
                    home.write(changes)
                    home.clear_leaves(cleared, states)
                    left = [(row, None if row[0] in cleared else v) for row, v in changes]
                    self._expect(home, left)
                    assert home.read_meta() == b"meta"

    def test_write_rows_clears_first_and_the_last_of_a_row_counts(self, tmp_path: Path) -> None:
        for leaf in (3, _PENDING + 3, _COMMITS):
            a, b, c = ((leaf, 1, key) for key in (b"a", b"b", b"c"))
            other = (leaf, 2, b"a")
            with self._opened(tmp_path) as home:
                home.write([(a, b"old"), (b, b"old"), (c, b"old"), (other, b"old")])
                home.write_rows(_named((a, b"1"), (b, b"2"), (a, None), (b, b"3"), (c, None)))
                self._expect(home, [(a, None), (b, b"3"), (c, None), (other, b"old")])
                home.write_rows(_named((c, None), (c, b"4")), durable=True)
                self._expect(home, [(a, None), (b, b"3"), (c, b"4"), (other, b"old")])
                home.write_rows(_named((a, b"5"), (other, b"new")), cleared=[(leaf, 1)])
                self._expect(home, [(a, b"5"), (b, None), (c, None), (other, b"new")])
                home.write_rows([], cleared=[(leaf, 1), (leaf, 2)], durable=True)
                self._expect(home, [(a, None), (b, None), (c, None), (other, None)])
                home.write_rows([])

    def test_write_rows_takes_any_key_and_many_rows(self, tmp_path: Path) -> None:
        changes: list[Change] = [
            ((leaf, state, key), b"%d" % leaf + key)
            for leaf in (0, _COMMITS, _PENDING, _PENDING + _LEAF_MAX, _ROW_LEAF_MAX)
            for state in (0, _STATE_MAX)
            for key in (*_KEYS, *(b"key-%d" % at for at in range(1000)))
        ]
        with self._opened(tmp_path) as home:
            home.write_rows(_named(*changes), durable=True)
            self._expect(home, changes)
        if self.persistent:
            with self._opened(tmp_path) as home:
                self._expect(home, changes)

    def test_load_that_is_not_read_to_its_end_harms_nothing(self, tmp_path: Path) -> None:
        changes: list[Change] = [((1, 1, b"%d" % at), bytes(100)) for at in range(3000)]
        with self._opened(tmp_path) as home:
            home.write(changes)
            rows = iter(home.load(1, 1))
            next(rows)
            home.write([((2, 1, b"other"), b"1")])
            assert list(home.get([(2, 1, b"other")])) == [b"1"]
        with self._opened(tmp_path) as home:  # `rows` is still there, and holds no lock
            home.write([((2, 1, b"other"), b"2")])

    def test_snapshot_is_of_one_moment(self, tmp_path: Path) -> None:
        before: list[Change] = [
            ((leaf, state, b"%d" % at), b"%d" % at)
            for leaf in (0, 1, _LEAF_MAX)
            for state in (0, 1, _STATE_MAX)
            for at in range(1500)
        ]
        with self._opened(tmp_path) as home:
            home.write(before)
            first = home.snapshot()
            if first is None:
                import pytest  # here only, so that this module can be imported without it

                pytest.skip("this home has no snapshots: a checkpoint copies rows before writes")
            home.write([(row, None if at % 2 else b"new") for at, (row, _) in enumerate(before)])
            home.write([((1, 1, b"another"), b"1"), ((2, 2, b"leaf"), b"2")])
            second = home.snapshot()
            assert second is not None
            home.clear(1, 1)
            for leaf, state in sorted({row[:2] for row, _ in before}):
                assert sorted(first.load(leaf, state)) == _rows_of(dict(before), leaf, state)
            assert list(first.load(2, 2)) == []
            assert list(second.load(2, 2)) == [(b"leaf", b"2")]
            assert (b"another", b"1") in list(second.load(1, 1))
            assert list(home.load(1, 1)) == []
            for _ in range(2):
                first.close()
                second.close()
        with self._opened(tmp_path) as home:  # it kept no lock
            home.write([((0, 0, b"again"), b"1")])

    # -- meta ------------------------------------------------------------------------------

    def test_meta_is_replaced_only_by_those_who_know_it(self, tmp_path: Path) -> None:
        with self._opened(tmp_path) as home:
            assert home.write_meta(b"x", b"") is False, "there is none, which is not an empty one"
            assert home.write_meta(b"x", b"y") is False
            assert home.read_meta() is None
            assert home.write_meta(b"one", None) is True
            assert home.write_meta(b"one", None) is False, "there is one by now"
            assert home.write_meta(b"two", b"other") is False
            assert home.read_meta() == b"one"
            assert home.write_meta(b"\0two\xff", b"one") is True
            assert home.read_meta() == b"\0two\xff"
            assert home.write_meta(b"", b"\0two\xff") is True
            assert home.read_meta() == b""
            assert home.write_meta(b"x", None) is False, "an empty one is one"
            large = random.Random(2).randbytes(2**20)
            assert home.write_meta(large, b"") is True
            assert home.read_meta() == large

    def test_meta_and_rows_do_not_touch_each_other(self, tmp_path: Path) -> None:
        corners = [(leaf, state) for leaf in (0, _LEAF_MAX) for state in (0, _STATE_MAX)]
        changes: list[Change] = [
            ((*corner, key), b"v") for corner in corners for key in (*_KEYS, b"meta")
        ]
        with self._opened(tmp_path) as home:
            assert home.write_meta(b"the meta", None)
            self._expect(home, [(row, None) for row, _ in changes])
            home.write(changes)
            assert home.read_meta() == b"the meta"
            self._expect(home, changes)

    def test_meta_is_replaced_while_another_thread_writes(self, tmp_path: Path) -> None:
        """What write_meta() has said is so stays, and no write fails because of it."""
        rounds = 200
        with self._opened(tmp_path) as home:
            assert home.write_meta(b"0", home.read_meta())
            is_done = threading.Event()

            def write() -> None:
                try:
                    for number in range(rounds):
                        value = b"%d" % number
                        home.write([((1, 1, b"key-%d" % at), value) for at in range(20)])
                finally:
                    is_done.set()

            def replace() -> None:
                number = 0
                while not is_done.is_set():
                    assert home.write_meta(b"%d" % (number + 1), b"%d" % number)
                    number += 1
                    assert home.read_meta() == b"%d" % number

            _run_together([write, replace])
            self._expect(home, [((1, 1, b"key-%d" % at), b"%d" % (rounds - 1)) for at in range(20)])

    def test_one_of_several_threads_replaces_the_meta(self, tmp_path: Path) -> None:
        with self._opened(tmp_path) as home:
            won: list[int] = []

            def replace(number: int) -> None:
                if home.write_meta(b"%d" % number, None):
                    won.append(number)

            _run_together([partial(replace, number) for number in range(8)])
            assert len(won) == 1
            assert home.read_meta() == b"%d" % won[0]

    # -- opening and closing ---------------------------------------------------------------

    def test_what_was_flushed_is_there_after_reopening(self, tmp_path: Path) -> None:
        if not self.persistent:
            import pytest  # here only, so that this module can be imported without it

            pytest.skip("this home forgets everything when it is closed")
        changes: list[Change] = [((at % 4, at % 2, b"%d" % at), b"v" * at) for at in range(500)]
        with self._opened(tmp_path) as home:
            home.write(changes)
            assert home.write_meta(b"meta", None)
            home.flush()
        with self._opened(tmp_path) as home:
            self._expect(home, changes)
            assert home.read_meta() == b"meta"
            home.write([(row, None) for row, _ in changes[:250]])
            home.clear(3, 1)
            home.flush()
        left: list[Change] = [
            (row, None if at < 250 or row[:2] == (3, 1) else value)
            for at, (row, value) in enumerate(changes)
        ]
        for _ in range(3):
            with self._opened(tmp_path) as home:
                self._expect(home, left)

    def test_close_twice_is_fine(self, tmp_path: Path) -> None:
        home = self.open_home(tmp_path)
        home.write([((0, 0, b"a"), b"1")])
        home.close()
        home.close()

    def test_closed_home_raises_home_error(self, tmp_path: Path) -> None:
        home = self.open_home(tmp_path)
        home.write([((0, 0, b"a"), b"1")])
        home.close()
        uses: dict[str, Callable[[], object]] = {
            "get": lambda: home.get([(0, 0, b"a")]),
            "get of two": lambda: home.get([(0, 0, b"a"), (0, 0, b"b")]),
            "load": lambda: list(home.load(0, 0)),
            "write": lambda: home.write([((0, 0, b"a"), b"1")]),
            "clear": lambda: home.clear(0, 0),
            "clear_leaves": lambda: home.clear_leaves(range(1), 1),
            "write_rows": lambda: home.write_rows(_named(((0, 0, b"a"), b"1"))),
            "read_meta": home.read_meta,
            "write_meta": lambda: home.write_meta(b"x", None),
        }
        for name, use in uses.items():
            try:
                use()
            except HomeError:
                continue
            raise AssertionError(f"{name}() of a closed home raised no HomeError")

    def test_metrics_are_numbers_by_name(self, tmp_path: Path) -> None:
        with self._opened(tmp_path) as home:
            home.write([((0, 0, b"a"), b"1")])
            for name, figure in home.metrics().items():
                assert isinstance(name, str)
                assert isinstance(figure, float), name

    # -- many operations -------------------------------------------------------------------

    def test_random_operations_agree_with_a_dict(self, tmp_path: Path) -> None:
        seed = random.randrange(2**32) if self.random_seed is None else self.random_seed
        print(f"random_seed = {seed}")  # pytest shows it if the test fails
        rng = random.Random(seed)
        leaves = (0, 1, 2, 256, _LEAF_MAX, _COMMITS, _PENDING, _PENDING + 1)
        states = (0, 1, _STATE_MAX)
        keys = [*_KEYS, *(rng.randbytes(rng.randrange(1, 12)) for _ in range(20))]
        rows = [(leaf, state, key) for leaf in leaves for state in states for key in set(keys)]
        model: dict[Row, bytes] = {}
        home = self.open_home(tmp_path)
        try:
            for _ in range(self.random_count):
                choice = rng.random()
                leaf, state = rng.choice(leaves), rng.choice(states)
                if choice < 0.45:
                    changes = [
                        (row, None if rng.random() < 0.3 else rng.randbytes(rng.randrange(40)))
                        for row in rng.sample(rows, rng.randrange(1, 30))
                    ]
                    if choice < 0.2:
                        home.write_rows(_named(*changes), durable=rng.random() < 0.5)
                    else:
                        home.write(changes)
                    for row, value in changes:
                        if value is None:
                            model.pop(row, None)
                        else:
                            model[row] = value
                elif choice < 0.8:
                    asked = rng.choices(rows, k=rng.choice((1, 1, 2, 50)))
                    assert list(home.get(asked)) == [model.get(row) for row in asked]
                elif choice < 0.92:
                    assert sorted(home.load(leaf, state)) == _rows_of(model, leaf, state)
                elif choice < 0.96:
                    home.clear(leaf, state)
                    model = {row: value for row, value in model.items() if row[:2] != (leaf, state)}
                elif self.persistent:
                    home.flush()
                    home.close()
                    home = self.open_home(tmp_path)
            for leaf in leaves:
                for state in states:
                    assert sorted(home.load(leaf, state)) == _rows_of(model, leaf, state)
        finally:
            home.close()

    def test_threads_read_while_another_writes_other_rows(self, tmp_path: Path) -> None:
        still: list[Change] = [
            ((at % 4, 0, b"still-%d" % at), b"%d" % at * 10) for at in range(1000)
        ]
        is_written = threading.Event()
        with self._opened(tmp_path) as home:
            home.write(still)

            def write() -> None:
                try:
                    for turn in range(30):
                        moving: list[Change] = [
                            ((at % 4, 1, b"%d" % at), None if turn % 3 == 2 else b"%d" % turn)
                            for at in range(300)
                        ]
                        home.write(moving)
                finally:
                    is_written.set()

            def read(seed: int) -> None:
                rng = random.Random(seed)
                is_last = False
                while not is_last:
                    is_last = is_written.is_set()  # at least one turn, and one after the writes
                    asked = rng.sample(still, rng.choice((1, 100)))
                    assert list(home.get([row for row, _ in asked])) == [v for _, v in asked]
                    leaf = rng.randrange(4)
                    assert sorted(home.load(leaf, 0)) == _rows_of(dict(still), leaf, 0)

            _run_together([write, *(partial(read, seed) for seed in range(3))])
            self._expect(home, still)

    # -- helpers ---------------------------------------------------------------------------

    @contextmanager
    def _opened(self, tmp_path: Path) -> Iterator[Home]:
        home = self.open_home(tmp_path)
        assert isinstance(home, Home), f"open_home() gave {home!r}, which is no statekit Home"
        try:
            yield home
        finally:
            home.close()

    @staticmethod
    def _expect(home: Home, changes: Sequence[Change]) -> None:
        """Asserts that the home holds these rows, and no others of the same leaves and states."""
        found = home.get([row for row, _ in changes])
        assert len(found) == len(changes), f"get() gave {len(found)} values for {len(changes)} rows"
        for (row, value), other in zip(changes, found, strict=True):
            assert other == value, f"get() of {_shown(row)} gave {_shown(other)}"
        for (row, value), other in zip(changes[:50], found, strict=False):
            assert list(home.get([row])) == [value], f"get() of {_shown(row)} alone"
            assert other is None or type(other) is bytes, f"get() gave a {type(other).__name__}"
        for leaf, state in sorted({row[:2] for row, _ in changes}):
            expected = sorted(
                (key, value)
                for (of_leaf, of_state, key), value in changes
                if (of_leaf, of_state) == (leaf, state) and value is not None
            )
            loaded = sorted(home.load(leaf, state))
            missing = [_shown(key) for key, _ in expected if key not in dict(loaded)]
            assert loaded == expected, (
                f"load({leaf}, {state}) gave {len(loaded)} rows of {len(expected)}; "
                f"missing: {missing[:5]}"
            )


def _rows_of(
    model: dict[Row, bytes | None] | dict[Row, bytes], leaf: int, state: int
) -> list[tuple[bytes, bytes | None]]:
    return sorted((row[2], value) for row, value in model.items() if row[:2] == (leaf, state))


def _named(*changes: Change) -> list[bytes | None]:
    """Changes as write_rows() takes them."""
    return [part for row, value in changes for part in (row_name(*row), value)]


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _run_together(calls: Sequence[Callable[[], None]]) -> None:
    """Runs each in a thread of its own; raises what one of them raised."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        try:
            start.wait()
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
