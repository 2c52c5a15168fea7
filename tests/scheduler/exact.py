"""The shortest step of all, by a solver: OR-tools CP-SAT, which is an extra for these tests."""

from typing import Any

import pytest

from axrt.scheduler.planning.longest import FORWARD, NONE, WEIGHT, Graph


def shortest(graph: Graph, limit: float, at_most: float, unit: float, seconds: float) -> float:
    """The duration of the shortest order, in which microbatches of a lane keep their order.

    Args:
        graph: tasks of a step.
        limit: the most that a rank may keep, in the unit of the graph.
        at_most: duration of some order.
        unit: all durations are multiples of it.
        seconds: for which the solver may search.
    """
    cp_model = pytest.importorskip(
        "ortools.sat.python.cp_model", reason="pip install 'axrt[exact]'"
    )
    model = cp_model.CpModel()
    horizon = round(at_most / unit)

    def whole(duration: float) -> int:
        assert duration / unit == pytest.approx(round(duration / unit))
        return round(duration / unit)

    starts: list[Any] = []
    tasks: list[Any] = []
    for number, takes in enumerate(graph.takes):
        starts.append(model.new_int_var(0, horizon, f"start {number}"))
        tasks.append(model.new_fixed_size_interval_var(starts[-1], whole(takes), f"{number}"))
    ends = [start + whole(takes) for start, takes in zip(starts, graph.takes, strict=True)]
    for number, needed in enumerate(graph.needs):
        if needed != NONE:
            model.add(starts[number] >= ends[needed] + whole(graph.way[number]))
        if number % graph.microbatches:
            model.add(starts[number] >= ends[number - 1])
    for stages in graph.placement.held:
        lanes = [range(3 * stage, 3 * stage + 3) for stage in stages]
        mine = [
            lane * graph.microbatches + microbatch
            for of in lanes
            for lane in of
            for microbatch in range(graph.microbatches)
        ]
        model.add_no_overlap([tasks[number] for number in mine])
        _keep(model, graph, mine, starts, ends, limit)
    last = model.new_int_var(0, horizon, "last")
    model.add_max_equality(last, ends)
    model.minimize(last)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 2
    status = solver.solve(model)
    assert status == cp_model.OPTIMAL, f"not solved in {seconds:g} s: {solver.status_name(status)}"
    return float(solver.objective_value) * unit


def _keep(
    model: Any, graph: Graph, mine: list[int], starts: list[Any], ends: list[Any], limit: float
) -> None:
    """From a forward to the end of its weight gradient a chunk counts its share of the limit."""
    kinds = {number: number // graph.microbatches % 3 for number in mine}
    held, demands = [], []
    for number in (number for number in mine if kinds[number] == FORWARD):
        freed = ends[number + WEIGHT * graph.microbatches]
        size = model.new_int_var(0, 10**6, f"kept {number}")
        held.append(model.new_interval_var(starts[number], size, freed, f"chunk {number}"))
        demands.append(1)
    model.add_cumulative(held, demands, int(limit / graph.keeps[mine[0]] + 1e-9))
