"""Orders that torch's own schedule classes write."""

import csv
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from axrt.scheduler.job import Job
from axrt.scheduler.order import Order
from axrt.scheduler.policies import Fixed
from axrt.scheduler.simulation.costs import Costs, Work
from axrt.scheduler.simulation.simulator import simulate
from axrt.scheduler.task import Kind

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
RANKS, MICROBATCHES = 4, 8


def made_by_torch(name: str, chunks: int, ranks: int = RANKS, microbatches: int = 8) -> Any:
    """A schedule of torch's, of stages that compute nothing."""
    stage = SimpleNamespace(
        group_size=ranks,
        num_stages=ranks * chunks,
        stage_index=0,
        group_rank=0,
        has_backward=True,
        is_first=True,
        is_last=False,
        group=None,
        submod=None,
    )
    return getattr(schedules, name)([stage] * chunks, microbatches, loss_fn=lambda *_: None)


def dumped(made: Any, folder: Path, with_communication: bool = False) -> str:
    """The file that torch itself writes of a schedule."""
    file = folder / "order.csv"
    if isinstance(made, schedules._PipelineScheduleRuntime):
        made._dump_csv(str(file), "compute_comms" if with_communication else "compute_only")
    else:
        made._dump_csv(str(file))
    return file.read_text()


def written(name: str, chunks: int, has_bubbles: bool = True) -> str:
    """What a class of torch's writes for 4 ranks and 8 microbatches."""
    made = made_by_torch(name, chunks)
    text = io.StringIO()
    writer = csv.writer(text)
    for _, row in sorted(made.pipeline_order.items()):
        cells = ["" if one is None else str(one) for one in row]
        writer.writerow(cells if has_bubbles else filter(None, cells))
    return text.getvalue()


def makespan(order: Order) -> float:
    job = Job(order.placement, Fixed(order, order.needs), order.microbatches)
    return simulate(job, Costs(Work(1, 1, 1)), steps=1).makespan


@pytest.mark.parametrize(
    ("name", "placement", "expected"),
    [
        ("ScheduleInterleaved1F1B", "looped", 28.5),
        ("ScheduleInterleavedZeroBubble", "looped", 25.5),
        ("ScheduleZBVZeroBubble", "vee", 25.5),
        ("ScheduleLoopedBFS", "looped", None),
        ("ScheduleDualPipeV", "vee", None),
    ],
)
def test_an_order_of_torch_runs_as_it_is(
    name: str, placement: str, expected: float | None, tmp_path: Path
) -> None:
    order = Order.parse(dumped(made_by_torch(name, chunks=2), tmp_path))
    assert order.placement.name.startswith(placement)
    assert order == Order.parse(written(name, chunks=2, has_bubbles=False))
    took = makespan(order)
    assert took < 40
    if expected:
        assert took == pytest.approx(expected)


@pytest.mark.parametrize("name", ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_the_form_with_communication_is_the_same_order(name: str, tmp_path: Path) -> None:
    made = made_by_torch(name, chunks=2)
    if made.pipeline_order_with_comms is None:
        made._prepare_schedule_with_comms(made.pipeline_order)
    text = dumped(made, tmp_path, with_communication=True)
    assert "SEND" in text
    assert Order.parse(text) == Order.parse(dumped(made, tmp_path))


def test_a_whole_backward_among_split_ones_becomes_its_two_halves() -> None:
    order = Order.parse(written("ScheduleDualPipeV", chunks=2))
    assert {task.kind for row in order.rows for task in row} == {
        Kind.FORWARD,
        Kind.INPUT,
        Kind.WEIGHT,
    }
    assert (
        Order.parse("0F0,0F1,0I0,0W0,0B1\n").rows
        == Order.parse("F0.0,F0.1,I0.0,W0.0,I0.1,W0.1\n").rows
    )


def test_backwards_in_another_order_run_in_that_of_microbatches() -> None:
    text = "0F0,0F1,0F2,,0B2,0B1,0B0\n1F0,1F1,1F2,1B2,1B1,1B0\n"
    assert (
        Order.parse(text).rows
        == Order.parse("F0.0,F0.1,F0.2,B0.0,B0.1,B0.2\nF1.0,F1.1,F1.2,B1.0,B1.1,B1.2\n").rows
    )


def test_communication_is_left_to_axrt_and_bubbles_are_no_tasks() -> None:
    text = "0F0,0SEND_F0,,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    assert Order.parse(text).rows == Order.parse("F0.0,B0.0\nF1.0,B1.0\n").rows


@pytest.mark.parametrize("cell", ["0X0", "0F", "F0.1", "(0F0;1Q0)OVERLAP_F_B"])
def test_what_is_no_cell_is_named(cell: str) -> None:
    with pytest.raises(ValueError, match=r"line 1: .* is no cell of torch's"):
        Order.parse(f"0F0,0B0,{cell}\n")
