"""The points of a sweep: a value of each key that is swept, checked before anything is searched."""

# A key of the cluster changes what is searched. So does one of the run that a search leaves alone,
# such as `model.layers`. One that a search chooses is pinned: of all layouts those with this value
# are searched, and the samples of a step stay.

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.planning.cluster_file import is_of_cluster, read_cluster
from axrt.scheduler.cluster.cluster import Cluster

from .candidates import PINNED, check_known, check_tried

# Keys that a search chooses for each layout, and that none pins.
_CHOSEN = ("parallel.rank_order", "parallel.partition", "schedule.fill")
# Sections that say how a run is laid out; all others say what it computes.
_OF_LAYOUT = ("parallel", "schedule", "memory")
# What modelled costs of layers depend on, and those of a table do not.
_OF_MODEL = ("device.operations", "device.share", "device.bandwidth")


class Point(NamedTuple):
    """A value of each key that is swept."""

    texts: tuple[str, ...]  # such as "links.node.bandwidth=100e9"
    config: Config  # settings of the run, without those that are pinned
    cluster: Cluster
    pinned: Mapping[str, Any]  # keys of the layout, by their name in `PINNED`

    @property
    def run(self) -> tuple[str, ...]:
        """The keys that say what is computed, with their values: with others it is another run."""
        return tuple(
            text
            for text in self.texts
            if not is_of_cluster(text) and text.partition(".")[0] not in _OF_LAYOUT
        )


def values_of(over: Sequence[str]) -> dict[str, list[str]]:
    """The values of each key that is swept.

    Args:
        over: texts such as "links.node.bandwidth=100e9,300e9".
    Raises:
        ValueError: one is no such text, or has a key or a value again.
    """
    found: dict[str, list[str]] = {}
    for text in over:
        key, _, values = text.partition("=")
        key = key.strip()
        each = [value.strip() for value in values.split(",")]
        if "." not in key or not all(each) or set(values) & set("[{\"'"):
            raise ValueError(
                f"--over {text!r}; expected a key with values, commas between: "
                "links.node.bandwidth=100e9,300e9"
            )
        if key in found:
            raise ValueError(f"--over has {key} twice; expected all its values in one")
        value, times = Counter(each).most_common(1)[0]
        if times > 1:
            raise ValueError(f"--over {key} has {value} twice; expected each value once")
        if key in _CHOSEN:
            raise ValueError(
                f"--over {key}: every layout has its best value; expected another key, or one of "
                f"{', '.join(PINNED)}"
            )
        found[key] = each
    return found


def points(
    cluster: Path,
    file: str,
    overrides: Sequence[str],
    over: Mapping[str, Sequence[str]],
    with_costs: bool = False,
) -> list[Point]:
    """All points of a sweep, checked.

    Args:
        over: the values of each key that is swept.
        with_costs: costs of layers are those of a table.
    Raises:
        ConfigError: the files cannot be, or a value; of a value the text names its point.
    """
    _check_keys(list(over), overrides, with_costs)
    _point(cluster, file, overrides, ())  # what is wrong in the files is of no point
    found: list[Point] = []
    for values in product(*over.values()):
        texts = tuple(f"{key}={value}" for key, value in zip(over, values, strict=True))
        try:
            point = _point(cluster, file, overrides, texts)
        except ConfigError as error:
            raise ConfigError(f"at {' '.join(texts)}: {error}") from None
        for other in found:
            if other[1:] == point[1:]:
                raise ConfigError(
                    f"{' '.join(other.texts)} and {' '.join(texts)} are the same; expected values "
                    "that differ"
                )
        found.append(point)
    return found


def _check_keys(swept: Sequence[str], overrides: Sequence[str], with_costs: bool) -> None:
    """Check that each key makes the difference that is asked for.

    Raises:
        ConfigError: one does not.
    """
    for key in swept:
        if key not in PINNED and key in (one.partition("=")[0].strip() for one in overrides):
            raise ConfigError(f"{key} is set and in --over; expected one of them")
        if with_costs and key.startswith(_OF_MODEL):
            raise ConfigError(
                f"--over {key}: layers take what the table of --costs says, whatever the device "
                "can do, and no more than steps of optimizers would follow; expected another key, "
                "or no --costs"
            )


def _point(cluster: Path, file: str, overrides: Sequence[str], texts: Sequence[str]) -> Point:
    of_layout = {text: key for text in texts if (key := text.partition("=")[0]) in PINNED}
    others = [*overrides, *(text for text in texts if text not in of_layout)]
    of_cluster = [text for text in others if is_of_cluster(text)]
    of_run = [text for text in others if text not in of_cluster]
    with_pinned = Config.read(file, [*of_run, *of_layout]).as_dict()
    pinned = {}
    for key in of_layout.values():
        section, name = key.split(".")
        pinned[PINNED[key]] = with_pinned[section][name]
    config, devices = Config.read(file, of_run), read_cluster(cluster, of_cluster)
    check_known(config)
    check_tried(pinned, devices)
    return Point(tuple(texts), config, devices, pinned)
