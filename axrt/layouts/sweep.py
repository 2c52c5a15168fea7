"""The layouts that are chosen at each point of a sweep, and which of them nothing beats."""

from collections.abc import Callable, Iterator, Sequence
from operator import le
from pathlib import Path
from typing import Any, NamedTuple

from axrt.errors import ConfigError
from axrt.models.registry import model_of
from axrt.scheduler.simulation.cost_table import CostTable

from .plan import LayerSource, SampleOf, chosen, measured, modelled
from .search import Choice, Search
from .sweep_points import Point
from .told import changed_keys


class Outcome(NamedTuple):
    """A layout at a point, or why there is none."""

    point: Point
    choice: Choice | None
    is_chosen: bool  # it is the fastest there; only then it is known what joints and ends take
    refused: str = ""
    notes: Sequence[str] = ()  # what else the user should know
    is_unbeaten: bool = False

    @property
    def numbers(self) -> tuple[float, float, int]:
        """Seconds of a step; what it costs, in seconds of all devices together; and bytes on the
        fullest device."""
        assert self.choice is not None
        seconds = self.choice.time.step_s
        devices = self.point.cluster.num_devices
        return seconds, devices * seconds, self.choice.prediction.most

    def as_dict(self) -> dict[str, Any]:
        """The same, as JSON can hold it."""
        found: dict[str, Any] = {"over": list(self.point.texts), "notes": list(self.notes)}
        if self.choice is None:
            return {**found, "refused": self.refused}
        names = ("step_s", "device_s", "device_bytes")
        found |= {"chosen": self.is_chosen, "unbeaten": self.is_unbeaten}
        found |= {"set": changed_keys(self.choice.config)}
        found |= zip(names, self.numbers, strict=True)
        parts = self.choice.time.parts if self.is_chosen else None
        return {**found, "devices": self.point.cluster.num_devices, "parts_s": parts}


def sources_of(
    points: Sequence[Point], costs: Path | None, sample_of: SampleOf
) -> list[LayerSource]:
    """Where the costs of layers come from at each point.

    Args:
        costs: a table of `axrt profile`; None: costs are modelled.
    Raises:
        ValueError: there is no such table, or it does not go with a point, which the text names.
    """
    if costs:
        CostTable.read(costs)  # what is wrong in the file is of no point
    modelled_for: dict[tuple[str, str], LayerSource] = {}
    found = []
    for point in points:
        config, cluster, model = point.config, point.cluster, model_of(point.config)
        key = repr(config), cluster.device.digest  # links and memory change no costs of layers
        if costs:
            try:
                found.append(measured(config, model, cluster, costs, point.pinned))
            except ValueError as error:
                raise ValueError(f"at {' '.join(point.texts)}: {error}") from None
            continue
        if key not in modelled_for:
            modelled_for[key] = modelled(config, model, cluster, sample_of)
        found.append(modelled_for[key])
    return found


def swept(
    points: Sequence[Point],
    sources: Sequence[LayerSource],
    sample_of: SampleOf,
    found: Callable[[int, Outcome], object],
) -> Iterator[Outcome]:
    """The fastest layouts of each point, the chosen one first.

    Args:
        sources: where the costs of layers come from at each point.
        found: called with the index of each point and its first outcome, when it has been searched.
    """
    for index, (point, source) in enumerate(zip(points, sources, strict=True)):
        outcomes = _outcomes(point, source, sample_of)
        found(index, outcomes[0])
        yield from outcomes


def _outcomes(point: Point, source: LayerSource, sample_of: SampleOf) -> list[Outcome]:
    config, cluster = point.config, point.cluster
    of = (sample_of, source.layers_of, source.task_s, point.pinned)
    search = Search(config, model_of(config), cluster, *of)
    try:
        plan = chosen(search, config, cluster, with_steps_away=False)
    except ConfigError as error:  # such as of a type whose rate the cluster does not say
        return [Outcome(point, None, False, str(error))]
    if plan.refused:
        return [Outcome(point, None, False, plan.refused)]
    first, *others = plan.choices
    found = [Outcome(point, first, True, notes=plan.notes)]
    return [*found, *(Outcome(point, choice, False) for choice in others)]


def compared(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The same, of which it is known whether they are unbeaten: no other of the same run is better
    in time, cost or memory and as good in the rest. They are the Pareto set."""
    fitting = [one for one in outcomes if one.choice is not None]
    return [
        one._replace(
            is_unbeaten=one.choice is not None and not any(_beats(other, one) for other in fitting)
        )
        for one in outcomes
    ]


def _beats(one: Outcome, other: Outcome) -> bool:
    if one.point.run != other.point.run:
        return False
    here, there = one.numbers, other.numbers
    return here != there and all(map(le, here, there))


def without_effect(outcomes: Sequence[Outcome]) -> list[str]:
    """The keys whose values make no difference at any point."""
    points = list(dict.fromkeys(one.point.texts for one in outcomes))
    numbers = {
        texts: [
            one.numbers if one.choice else one.refused
            for one in outcomes
            if one.point.texts == texts
        ]
        for texts in points
    }
    found = []
    for place, text in enumerate(points[0]):
        others: dict[tuple[str, ...], list[Any]] = {}
        for texts in points:
            others.setdefault((*texts[:place], *texts[place + 1 :]), []).append(numbers[texts])
        each = list(others.values())
        if len(each[0]) > 1 and all(of == alike[0] for alike in each for of in alike):
            found.append(text.partition("=")[0])
    return found
