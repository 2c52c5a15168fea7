"""How long a rank that waits sleeps between looks."""

from types import SimpleNamespace

import pytest

from axrt.transport import waiting


def pauses(monkeypatch: pytest.MonkeyPatch, until_s: float) -> list[tuple[float, float]]:
    """When each begins, after so much waiting, and how long it is, in seconds; by a clock that
    stands still between them."""
    now, taken = [0.0], []

    def sleep(seconds: float) -> None:
        taken.append((now[0], seconds))
        now[0] += seconds

    monkeypatch.setattr(waiting, "time", SimpleNamespace(perf_counter=lambda: now[0], sleep=sleep))
    patience = waiting.Patience()
    while now[0] < until_s:
        patience.pause()
    return taken


def test_pauses_grow_with_the_wait_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = pauses(monkeypatch, until_s=0.5)
    assert [pause for _, pause in taken] == sorted(pause for _, pause in taken)
    assert taken[0] == (0.0, 20e-6)
    assert all(pause <= max(20e-6, 0.1 * waited) for waited, pause in taken)
    assert {pause for waited, pause in taken if 0.002 < waited < 0.02} == {120e-6}
    assert taken[-1][1] == 800e-6


def test_whoever_has_just_heard_something_looks_soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    monkeypatch.setattr(
        waiting, "time", SimpleNamespace(perf_counter=lambda: 10.0 * len(taken), sleep=taken.append)
    )
    patience = waiting.Patience()
    for _ in range(5):
        patience.pause()
    assert taken[-1] == 800e-6
    patience.reset()
    for _ in range(4):
        patience.pause()
    assert taken[-1] == 20e-6


def test_no_pause_is_longer_than_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    taken: list[float] = []
    clock = SimpleNamespace(perf_counter=lambda: now[0], sleep=taken.append)
    monkeypatch.setattr(waiting, "time", clock)
    patience = waiting.Patience()
    for left_s in (1.0, 1.0, 1.0, 15e-6, -1e-6):
        patience.pause(now[0] + left_s)
    assert taken == [pytest.approx(15e-6, abs=1e-9), 0.0]
