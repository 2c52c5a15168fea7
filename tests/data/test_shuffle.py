"""Orders of which any place can be asked for."""

import tracemalloc

import numpy as np
import pytest

from axrt.data.shuffle import Shuffle


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 7, 16, 17, 255, 1000, 4097])
def test_every_number_comes_once(number: int) -> None:
    orders = [
        [order[n] for n in range(number)] for order in (Shuffle(number, 3, e) for e in (0, 1))
    ]
    assert [sorted(order) for order in orders] == [list(range(number))] * 2
    assert number < 5 or orders[0] != orders[1]
    again = Shuffle(number, 3, 0)
    assert [again[n] for n in range(number)] == orders[0]


def test_it_looks_random() -> None:
    """Numbers of a part are spread evenly, and neighbours are not alike: chi squared and serial
    correlation, each within four standard deviations."""
    number, cells = 1 << 17, 64
    order = Shuffle(number, 11)
    found = np.array([order[n] for n in range(number)])
    first = np.bincount(found[: number // 8] * cells // number, minlength=cells)
    expected = number / 8 / cells
    # drawn without putting back, an eighth of all: chi squared is smaller by 7/8
    chi = float(((first - expected) ** 2).sum() / expected) / (7 / 8)
    assert abs(chi - (cells - 1)) < 4 * (2 * (cells - 1)) ** 0.5
    correlation = float(np.corrcoef(found[:-1], found[1:])[0, 1])
    assert abs(correlation) < 4 / number**0.5


def test_a_place_of_very_many_takes_no_memory() -> None:
    tracemalloc.start()
    order = Shuffle(1 << 40, 5)
    found = {order[(1 << 40) - 1 - n] for n in range(1000)}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found) == 1000
    assert max(found) < 1 << 40
    assert peak < 1 << 20
