"""The table of costs: what each layer of a model takes, sends and keeps, what links take, and what
the loop takes for a task. As JSON it is the file costs.json."""

# Measured (`axrt profile`), fitted (`axrt profile --like RUN`) and modelled (`axrt profile
# --cluster`) tables have one form. Simulations, policy "auto" and plans read it.

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from ..plural import plural
from ..regular_file import json_of, read_text
from .costs import Edge

FORMAT, _WITHOUT_TEAMS, _FORMER = "axrt costs 3", "axrt costs 2", ("axrt costs 1",)
MEASURED, FITTED, MODELLED = SOURCES = ("measured", "fitted", "modelled")
_UNITS = {"time": "s", "size": "bytes"}
_COUNTS = (
    *("sent_bytes", "stash_bytes", "until_weight_bytes"),
    *("parameters", "held_parameters", "operations", "pieces"),
)
_SIZES = ("joints", "back_joints")
_PARTS = ("format", "units", "source", "cluster", "task", "lengths", "settings", "links", "degrees")
_PARTS_WITHOUT_TEAMS = ("format", "units", "task", "lengths", "settings", "links", "microbatches")
_LEAST, _MOST = 1e-18, 1e18  # beyond these is a slip, and sums and quotients are no numbers
_WIDEST = 10.0  # of a spread: e to the power of it is a factor


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of one microbatch on one layer, or on a member's part of it."""

    # forward_s, input_s, weight_s: median durations in seconds; `input_s` includes all weight
    # gradients that cannot wait
    forward_s: float
    input_s: float
    weight_s: float
    sent_bytes: int  # size of the activation that it sends on, in bytes; 0 for the last layer
    # largest amount that it keeps for its backward, in bytes, without weights: tensors that
    # autograd saved, or that waiting products read
    stash_bytes: int
    spread: float  # standard deviation of the logarithm of the forward's duration
    until_weight_bytes: int = 0  # part of the stash that stays until the weight gradient
    name: str = ""  # name of its class
    parameters: int = 0  # number of elements of its parameters
    operations: int = 0  # operations of a forward; 0: not known
    pieces: int = 0  # number of its weight gradients that can wait. Other work may run between two.
    # bytes that a member of a team sends all others together at each joint of a forward, and of an
    # input gradient; () where there are none
    joints: tuple[int, ...] = ()
    back_joints: tuple[int, ...] = ()
    # number of elements that a member has of parameters that are trained; 0: none, or not known
    held_parameters: int = 0


