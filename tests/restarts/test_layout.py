"""The layout of a run on fewer ranks."""

import pytest

from axrt.config import Config
from axrt.restarts.layout import Layout, smaller_layouts, whole_layout


def config(**sections: object) -> Config:
    return Config.read({"model": {"layers": 6, "width": 8, "heads": 1}, **sections})


def test_replicas_go_first_and_the_batch_stays() -> None:
    of = config(parallel={"pipe": 2, "data": 4}, schedule={"microbatches": 6})
    whole = whole_layout(of, 8)
    assert (whole.pipe, whole.data, whole.microbatches) == (2, 4, 6)
    found = smaller_layouts(of, whole, 7)
    assert found[0][:3] == (2, 3, 8)
    assert [layout.step for layout in found] == sorted(layout.step for layout in found)
    assert all(layout.data * layout.microbatches == 24 for layout in found)
    assert all(layout.ranks <= 7 for layout in found)
    assert whole.step < found[0].step < 2 * whole.step


def test_a_number_that_does_not_divide_the_batch_is_left_out() -> None:
    of = config(parallel={"pipe": 1, "data": 4}, schedule={"microbatches": 1})
    assert smaller_layouts(of, whole_layout(of, 4), 3)[0][:3] == (1, 2, 2)


def test_pipelines_get_shorter_only_where_none_fits() -> None:
    of = config(parallel={"pipe": 4, "data": 1}, schedule={"microbatches": 8})
    whole = whole_layout(of, 4)
    assert {layout.pipe for layout in smaller_layouts(of, whole, 3)} == {3}
    assert smaller_layouts(of, whole, 3)[0].step > whole.step


@pytest.mark.parametrize("zero", [1, 3])
def test_groups_of_shards_stay_whole(zero: int) -> None:
    of = config(
        parallel={"pipe": 1, "data": 4, "group": 2},
        schedule={"microbatches": 3},
        memory={"zero": zero},
    )
    assert smaller_layouts(of, whole_layout(of, 4), 3)[0][:3] == (1, 2, 6)


def test_settings_are_those_of_a_command() -> None:
    assert Layout(2, 3, 8, 1.0).settings == [
        "parallel.pipe=2",
        "parallel.data=3",
        "schedule.microbatches=8",
    ]


def test_replicas_share_as_long_as_there_are_several() -> None:
    of = config(
        parallel={"pipe": 2, "data": 2},
        schedule={"microbatches": 4, "global_batch": 8, "share": True},
    )
    whole = whole_layout(of, 4)
    assert "schedule.share=true" in whole.settings
    one = smaller_layouts(of, whole, 3)[0]
    assert one[:3] == (2, 1, 8)
    assert "schedule.share=false" in one.settings
    three = config(parallel={"pipe": 2, "data": 3}, schedule={"microbatches": 4, "share": True})
    two = smaller_layouts(three, whole_layout(three, 6), 4)[0]
    assert two[:3] == (2, 2, 6)
    assert "schedule.share=true" in two.settings


def test_teams_stay_as_long_as_one_fits() -> None:
    of = Config.read(
        {
            "model": {"layers": 6, "width": 8, "heads": 4},
            "parallel": {"pipe": 2, "data": 2, "tensor": 2},
            "schedule": {"microbatches": 6},
        }
    )
    whole = whole_layout(of, 8)
    assert (whole.pipe, whole.data, whole.tensor, whole.ranks) == (2, 2, 2, 8)
    for ranks, expected in ((7, (2, 1, 2)), (3, (1, 1, 2)), (1, (1, 1, 1))):
        one = smaller_layouts(of, whole, ranks)[0]
        assert (one.pipe, one.data, one.tensor) == expected
        assert one.ranks <= ranks
        assert f"parallel.tensor={expected[-1]}" in one.settings
    assert smaller_layouts(of, whole, 7)[0].step > whole.step


def test_a_team_that_may_not_be_smaller_ends_the_run() -> None:
    """Members that have several shares do not let go what they gather."""
    of = Config.read(
        {
            "model": {"layers": 2, "width": 8, "heads": 4},
            "parallel": {"tensor": 2, "tensor_shards": 2, "gather_again": True},
            "schedule": {"microbatches": 2},
        }
    )
    assert smaller_layouts(of, whole_layout(of, 2), 1) == []
