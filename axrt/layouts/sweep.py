"""The layouts that are chosen for each value of some keys, and which of them nothing beats."""

# A key of the cluster changes what is searched. So does one of the run that a search leaves alone,
# such as `model.layers`. One that a search chooses is pinned: of all layouts those with this value
# are searched, and the samples of a step stay.

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from operator import le
from pathlib import Path
from typing import Any, NamedTuple

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.models.registry import model_of
from axrt.planning.cluster_file import is_of_cluster, read_cluster
from axrt.scheduler.cluster.cluster import Cluster

from .candidates import PINNED, check_known
from .plan import LayerSource, SampleOf, chosen, measured, modelled
from .search import Choice, Search
from .told import changed_keys

# Keys that a search chooses, and of which it tries no value that makes no difference.
_CHOSEN = ("parallel.rank_order", "parallel.partition", "schedule.fill")


class Point(NamedTuple):
    """A value of each key that is swept."""

    texts: tuple[str, ...]  # such as "links.node.bandwidth=100e9"
    config: Config  # settings of the run, without those that are pinned
    cluster: Cluster
    pinned: Mapping[str, Any]  # keys of the layout, by their name in `PINNED`


class Outcome(NamedTuple):
    """A layout at a point, or why there is none."""

    point: Point
    choice: Choice | None
    is_chosen: bool  # it is the fastest there; only then it is known what joints and ends take
    refused: str = ""

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
        found: dict[str, Any] = {"over": list(self.point.texts)}
        if self.choice is None:
            return {**found, "refused": self.refused}
        names = ("step_s", "device_s", "device_bytes")
        found |= {"chosen": self.is_chosen, "set": changed_keys(self.choice.config)}
        found |= zip(names, self.numbers, strict=True)
        parts = self.choice.time.parts if self.is_chosen else None
        return {**found, "devices": self.point.cluster.num_devices, "parts_s": parts}


def values_of(over: Sequence[str]) -> dict[str, list[str]]:
    """The values of each key that is swept.

    Args:
        over: texts such as "links.node.bandwidth=100e9,300e9".
    Raises:
        ValueError: one is no such text, or has a key again.
    """
    found: dict[str, list[str]] = {}
    for text in over:
        key, _, values = text.partition("=")
        key = key.strip()
        each = [value.strip() for value in values.split(",")]
        if "." not in key or not all(each) or "[" in values:
            raise ValueError(
                f"--over {text!r}; expected a key with values, commas between: "
                "links.node.bandwidth=100e9,300e9"
            )
        if key in found:
            raise ValueError(f"--over has {key} twice; expected all its values in one")
        if key in _CHOSEN:
            raise ValueError(
                f"--over {key}: every layout has its best value; expected another key, or one of "
                f"{', '.join(PINNED)}"
            )
        found[key] = each
    return found


def points(
    cluster: Path, file: str, overrides: Sequence[str], over: Mapping[str, Sequence[str]]
) -> list[Point]:
    """All points of a sweep, checked.

    Args:
        over: the values of each key that is swept.
    Raises:
        ConfigError: the files cannot be, or a value; of a value the text names its point.
    """
    found = []
    for values in product(*over.values()):
        texts = [f"{key}={value}" for key, value in zip(over, values, strict=True)]
        try:
            found.append(_point(cluster, file, overrides, texts))
        except ConfigError as error:
            raise ConfigError(f"at {' '.join(texts)}: {error}" if texts else str(error)) from None
    return found


def _point(cluster: Path, file: str, overrides: Sequence[str], texts: Sequence[str]) -> Point:
    of_layout = [text for text in texts if text.partition("=")[0] in PINNED]
    others = [*overrides, *(text for text in texts if text not in of_layout)]
    of_cluster = [text for text in others if is_of_cluster(text)]
    of_run = [text for text in others if text not in of_cluster]
    pinned = Config.read(file, [*of_run, *of_layout]).as_dict()
    names = [text.partition("=")[0] for text in of_layout]
    config = Config.read(file, of_run)
    check_known(config)
    return Point(
        tuple(texts),
        config,
        read_cluster(cluster, of_cluster),
        {PINNED[name]: pinned[name.split(".")[0]][name.split(".")[1]] for name in names},
    )


def swept(
    points: Sequence[Point],
    costs: Path | None,
    sample_of: SampleOf,
    found: Callable[[int, Outcome], object],
) -> Iterator[Outcome]:
    """The fastest layouts of each point, the chosen one first.

    Args:
        costs: a table of `axrt profile`; None: costs are modelled.
        found: called with the index of each point and its first outcome, when it has been searched.
    Raises:
        ConfigError, ValueError: a search, or the table, does not take a point.
    """
    sources: dict[tuple[str, str], LayerSource] = {}
    for index, point in enumerate(points):
        config, cluster, model = point.config, point.cluster, model_of(point.config)
        if costs:
            source = measured(config, model, cluster, costs, point.pinned)
        else:  # links and memory change no costs of layers
            key = repr(config), cluster.device.digest
            if key not in sources:
                sources[key] = modelled(config, model, cluster, sample_of)
            source = sources[key]
        of = (source.layers_of, source.task_s, point.pinned)
        search = Search(config, model, cluster, sample_of, *of)
        plan = chosen(search, config, cluster, with_steps_away=False)
        outcomes = [Outcome(point, one, place == 0) for place, one in enumerate(plan.choices)]
        outcomes = outcomes or [Outcome(point, None, False, plan.refused)]
        found(index, outcomes[0])
        yield from outcomes


def unbeaten(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those than which no other is better in time, cost or memory and as good in the rest: the
    Pareto set."""
    fitting = [one for one in outcomes if one.choice is not None]
    return [one for one in fitting if not any(_beats(other, one) for other in fitting)]


def _beats(one: Outcome, other: Outcome) -> bool:
    here, there = one.numbers, other.numbers
    return here != there and all(map(le, here, there))
