"""The tool that interrupts at every line finds the bugs that it is meant to find."""

import threading

import pytest
from interrupts import Run, each_point


class Account:
    """Something with a lock and two numbers that must agree."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.paid = self.booked = 0


def careless(account: Account) -> None:
    account.paid += 1
    account.booked += 1


def careful(account: Account) -> None:
    before = account.paid, account.booked
    try:
        account.paid += 1
        account.booked += 1
    except BaseException:
        account.paid, account.booked = before
        raise


def unlocked_late(account: Account) -> None:
    account.lock.acquire()
    try:
        account.paid += 1
        account.booked += 1
    finally:
        account.lock.release()


def in_a_loop(account: Account) -> None:
    for _ in range(100):
        careful(account)


def agrees(account: Account, run: Run) -> None:
    assert account.paid == account.booked
    assert account.lock.acquire(blocking=False), "the lock is held for ever"


def test_a_half_done_change_is_found_and_its_line_named() -> None:
    with pytest.raises(AssertionError) as caught:
        list(each_point(Account, careless, agrees, files=[__file__]))
    assert "(careless)" in caught.value.__notes__[0]


def test_a_step_that_undoes_what_it_did_passes_at_every_line() -> None:
    runs = list(each_point(Account, careful, agrees, files=[__file__]))
    assert len({run.place.line for run in runs}) == len(runs) == 4
    assert all(run.is_interrupted for run in runs)


def test_a_lock_that_an_interrupt_leaves_locked_is_found() -> None:
    with pytest.raises(AssertionError, match="for ever"):
        list(each_point(Account, unlocked_late, lambda a, run: agrees(a, run), files=[__file__]))


def test_an_interrupt_comes_between_a_call_and_the_assignment_of_its_result() -> None:
    opened: list[Account] = []

    def take(account: Account) -> None:
        with account.lock:
            mine = use(account)
            opened.remove(mine)

    def use(account: Account) -> Account:
        opened.append(account)
        return account

    def kept_or_not(account: Account, run: Run) -> None:
        places.append((run.place.after >= 0, bool(opened)))
        opened.clear()

    places: list[tuple[bool, bool]] = []
    list(each_point(Account, take, kept_or_not, files=[__file__], calls=True))
    assert (True, True) in places, "after use() returned and before `mine` was there"


def test_of_a_loop_the_first_rounds_and_the_last_one_are_tried() -> None:
    runs = list(each_point(Account, in_a_loop, agrees, files=[__file__]))
    visits = {run.place.visit for run in runs if run.place.code is careful.__code__}
    assert visits == {1, 2, 100}


def test_other_threads_are_left_alone() -> None:
    def step(account: Account) -> None:
        thread = threading.Thread(target=careless, args=(account,))
        thread.start()
        thread.join()

    def done(account: Account, run: Run) -> None:
        assert account.paid == account.booked
        names.add(run.place.code.co_name)

    names: set[str] = set()
    list(each_point(Account, step, done, files=[__file__]))
    assert names == {"step"}


def with_lock(account: Account) -> int:
    with account.lock:
        before = account.paid
        if before > 100:
            return before
        for _ in range(2):
            with account.lock if before else threading.Lock():
                pass
    with account.lock:
        return account.paid


def test_a_lock_of_a_with_is_safe_as_it_is_in_life() -> None:
    def unlocked(account: Account, run: Run) -> None:
        assert account.lock.acquire(blocking=False), "the lock is held for ever"

    for calls in (False, True):
        runs = list(each_point(Account, with_lock, unlocked, files=[__file__], calls=calls))
        assert all(run.is_interrupted for run in runs)
        assert len(runs) >= 6
