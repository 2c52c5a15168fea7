"""What a run shows and says."""

import pytest

from axrt.observe.activity import Activity
from axrt.observe.diagnosis import WaitDiagnosis
from axrt.observe.live import Live
from axrt.observe.observer import Wait
from axrt.observe.progress import Plain, Quiet, Shown, progress_for
from axrt.scheduler.job import Job
from axrt.scheduler.message import Meaning, Message
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.rank_state import RankState


def test_a_rank_that_waits_long_names_what_it_lacks_and_who_owes_it() -> None:
    state = RankState(Job(Linear(3), policy_by_name("1f1b"), 1), 1)
    state.ask_step()
    now, said = [0.0], list[str]()

    def what() -> str:
        return "; ".join(str(lack) for lack in state.waiting_for())

    wait = Wait(what, lambda: "input", set[int])
    activity = Activity()
    diagnosis = WaitDiagnosis("1", activity, patience_s=60, say=said.append, now=lambda: now[0])
    for second in (0, 30, 61, 90, 125, 200):
        now[0] = second
        diagnosis.waiting(wait)
    activity.heard = 0, Message(Meaning.ACTIVATION, 1, 0)
    diagnosis.resumed()
    for second in (201, 260):
        now[0] = second
        diagnosis.waiting(wait)
    now[0] = 262
    diagnosis.waiting(wait)
    now[0] = 900
    diagnosis.entered()
    diagnosis.waiting(wait)
    assert len(said) == 3
    assert said[0].startswith(
        "axrt: rank 1 has waited 61 s: F1.0 lacks activation from rank 0; B1.0 lacks F; B1.0 lacks "
        "gradient from rank 2;"
    )
    assert said[1].startswith("axrt: rank 1 has waited 125 s")
    assert "last heard: activation 0 for stage 1 from rank 0." in said[2]


def test_the_live_display_shows_step_loss_rate_and_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Live(steps=10) as show:
        show.step(Shown(5, 2.5, 1e-3, 12345, ranks=2, mfu=0.25, idle={"input": 0.1}, left_s=61.2))
        show.say("step 5: [something] that stays")
    shown = capsys.readouterr().out
    shown = " ".join(shown.split())
    for text in (
        *("5/10", "loss 2.500", "lr 0.001", "12,345 tokens/s (6,172 a device)", "MFU 25.0%"),
        *("idle 10% (input 10%)", "0:01:01 left", "step 5: [something] that stays"),
    ):
        assert text in shown


def test_the_plain_display_ends_with_the_last_step(capsys: pytest.CaptureFixture[str]) -> None:
    with Plain(steps=2, every=3) as show:
        show.step(Shown(1, 2.5, 0.1, 10))
        show.step(Shown(2, 2.25, 0.1, 10, grad_norm=1.5, memory={"device": 2000}, left_s=0.4))
    assert capsys.readouterr().out == (
        "step 2/2  loss 2.250  lr 0.1  norm 1.5  10 tokens/s  device 2.00 kB  0:00:00 left\n"
    )


def test_a_pipe_gets_plain_lines_and_off_gets_none() -> None:
    assert type(progress_for("off", 1)) is Quiet
    assert type(progress_for("plain", 1)) is Plain
    assert type(progress_for("live", 1)) is Live