@dataclass(frozen=True, slots=True)
class CostTable:
    """The costs of a model."""

    # costs of each layer, by the number of samples in a microbatch; of a rank that nobody shares
    # its stage with
    layers: Mapping[int, tuple[LayerCosts, ...]]
    edge: Edge = field(default_factory=Edge)  # link between any two ranks, in seconds and bytes
    # links that differ, by (from, to)
    edges: Mapping[tuple[int, int], Edge] = field(default_factory=dict)
    task_s: float = 0.0  # seconds that the loop takes for a task
    # standard deviation of the logarithm of a factor that all layers of a microbatch share,
    # since sequences differ in length; `LayerCosts.spread` is what comes on top
    lengths: float = 0.0
    # settings of the model that was measured, by "section.key"; those that are missing are not
    # known
    settings: Mapping[str, Any] = field(default_factory=dict)
    # the same as `layers` of a member of a team, by the number of members, 2 or more
    teams: Mapping[int, Mapping[int, tuple[LayerCosts, ...]]] = field(default_factory=dict)
    source: str = MEASURED  # one of `SOURCES`
    cluster: str = ""  # digest of the cluster that a modelled table is of; "": it is of none

    @classmethod
    def read(cls, path: Path) -> "CostTable":
        """Read a file.

        Raises:
            ValueError: it is none, or a number in it cannot be; the text names the place.
        """
        try:
            text = read_text(path)
        except OSError as error:
            raise ValueError(
                f"{path}: {error.strerror}; expected a file that axrt profile has written"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path} is no text in UTF-8: {error}") from None
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """Read the text of `to_json` back.

        Raises:
            ValueError: it is no table, or a number in it cannot be; the text names the place.
        """
        try:
            found = json_of(text, _once)
        except json.JSONDecodeError as error:
            raise ValueError(f"it is no JSON: {error}") from None
        return _table(found)

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return len(next(iter(next(iter(self.degrees.values())).values())))

    @property
    def degrees(self) -> dict[int, Mapping[int, tuple[LayerCosts, ...]]]:
        """The costs of each layer, by the number of members that hold it, and of samples."""
        return {**({1: self.layers} if self.layers else {}), **self.teams}

    def of_degree(self, degree: int) -> Mapping[int, tuple[LayerCosts, ...]]:
        """The costs of each layer where so many members hold it, by the number of samples.

        Raises:
            ValueError: the table has none of them.
        """
        if degree not in self.degrees:
            known = ", ".join(map(str, sorted(self.degrees)))
            raise ValueError(
                f"there are costs of teams of {known}; expected those of parallel.tensor = "
                f"{degree}: axrt profile --tensor {degree}"
            )
        return self.degrees[degree]

    def check_cluster(self, digest: str) -> None:
        """Check that a modelled table is of a cluster.

        Args:
            digest: that of the cluster.
        Raises:
            ValueError: it is of another one.
        """
        if self.source == MODELLED and self.cluster != digest:
            raise ValueError(
                f"the table is modelled on cluster {self.cluster or 'none'}, and this one is "
                f"{digest}; expected a table of this one: axrt profile --cluster"
            )

    def to_json(self) -> str:
        """The table as text."""
        links = {f"{a}-{b}": edge for (a, b), edge in self.edges.items()}
        return json.dumps(
            {
                "format": FORMAT,
                "units": _UNITS,
                "source": self.source,
                "cluster": self.cluster,
                "task": self.task_s,
                "lengths": self.lengths,
                "settings": dict(self.settings),
                "links": {name: _link(edge) for name, edge in {"any": self.edge, **links}.items()},
                "degrees": {
                    str(degree): {
                        str(size): [asdict(layer) for layer in layers]
                        for size, layers in sorted(sizes.items())
                    }
                    for degree, sizes in sorted(self.degrees.items())
                },
            },
            indent=1,
        )

    def of(
        self, samples: int, model: Sequence[tuple[str, int]], degree: int = 1
    ) -> tuple[LayerCosts, ...]:
        """The costs of the layers of a model.

        Args:
            model: name and number of parameters of each layer.
            degree: number of members that hold each layer.
        Raises:
            ValueError: the table is of another model, or has no such microbatches or teams.
        """
        of_degree = self.of_degree(degree)
        if samples not in of_degree:
            sizes = ", ".join(map(str, sorted(of_degree)))
            raise ValueError(
                f"there are costs of microbatches of {sizes} samples; expected {samples} = "
                "schedule.microbatch_size: measure that size, too"
            )
        layers = of_degree[samples]
        if len(layers) != len(model):
            raise ValueError(
                f"the table is of another model: it has {plural(len(layers), 'layer')}; expected "
                f"{len(model)}"
            )
        for place, (layer, (name, parameters)) in enumerate(zip(layers, model, strict=True)):
            if (layer.name, layer.parameters) != (name, parameters):
                raise ValueError(
                    f"the table is of another model: its layer {place} is {layer.name} with "
                    f"{plural(layer.parameters, 'parameter')}; expected {name} with {parameters:,}"
                )
        return layers

    # A table says which settings it was measured with. Names and numbers of parameters alone let
    # the table of a shorter context, or of another type, pass: its bytes were wrong, and a limit of
    # memory rested on them. `axrt train` compares `[model]` and the types of `[precision]`. A
    # script's model is not in a file, so there names and numbers must do.
    def differs_from(self, settings: Mapping[str, Any]) -> str:
        """The first of the settings that were others when the table was made, as text; ""
        if none was."""
        for name, was in self.settings.items():
            if settings.get(name, was) != was:
                return (
                    f"the table was measured with {name} = {was!r}, and it is {settings[name]!r} "
                    "now; expected one of these settings: measure again, with axrt profile"
                )
        return ""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The keys and values of an object, none of them twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        times = Counter(key for key, _ in pairs)
        twice = next(key for key in found if times[key] > 1)
        raise ValueError(f"{twice} is there twice; expected one of them")
    return found


