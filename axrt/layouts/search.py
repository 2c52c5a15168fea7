"""The fastest layouts of a run on a cluster."""

# Shapes are looked at in the order of a bound: the work of all layers, shared out evenly. A shape,
# or a layout, whose bound is no better than the last of the best that are known is not simulated,
# so the choice is that of simulating all. What saves memory is tried where a layout does not fit
# without: recomputation, scratch and gradients in shards only take time.

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, cached_property
from itertools import product
from math import inf
from operator import add, sub
from typing import Any, NamedTuple

from axrt.config import Config
from axrt.errors import ConfigError
from axrt.ledger.advice import advices
from axrt.ledger.ledger import Purpose, Tier
from axrt.ledger.prediction import Prediction, Predictor
from axrt.model.module import PipelineModule
from axrt.planning.default_schedule import settled
from axrt.scheduler.cluster.cluster import Cluster
from axrt.scheduler.placement import Placement
from axrt.scheduler.planning.balance import balanced, evened
from axrt.scheduler.planning.cuts import MemberCost, best_cuts
from axrt.scheduler.simulation.model_costs import TASK_S
from axrt.store.presets import optimizer_factory
from axrt.world.mesh import Mesh

from .candidates import (
    NOTHING,
    PINNED,
    Saving,
    Shape,
    check_known,
    fills,
    laid_out,
    policies,
    rank_orders,
    savings,
    shapes,
    stages_of_zero,
)
from .least_held import LeastHeld
from .step_time import LayersOf, StepTime, StepTimes
from .table_stashes import TableStashes

_NOTHING_SAVED = Saving("none", "none")._asdict()
_GB = 1e9
_MOVED = 3  # of the fastest layouts, those whose cuts are moved
KEPT = 6  # layouts: the fastest, and five that come next


class _Sums(NamedTuple):
    """What layers take together."""

    seconds: float
    held: int  # parameters
    kept: int  # bytes of a microbatch


class Choice(NamedTuple):
    """A layout that fits."""

    prediction: Prediction  # what its ranks hold
    time: StepTime  # what its steps take

    @property
    def config(self) -> Config:
        """Its settings."""
        return self.prediction.config

    @property
    def key(self) -> tuple[object, ...]:
        """What it is, but for its policy and cuts."""
        of, schedule, memory = self.config.parallel, self.config.schedule, self.config.memory
        return (
            *(of.tensor, of.pipe, of.data, of.rank_order, schedule.microbatch_size),
            *(memory.zero, memory.recompute, memory.offload),
        )


