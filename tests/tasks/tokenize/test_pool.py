"""The pool: results in order, whoever made them, and errors in their place."""

import threading
import time
from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from tasks.tokenize.pool import AHEAD_BYTES, TokenizePool, map_in_order, tokenize_pool
from tests.examples import examples
from tests.processes import in_threads


def large(_: object) -> int:
    """Bytes of a batch, half of those that a thread may work ahead."""
    return AHEAD_BYTES // 2


def doubled(number: int) -> int:
    if number < 0:
        raise ValueError(f"{number} cannot be doubled")
    return 2 * number


def taken(pool: TokenizePool, numbers: Iterator[int]) -> list[int | str]:
    """Results, and the message of an error where one ended them."""
    found = []
    try:
        with pool.results(numbers, doubled, large) as results:
            for result in results:
                found.append(result)
    except ValueError as error:
        found.append(str(error))
    return found


@examples(50)
@given(st.integers(1, 4), st.lists(st.lists(st.integers(-1, 9), max_size=20), min_size=1, max_size=4))
def test_each_gets_its_own_results_in_order(threads, several):
    """However many share the pool, up to the first error."""
    found = {}
    with TokenizePool(threads) as pool:

        def take(number: int) -> None:
            found[number] = taken(pool, iter(several[number]))

        in_threads(take, range(len(several)))
    for number, numbers in enumerate(several):
        good = numbers.index(-1) if -1 in numbers else len(numbers)
        assert found[number] == [*(2 * one for one in numbers[:good]), *(["-1 cannot be doubled"] if -1 in numbers else [])]


def test_an_error_of_reading_comes_behind_the_results_before_it():
    def numbers() -> Iterator[int]:
        yield 1
        raise ValueError("the file ends within a row")

    with TokenizePool(2) as pool:
        assert taken(pool, numbers()) == [2, "the file ends within a row"]


def test_all_threads_work_on_the_same_slice():
    """Each waits until all have a batch of it."""
    together = threading.Barrier(3)

    def work(number: int) -> int:
        together.wait(60)
        return number

    with TokenizePool(3) as pool, pool.results(iter(range(6)), work, large) as results:
        assert list(results) == list(range(6))


def noting(count: int, noted: list[int]) -> Iterator[int]:
    for number in range(count):
        noted.append(number)
        yield number


def test_a_slice_that_is_not_taken_from_does_not_fill_the_memory():
    """It is worked ahead on for some batches; then its turn comes when somebody takes results."""
    read = []
    with TokenizePool(2) as pool, pool.results(noting(50, read), doubled, large) as later:
        with pool.results(iter(range(50)), doubled, large) as results:
            assert list(results) == [2 * number for number in range(50)]
        assert len(read) <= 4
        assert list(later) == [2 * number for number in range(50)]


def test_earlier_slices_come_first():
    """A thread that is free takes a batch of the first slice that has one."""
    order = []
    gate = threading.Event()

    def work(name: str) -> str:
        gate.wait(60)
        order.append(name)
        return name

    with TokenizePool(1) as pool, pool.results(iter(["stop"]), work, large) as first:
        while not pool._slices[0].results:  # its thread waits at the gate
            time.sleep(0.001)
        with pool.results(iter(["a", "b"]), work, large) as early, pool.results(iter(["c"]), work, large) as late:
            gate.set()
            assert [*late, *early, *first] == ["c", "a", "b", "stop"]
    assert order == ["stop", "a", "b", "c"]


def test_who_stops_early_waits_for_what_is_under_way():
    """What the block uses, such as a file, may be closed behind it."""
    is_open = True
    flaws = []

    def work(number: int) -> int:
        time.sleep(0.01)
        if not is_open:
            flaws.append(number)
        return number

    with TokenizePool(3) as pool:
        with pool.results(iter(range(1000)), work, large) as results:
            assert next(results) == 0
        is_open = False
    assert flaws == []


def test_without_a_pool_the_thread_itself_does_the_work():
    def name(_: int) -> str:
        return threading.current_thread().name

    here = threading.current_thread().name
    with map_in_order(iter([1]), name, large) as results:
        assert list(results) == [here]
    with tokenize_pool(1), map_in_order(iter([1]), name, large) as results:
        assert list(results) == ["pool_0"]


def test_a_pool_ends_with_its_block():
    with TokenizePool(2) as pool:
        threads = list(pool._threads)
    assert [thread.is_alive() for thread in threads] == [False, False]


def test_a_batch_that_is_larger_than_all_that_is_worked_ahead_is_the_only_one():
    """Of its slice: long documents fill the memory one by one."""
    read = []
    with TokenizePool(3) as pool, pool.results(noting(5, read), doubled, lambda _: 10 * AHEAD_BYTES) as results:
        for number, result in enumerate(results):
            assert result == 2 * number
            assert len(read) <= number + 2  # what was taken makes room for the next one