def _link(edge: Edge) -> dict[str, float | None]:
    return {
        "latency": edge.latency,
        "bandwidth": edge.bandwidth if isfinite(edge.bandwidth) else None,
    }


def _table(found: Any) -> CostTable:
    if isinstance(found, dict) and found.get("format") in _FORMER:
        raise ValueError(
            f"the table has format {found['format']!r}, of a former version; expected {FORMAT!r}: "
            "measure again, with axrt profile"
        )
    if not isinstance(found, dict) or found.get("format") not in (FORMAT, _WITHOUT_TEAMS):
        what = repr(found.get("format")) if isinstance(found, dict) else "none"
        raise ValueError(f"its format is {what}; expected {FORMAT!r}, as axrt profile writes it")
    has_teams = found["format"] == FORMAT
    parts = _PARTS if has_teams else _PARTS_WITHOUT_TEAMS
    if strange := [name for name in found if name not in parts]:
        raise ValueError(f"{strange[0]} is no part of a table; expected {', '.join(parts)}")
    if found.get("units") != _UNITS:
        raise ValueError(f"units = {found.get('units')!r}; expected {_UNITS}")
    links = _within(found, "links", "", dict)
    edges = {_ends(name): _edge(links, name) for name in links if name != "any"}
    degrees = _degrees(found) if has_teams else {1: _sizes(found, "microbatches", "", False)}
    task_s, lengths = _number(found, "task", ""), _number(found, "lengths", "", _WIDEST)
    settings = _within({"settings": {}, **found}, "settings", "", dict)
    return CostTable(
        *(degrees.pop(1, {}), _edge(links, "any"), edges, task_s, lengths, settings, degrees),
        *(_source(found), found.get("cluster", "")) if has_teams else (),
    )


def _source(found: Mapping[str, Any]) -> str:
    if found.get("source") not in SOURCES:
        raise ValueError(f"source = {found.get('source')!r}; expected one of {', '.join(SOURCES)}")
    if not isinstance(found.get("cluster"), str):
        raise ValueError(f"cluster = {found.get('cluster')!r}; expected a digest, or an empty text")
    return str(found["source"])


def _degrees(found: Mapping[str, Any]) -> dict[int, dict[int, tuple[LayerCosts, ...]]]:
    """The costs by the number of members and of samples."""
    degrees = _within(found, "degrees", "", dict)
    if not degrees:
        raise ValueError("degrees has no layers; expected the costs of each layer")
    read = {
        _positive(degree, "degrees.", "members"): _sizes(degrees, degree, "degrees.", True)
        for degree in degrees
    }
    counts = {degree: len(next(iter(sizes.values()))) for degree, sizes in read.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"numbers of layers by members are {counts}; expected one model")
    return read


def _sizes(
    found: Mapping[str, Any], key: str, where: str, has_teams: bool
) -> dict[int, tuple[LayerCosts, ...]]:
    """The costs by the number of samples."""
    sizes = _within(found, key, where, dict)
    inside = f"{where}{key}"
    layers = {
        _positive(size, f"{inside}.", "samples"): tuple(
            _layer(layer, f"{inside}.{size}[{place}]", has_teams)
            for place, layer in enumerate(_within(sizes, size, f"{inside}.", list))
        )
        for size in sizes
    }
    counts = {size: len(of) for size, of in layers.items()}
    if not layers or not all(counts.values()):
        raise ValueError(f"{inside} has no layers; expected the costs of each layer")
    if len(set(counts.values())) > 1:
        raise ValueError(f"numbers of layers by samples are {counts}; expected one model")
    return layers


