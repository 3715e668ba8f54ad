from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from confide.threads import in_order


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_in_order_and_few_items_wait(threads: int) -> None:
    taken = []

    def items() -> Iterator[int]:
        for number in range(50):
            taken.append(number)
            yield number

    def late(number: int) -> int:
        time.sleep(0.001 * (number % 3))
        return number * number

    results = in_order(late, items(), threads)
    assert next(results) == 0
    assert len(taken) <= 2 * threads + 3
    assert list(results) == [number * number for number in range(1, 50)]
    assert list(in_order(late, [], threads)) == []


def test_an_error_comes_where_its_result_is_due_and_no_thread_stays() -> None:
    before = threading.active_count()
    results = in_order(lambda number: 1 / (number - 2), range(9), 2)
    assert [next(results), next(results)] == [-0.5, -1.0]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert threading.active_count() == before
