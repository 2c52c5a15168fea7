"""A layout chosen, with what a person wants to know of the choice; or why there is none."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from axrt.config import Config
from axrt.ledger.ledger import Unit
from axrt.model.costs import kinds_of
from axrt.model.module import PipelineModule
from axrt.planning.known_costs import settings_of
from axrt.scheduler.cluster.cluster import Cluster
from axrt.scheduler.simulation.cost_table import CostTable, LayerCosts
from axrt.scheduler.simulation.model_costs import TASK_S

from .candidates import NOTHING, PINNED, Shape, shapes
from .modelled_table import ModelledTable
from .search import Choice, Search
from .step_time import LayersOf
from .steps_away import StepAway, steps_away
from .told import name_of

SampleOf = Callable[[Config], Any]


class LayerSource(NamedTuple):
    """Where the costs of layers come from."""

    name: str  # such as "modelled"
    layers_of: LayersOf
    task_s: float = TASK_S  # seconds that the loop takes for a task


def modelled(
    config: Config, model: PipelineModule, cluster: Cluster, sample_of: SampleOf
) -> LayerSource:
    """Costs by operations and bytes, and the rates of a device."""
    return LayerSource("modelled", ModelledTable(config, model, cluster, sample_of).of)


def measured(
    config: Config,
    model: PipelineModule,
    cluster: Cluster,
    file: Path,
    pinned: Mapping[str, Any] = NOTHING,
) -> LayerSource:
    """Costs of a table of `axrt profile`.

    Args:
        pinned: values of some keys, by their name in `PINNED`; the table may lack other shapes.
    Raises:
        ValueError: it is no such table, of another model or device, or lacks what is to be tried.
    """
    table, kinds = CostTable.read(file), kinds_of(model)
    table.check_cluster(cluster.device.digest)
    settings = settings_of(config)
    if text := table.differs_from(settings):
        raise ValueError(f"--costs {file}: {text}")
    if any(one.parameters and not one.held_parameters for one in next(iter(table.layers.values()))):
        raise ValueError(
            f"--costs {file} is of format 2, which does not say how many parameters a member has; "
            "expected one of format 3: measure again, with axrt profile"
        )
    _check_all_there(shapes(config, model, cluster, pinned), table, file)

    def layers_of(degree: int, samples: int) -> Sequence[LayerCosts]:
        return table.of(samples, kinds, degree)

    return LayerSource(table.source, layers_of, table.task_s)


class Plan(NamedTuple):
    """What a search has come to."""

    choices: Sequence[Choice] = ()  # the fastest layouts that fit, the choice first
    away: Sequence[StepAway] = ()  # what one step away from the choice would cost
    refused: str = ""  # why there is no choice; "": there is one
    notes: Sequence[str] = ()  # what else the user should know


def chosen(search: Search, config: Config, cluster: Cluster, with_steps_away: bool) -> Plan:
    """Choose a layout of a run on a cluster.

    Raises:
        ConfigError: layers can run in no shape.
    """
    found = search.best()
    choices = _checked(search, found)
    if not choices:
        why = _only_nearly(len(found)) if found else _nothing_fits(search, cluster)
        return Plan(refused=why)
    choices = [search.with_parts(choices[0]), *choices[1:]]
    away = list(steps_away(search, choices[0])) if with_steps_away else []
    return Plan(choices, away, notes=_notes(config, choices[0].config))


def _notes(config: Config, chosen: Config) -> list[str]:
    size, before = chosen.schedule.microbatch_size, config.schedule.microbatch_size
    if not config.run.eval_every or size == before:
        return []
    return [
        f"run.eval_microbatches = {config.run.eval_microbatches} counts microbatches, and these "
        f"have {size} samples in place of {before}: evaluations have other samples"
    ]


def not_kept(config: Config, chosen: Config) -> Iterator[str]:
    """A line for each key of a run that is chosen otherwise, but for the microbatches of a step."""
    asked, found, by_itself = config.as_dict(), chosen.as_dict(), Config().as_dict()
    for key in PINNED:
        section, name = key.split(".")
        was, now = asked[section][name], found[section][name]
        if name.startswith("microbatch") or was in (now, by_itself[section][name]):
            continue
        yield (
            f"{key} = {was!r} of the run is not kept: the fastest layout has {now!r}. "
            f"axrt sweep --over {key}={was} looks at those with {was!r} alone"
        )


def _check_all_there(tried: Iterable[Shape], table: CostTable, file: Path) -> None:
    """Check that a table has every degree and size that is to be tried.

    Raises:
        ValueError: it lacks some.
    """
    wanted = sorted({(of.tensor, of.samples) for of in tried})
    lacking = [(t, size) for t, size in wanted if size not in table.degrees.get(t, {})]
    if lacking:
        degrees = ",".join(str(t) for t in dict.fromkeys(t for t, _ in wanted))
        sizes = " ".join(f"--samples {size}" for size in sorted({size for _, size in wanted}))
        raise ValueError(
            f"--costs {file} has no costs of {lacking[0][1]} samples on teams of {lacking[0][0]}; "
            f"expected those of all that are tried: axrt profile FILE --tensor {degrees} {sizes}"
        )


def _checked(search: Search, choices: Sequence[Choice]) -> list[Choice]:
    """The choices that fit also by the ledger, which runs their stages."""
    exact = [one._replace(prediction=search.predicted(one.config, True)) for one in choices]
    return [one for one in exact if search.fits(one.prediction)]


def _only_nearly(number: int) -> str:
    return (
        f"the {number} fastest layouts fit by what their layers keep, and none does by the ledger, "
        "which runs their stages; expected a little less in device.memory of the cluster, so that "
        "others are looked at"
    )


def _nothing_fits(search: Search, cluster: Cluster) -> str:
    """The fullest rank of the layout that lacks least, and the key that would help most."""
    tightest = search.tightest
    keys = {name: key for key, name in PINNED.items()}
    asked = ", ".join(f"{keys[name]} = {value!r}" for name, value in search.pinned.items())
    if tightest is None and asked:
        return f"no layout that was tried has {asked} on these devices with the samples of a step"
    if tightest is None:
        why = search.refused or "no number of replicas shares out the samples of a step"
        return (
            f"no layout can be: {why}; samples of a step are parallel.data x "
            "schedule.microbatches x schedule.microbatch_size of the file"
        )
    unit, room = Unit.of(tightest.most), cluster.device.memory
    of_these = f" with {asked}" if asked else ""
    helpful = search.advice(tightest)
    return (
        f"nothing fits: of all layouts{of_these}, {name_of(tightest.config)} holds least, and its "
        f"rank {tightest.fullest} has {unit.text(tightest.most)} on a device of {unit.text(room)}: "
        f"{tightest.of_rank(tightest.fullest).told(unit)}. {helpful}"
    )