def _ends(name: str) -> tuple[int, int]:
    """The ranks of a link that differs, such as "0-1"."""
    ends = name.split("-")
    if len(ends) != 2 or not all(map(str.isdecimal, ends)):
        raise ValueError(f"links.{name}: expected any, or two ranks, such as 0-1")
    return int(ends[0]), int(ends[1])


def _positive(text: str, where: str, what: str) -> int:
    if not text.isdecimal() or text.startswith("0"):
        raise ValueError(f"{where}{text}: expected a number of {what}, such as 4")
    return int(text)


def _edge(links: Mapping[str, Any], name: str) -> Edge:
    where, link = f"links.{name}", _within(links, name, "links.", dict)
    bandwidth = float("inf") if link.get("bandwidth", 0) is None else None
    bandwidth = bandwidth or _number(link, "bandwidth", f"{where}.")
    if not bandwidth:
        raise ValueError(f"{where}.bandwidth = 0; expected bytes a second, or null: no limit")
    return Edge(_number(link, "latency", f"{where}."), bandwidth)


def _layer(layer: Any, where: str, has_teams: bool) -> LayerCosts:
    if not isinstance(layer, dict):
        raise ValueError(f"{where} = {layer!r}; expected the costs of a layer")
    of_teams = (*_SIZES, "held_parameters")
    known = [one.name for one in fields(LayerCosts) if has_teams or one.name not in of_teams]
    if strange := [name for name in layer if name not in known]:
        raise ValueError(f"{where}.{strange[0]} is no cost; expected {', '.join(known)}")
    if not isinstance(layer.get("name"), str):
        raise ValueError(f"{where} has no name; expected that of its class")
    costs = LayerCosts(**{name: _cost(layer, name, f"{where}.") for name in known})
    if costs.until_weight_bytes > costs.stash_bytes:
        raise ValueError(
            f"{where}.until_weight_bytes = {costs.until_weight_bytes} is more than stash_bytes = "
            f"{costs.stash_bytes}; expected a part of it"
        )
    return costs


def _within(found: Mapping[str, Any], key: str, where: str, kind: type) -> Any:
    if not isinstance(found.get(key), kind):
        what = "a list" if kind is list else "a table"
        raise ValueError(f"{where}{key} is missing or is none; expected {what}")
    return found[key]


def _cost(layer: Mapping[str, Any], name: str, where: str) -> Any:
    if name == "name":
        return layer[name]
    if name in _SIZES:
        sizes = _within(layer, name, where, list)
        named = {f"{place}": size for place, size in enumerate(sizes)}
        return tuple(_whole(named, place, f"{where}{name}.") for place in named)
    if name in _COUNTS:
        return _whole(layer, name, where)
    return _number(layer, name, where, _WIDEST if name == "spread" else _MOST)


def _whole(found: Mapping[str, Any], key: str, where: str) -> int:
    value = _number(found, key, where)
    if int(value) != value:
        raise ValueError(f"{where}{key} = {value!r}; expected a whole number")
    return int(value)


def _number(found: Mapping[str, Any], key: str, where: str, most: float = _MOST) -> Any:
    """A number of 0 or more, neither too small nor too large to reckon with."""
    if key not in found:
        raise ValueError(f"{where}{key} is missing; expected a number of 0 or more")
    value = found[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (value == 0 or _LEAST <= value <= most):
        raise ValueError(f"{where}{key} = {value!r:.40}; expected a number from 0 to {most:g}")
    return value