class Search:
    """Finds the fastest layouts.

    Args:
        config: settings of the run; what is searched is replaced, all else stays.
        sample_of: function that makes a microbatch of settings, (inputs, targets).
        layers_of: function that gives the costs of layers, of a degree and samples of a microbatch.
        task_s: seconds that the loop takes for a task.
        pinned: values of some keys, by their name in `PINNED`; only layouts with these are tried.
    Raises:
        ConfigError: the settings have keys that predictions know nothing of.
    """

    def __init__(
        self,
        config: Config,
        model: PipelineModule,
        cluster: Cluster,
        sample_of: Callable[[Config], Any],
        layers_of: LayersOf,
        task_s: float = TASK_S,
        pinned: Mapping[str, Any] = NOTHING,
    ) -> None:
        check_known(config)
        self.pinned = pinned
        self._config, self._model, self._cluster = config, model, cluster
        self._sample_of, self._layers_of = sample_of, cache(layers_of)
        self._factory = optimizer_factory(config.optimizer, model)
        stashes = TableStashes(self._layers_of)
        self._predictor = Predictor(model, self._factory, None, stashes)
        self.times, self._task_s = StepTimes(cluster, self._layers_of, task_s), task_s
        self.tightest: Prediction | None = None  # that lacks least, of those that do not fit
        self.refused = ""  # why the first of those that cannot be cannot
        self.simulated = 0  # number of layouts
        self._last: Prediction | None = None
        self._least: dict[int, LeastHeld | None] = {}  # by members of a team
        self._bounds: dict[tuple[object, ...], float] = {}
        self._cuts: dict[tuple[object, ...], list[int]] = {}
        self._prunes = True  # what only adds to what fits is left out

    def best(self) -> list[Choice]:
        """The fastest layouts, each with its best policy, the first of them first; none where
        nothing fits. Cuts of the first few are moved."""
        found = {choice.key: choice for choice in self.fastest()}
        for choice in list(found.values())[:_MOVED]:
            _keep(self._with_cuts_moved(choice), found)
        return sorted(found.values(), key=rank_of)

    def fastest(self) -> list[Choice]:
        """The fastest layouts among those of `every`, each with its best policy.

        Raises:
            ConfigError: layers can run in no shape.
        """
        found: dict[tuple[object, ...], Choice] = {}
        if self.shapes and min(map(self._least_s, self.shapes)) == inf:
            raise ConfigError(self.refused)
        for shape in sorted(self.shapes, key=self._least_s):
            if self._least_s(shape) >= _limit(found):
                break
            for config in self._variants(shape, lambda: _limit(found)):
                if choice := self._tried(config):
                    _keep(choice, found)
        return sorted(found.values(), key=rank_of)[:KEPT]

    def _with_cuts_moved(self, choice: Choice) -> Choice:
        """The same layout with cuts moved a layer at a time, as long as that helps."""
        while True:
            cuts = choice.prediction.job.cuts
            others = (self._tried(_with_cuts(choice.config, of)) for of in _moved(cuts))
            better = min(filter(None, others), key=rank_of, default=choice)
            if rank_of(better) >= rank_of(choice):
                return choice
            choice = better

    def every(self) -> Iterator[Choice]:
        """Each layout that fits, with cuts by which ranks take equally long, simulated, whatever
        saves memory in it."""
        self._prunes = False
        for shape in self.shapes:
            variants = self._variants(shape, lambda: inf) if self._least_s(shape) < inf else ()
            for config in variants:
                if choice := self._tried(config):
                    yield choice

    def in_shape(self, shape: Shape, **keys: Any) -> Choice | None:
        """The fastest layout of a shape with some keys as they are given; None: none fits."""
        best: Choice | None = None
        if self._least_s(shape) == inf:
            return None

        def limit() -> float:
            return best.time.step_s if best else inf

        for config in self._variants(shape, limit, **keys):
            choice = self._tried(config)
            if choice and (best is None or rank_of(choice) < rank_of(best)):
                best = choice
        return best

    @cached_property
    def shapes(self) -> list[Shape]:
        """All shapes that there are to choose from."""
        return list(shapes(self._config, self._model, self._cluster, self.pinned))

    @property
    def savings(self) -> list[Saving]:
        """What may save memory."""
        return savings(self._cluster)

    def rank_orders(self, shape: Shape) -> tuple[str, ...]:
        """The orders of ranks that make a difference."""
        return rank_orders(shape, self._cluster)

    def with_parts(self, choice: Choice) -> Choice:
        """The same, with what is due to joints and to the ends of steps."""
        return choice._replace(time=self.times.of(choice.prediction, with_parts=True))

    def advice(self, prediction: Prediction) -> str:
        """The key that would save most memory of a layout, of those that are not chosen."""
        size = self._cluster.num_devices
        pinned = [key for key, name in PINNED.items() if name in self.pinned]
        chosen = ("memory.recompute", "memory.zero", "schedule", *pinned)
        for one in advices(self._predictor, prediction):
            if one.then.size != size or one.text.startswith(chosen):
                continue
            if one.text != "memory.offload = 'stream'":
                return str(one)
            if not self._cluster.device.expanded_memory:
                return f"With device.expanded_memory of the cluster {one}"
        return "No key that was tried would help: take more devices, or such with more memory"

    def fits(self, prediction: Prediction) -> bool:
        """Every rank has room on its device and in scratch."""
        of = self._config.memory.scratch_gb
        scratch = min(self._cluster.device.expanded_memory, of * _GB or inf)
        away = max(sum(map(one.scratch.total, Tier)) for one in prediction.different)
        return prediction.most <= self._room and away <= scratch

    @property
    def _room(self) -> float:
        """Bytes that a rank may have on its device."""
        return min(self._cluster.device.memory, self._config.memory.device_gb * _GB or inf)

    def _least_s(self, shape: Shape) -> float:
        """Seconds that a step takes at least: the work of all layers, shared out evenly; infinity:
        layers cannot run so."""
        try:
            layers = self._layers_of(shape.tensor, shape.samples)
        except ConfigError as error:  # such as of normalisation over one sample
            self.refused = self.refused or str(error)
            return inf
        work = sum(layer.forward_s + layer.input_s + layer.weight_s for layer in layers)
        return shape.microbatches * (work / shape.pipe + 2 * self._task_s)

    def _variants(self, shape: Shape, limit: Callable[[], float], **keys: Any) -> Iterator[Config]:
        """The layouts of a shape whose bound is below a limit of seconds, what saves memory behind
        what does not.

        Args:
            keys: keys that have one value.
        """
        of_shape = Shape._fields
        keys = {**{key: of for key, of in self.pinned.items() if key not in of_shape}, **keys}
        layers = self._layers_of(shape.tensor, shape.samples)
        for name, placement in policies(shape, keys.get("policy", "")):
            if placement.stages > len(layers):
                continue
            cuts = self._even_cuts(placement, shape)
            orders, ways = self.rank_orders(shape), fills(self._config, shape)
            for order, fill in product(orders, ways):
                found = {"policy": name, "rank_order": order, "fill": fill, **keys}
                is_asked = (found["rank_order"], found["fill"]) == (order, fill)
                if is_asked and self._least_of(shape, placement, found) < limit():
                    yield from self._by_memory(shape, cuts, found)

    def _least_of(self, shape: Shape, placement: Placement, keys: dict[str, Any]) -> float:
        """Seconds that a step of some layouts takes at least; infinity: they cannot be. Policies of
        one placement have the same."""
        key = shape, placement, keys["rank_order"], keys["fill"]
        found = self._bounds.get(key, inf)
        if found == inf:  # not known, or another policy cannot be
            found = self._bounds[key] = self._found_least(shape, placement, keys)
        return found

    def _found_least(self, shape: Shape, placement: Placement, keys: dict[str, Any]) -> float:
        try:
            cuts = self._even_cuts(placement, shape)
            config = laid_out(self._config, shape, cuts, **{**keys, "zero": 0, **_NOTHING_SAVED})
            size = self._cluster.num_devices
            of = config.parallel
            mesh = Mesh.of(0, size, of.pipe, of.data, of.rank_order, of.tensor)
            return self.times.least_s(config, settled(config, self._model, mesh)[1], mesh)
        except ConfigError as error:
            self.refused = self.refused or str(error)
            return inf

    def _even_cuts(self, placement: Placement, shape: Shape) -> list[int]:
        """Where stages begin, so that ranks take equally long."""
        key = placement, shape.tensor, shape.samples
        if key not in self._cuts:
            layers = self._layers_of(shape.tensor, shape.samples)
            seconds = [layer.forward_s + layer.input_s + layer.weight_s for layer in layers]
            even = balanced(seconds, placement.stages)
            self._cuts[key] = evened(seconds, even, placement.held)
        return self._cuts[key]

    def _by_memory(
        self, shape: Shape, cuts: Sequence[int], keys: dict[str, Any]
    ) -> Iterator[Config]:
        """What saves memory, but for that which only adds to what fits by itself."""
        fitting: list[tuple[int, Saving]] = []
        for zero, saving in product(stages_of_zero(shape), self.savings):
            of = {"zero": zero, **saving._asdict(), **keys}
            is_other = any(of[name] != value for name, value in saving._asdict().items())
            if is_other or of["zero"] != zero:
                continue
            if self._prunes and any(_only_adds((zero, saving), before) for before in fitting):
                continue
            # What does not fit is looked at as long as it may lack least.
            least = self._least_held(shape, zero, saving)
            if self.tightest and least > max(self._room, self.tightest.most):
                continue
            with suppress(ConfigError):
                config = laid_out(self._config, shape, cuts, **of)
                found = self.predicted(config)
                yield config
                if self.fits(found):
                    fitting.append((zero, saving))
                elif cuts_that_fit := self._cuts_that_fit(shape, found):
                    yield _with_cuts(config, cuts_that_fit)

    def _least_held(self, shape: Shape, zero: int, saving: Saving) -> float:
        """Bytes that the fullest rank of a shape holds at least, whatever its policy and cuts; 0:
        not known."""
        team, size = shape.tensor, self._cluster.num_devices
        if team not in self._least:
            alone, keys = Shape(team, 1, size // team, 1, 1), {"policy": "1f1b", "zero": 0}
            self._least[team] = None
            with suppress(ConfigError):
                config = laid_out(self._config, alone, "uniform", **keys, **_NOTHING_SAVED)
                self._least[team] = LeastHeld(self._predictor.predict(config, size))
        of = self._least[team]
        return of.of(shape, self._layers_of(team, shape.samples), zero, saving) if of else 0.0

    def _cuts_that_fit(self, shape: Shape, prediction: Prediction) -> list[int]:
        """Where stages would have to begin so that all fit, of a layout that does not; [] where
        nothing does, or ranks have several stages."""
        job, layers = prediction.job, self._layers_of(shape.tensor, shape.samples)
        if job.placement.name != "linear" or job.recomputed:
            return []
        mesh, first, end = prediction.mesh, *job.cuts[:2]
        of = prediction.of_rank(mesh.rank_of(0, 0))
        messages = of.of_purpose(Purpose.MESSAGES)
        fixed = of.total() - of.of_purpose(Purpose.STASH) - messages
        a_parameter = fixed / max(1, sum(layer.held_parameters for layer in layers[first:end]))

        before = [_Sums(0.0, 0, 0)]  # of the layers before each
        for layer in layers:
            seconds = layer.forward_s + layer.input_s + layer.weight_s
            more = _Sums(seconds, layer.held_parameters, layer.stash_bytes)
            before.append(_Sums(*map(add, before[-1], more)))

        def cost_of(first: int, end: int, degree: int) -> MemberCost:
            of = _Sums(*map(sub, before[end], before[first]))
            return MemberCost(of.seconds, round(a_parameter * of.held), of.kept)

        asked = (cost_of, len(layers), shape.pipe, [1], shape.microbatches)
        found = best_cuts(*asked, self._room - messages, stages=shape.pipe)
        return [*(stage.first for stage in found.stages), len(layers)] if found else []

    def predicted(self, config: Config, exactly: bool = False) -> Prediction:
        """What the ranks of a layout hold.

        Args:
            exactly: True if its stages are run without memory; else they keep what layers keep.
        Raises:
            ConfigError: the layout cannot be, or what it holds is not known.
        """
        if not exactly and self._last and self._last.config == config:
            return self._last  # it is asked for twice
        predictor = self._predictor
        if exactly:
            predictor = Predictor(self._model, self._factory, self._sample_of(config))
        found = predictor.predict(config, self._cluster.num_devices)
        if found.unknown:
            raise ConfigError(f"what ranks hold is not known: {'; '.join(found.unknown)}")
        self._last = found
        return found

    def _tried(self, config: Config) -> Choice | None:
        """A layout, if it can be and fits."""
        try:
            prediction = self.predicted(config)
        except ConfigError:
            return None
        if not self.fits(prediction):
            if self.tightest is None or prediction.most < self.tightest.most:
                self.tightest = prediction
            return None
        self.simulated += 1
        return Choice(prediction, self.times.of(prediction))


def _only_adds(one: tuple[int, Saving], other: tuple[int, Saving]) -> bool:
    """What saves memory in one layout is that of another one, and more."""
    (zero, saving), (of_zero, of_saving) = one, other
    # From stage 1 on ZeRO shares out steps, which saves time as well.
    is_more = zero == of_zero or zero > of_zero > 0
    off = Saving("none", "none")
    return is_more and all(
        value in (now, without) for now, value, without in zip(saving, of_saving, off, strict=True)
    )


def _moved(cuts: Sequence[int]) -> Iterator[list[int]]:
    """Cuts of which one differs by a layer; no stage is empty."""
    for place, way in product(range(1, len(cuts) - 1), (-1, 1)):
        moved = [*cuts[:place], cuts[place] + way, *cuts[place + 1 :]]
        if cuts[place - 1] < moved[place] < cuts[place + 1]:
            yield moved


def _with_cuts(config: Config, cuts: Sequence[int]) -> Config:
    return replace(config, parallel=replace(config.parallel, partition=tuple(cuts)))


def _limit(found: dict[tuple[object, ...], Choice]) -> float:
    """Seconds from which on a step is none of the best."""
    return sorted(found.values(), key=rank_of)[KEPT - 1].time.step_s if len(found) >= KEPT else inf


def _keep(choice: Choice, found: dict[tuple[object, ...], Choice]) -> None:
    if choice.key not in found or rank_of(choice) < rank_of(found[choice.key]):
        found[choice.key] = choice


def rank_of(choice: Choice) -> tuple[float, int, str]:
    """The faster first; of equally fast ones that which holds less, then by name."""
    return choice.time.step_s, choice.prediction.most, choice.config.schedule.policy
