"""The fastest layout is that of simulating every one, and more of anything makes none slower."""

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import pytest

from axrt.cli.sample import sample_of
from axrt.config import Config
from axrt.errors import ConfigError
from axrt.layouts.candidates import Shape
from axrt.layouts.modelled_table import ModelledTable
from axrt.layouts.search import Choice, Search
from axrt.layouts.step_time import StepTime, StepTimes
from axrt.layouts.steps_away import steps_away
from axrt.layouts.told import changed_keys
from axrt.ledger.prediction import Prediction, Predictor
from axrt.models.registry import model_of
from axrt.scheduler.cluster.cluster import Cluster, Device, Link
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.store.presets import optimizer_factory

from ..sweeps import first

SETTINGS: dict[str, Any] = {
    "model": {"layers": 2, "width": 32, "heads": 2, "context": 16, "vocab": 64},
    "schedule": {"microbatches": 4, "microbatch_size": 1},
}
CONFIG = Config.read(SETTINGS)
SHORT = replace(CONFIG, schedule=replace(CONFIG.schedule, microbatches=2))
MODEL = model_of(CONFIG)
DEVICE = Device({"float32": 1e9}, 0.5, 1e9, 1e9)
TIGHT = 3e5  # bytes of memory that few layouts fit
LESS = 4.5e5  # on two devices
NODE, ACROSS = Link(1e-6, 1e9), Link(1e-5, 1e8, shared=True)


def cluster(nodes: int = 1, devices: int = 2, **changes: Any) -> Cluster:
    return Cluster(nodes, devices, replace(DEVICE, **changes), NODE, ACROSS)


@cache
def layers_of(degree: int, samples: int) -> tuple[LayerCosts, ...]:
    return ModelledTable(CONFIG, MODEL, cluster(), sample_of).of(degree, samples)


class TimesKept(StepTimes):
    """Simulates each layout of a cluster once, whichever test asks for it."""

    found: ClassVar[dict[str, StepTime]] = {}

    def of(self, layout: Prediction, with_parts: bool = False) -> StepTime:
        key = repr((self._cluster, layout.config, with_parts))
        if key not in self.found:
            self.found[key] = super().of(layout, with_parts)
        return self.found[key]


def search(of: Cluster, config: Config = CONFIG) -> Search:
    found = Search(config, MODEL, of, sample_of, layers_of)
    found.times = TimesKept(of, layers_of)
    return found


def known(choice: Choice) -> tuple[object, ...]:
    return choice.key, choice.config.schedule.policy, choice.config.schedule.fill


WORLDS: list[tuple[str, Cluster, Config]] = [
    ("2", cluster(), CONFIG),
    ("2, tight", cluster(memory=LESS), CONFIG),
    ("2x2, few samples", cluster(2, 2), SHORT),
    ("2x2", cluster(2, 2), CONFIG),
    ("4, tight", cluster(1, 4, memory=TIGHT), CONFIG),
]


@pytest.mark.parametrize(("name", "of", "config"), first(WORLDS, quick=3))
def test_it_is_that_of_simulating_every_one(name: str, of: Cluster, config: Config) -> None:
    quick, thorough = search(of, config), search(of, config)
    best, *others = quick.fastest()
    every = sorted(thorough.every(), key=lambda one: (one.time.step_s, one.prediction.most))
    assert best.time == every[0].time
    assert known(best) in map(known, (one for one in every if one.time == best.time))
    for one in (best, *others):
        assert one.time in [of.time for of in every if of.key == one.key]
    assert quick.simulated < thorough.simulated


def test_sizes_at_which_layers_cannot_run_are_left_out() -> None:
    """As normalisation over the samples of a microbatch cannot over one."""

    def but_of_one(degree: int, samples: int) -> tuple[LayerCosts, ...]:
        if samples == 1:
            raise ConfigError("more than one sample")
        return layers_of(degree, samples)

    def never(degree: int, samples: int) -> tuple[LayerCosts, ...]:
        raise ConfigError("no rate of that type")

    best = Search(CONFIG, MODEL, cluster(), sample_of, but_of_one).best()
    assert best
    assert all(one.config.schedule.microbatch_size > 1 for one in best)
    with pytest.raises(ConfigError, match="no rate of that type"):
        Search(CONFIG, MODEL, cluster(), sample_of, never).best()


def test_cuts_are_moved_as_long_as_that_helps() -> None:
    """The head is dear, and even cuts give it a rank with a block."""
    of = search(cluster(1, 2), replace(CONFIG, parallel=replace(CONFIG.parallel, data=1)))
    found = of.in_shape(Shape(1, 2, 1, 1, 4), policy="1f1b")
    assert found is not None
    worse = replace(found.config, parallel=replace(found.config.parallel, partition=(0, 1, 4)))
    begun = of._tried(worse)
    assert begun is not None
    assert begun.time.step_s > found.time.step_s
    assert of._with_cuts_moved(begun).time.step_s <= found.time.step_s


def test_cuts_give_way_to_memory() -> None:
    """The first of two ranks keeps two microbatches, and gives up a layer if that is too much."""
    config = Config.read({**SETTINGS, "model": {**SETTINGS["model"], "layers": 6}})
    model, shape = model_of(config), Shape(1, 2, 1, 8, 2)

    def in_shape(memory: float) -> Choice:
        of = cluster(1, 2, memory=memory)
        layers = ModelledTable(config, model, of, sample_of).of
        found = Search(config, model, of, sample_of, layers).in_shape(
            shape, policy="1f1b", recompute="none"
        )
        assert found is not None
        return found

    even = in_shape(1e9)
    short = in_shape(even.prediction.most * 0.95)
    assert short.prediction.most <= even.prediction.most * 0.95
    assert short.prediction.job.cuts < even.prediction.job.cuts


def test_of_a_layout_memory_is_that_of_the_ledger_but_for_what_stages_share() -> None:
    best = search(cluster()).best()[0]
    exact = Predictor(MODEL, optimizer_factory(CONFIG.optimizer, MODEL), sample_of(best.config))
    assert best.prediction.most == pytest.approx(exact.predict(best.config, 2).most, rel=0.05)


def test_where_nothing_fits_the_layout_that_holds_least_is_known() -> None:
    """Whatever is passed over since it cannot fit."""
    of, every = search(cluster(memory=1e4)), search(cluster(memory=1e4))
    every._least_held = lambda *_: 0.0  # type: ignore[method-assign]
    assert not of.best()
    assert not every.best()
    assert of.tightest
    assert every.tightest
    assert of.tightest.most == every.tightest.most


def test_where_memory_is_short_layouts_save_it_or_nothing_fits() -> None:
    roomy = search(cluster()).best()[0]
    short = search(cluster(memory=roomy.prediction.most * 0.7)).best()
    assert short
    assert all(one.prediction.most <= roomy.prediction.most * 0.7 for one in short)
    assert short[0].time.step_s > roomy.time.step_s
    none = search(cluster(memory=1e4))
    assert none.best() == []
    assert none.tightest is not None
    assert none.tightest.most > 1e4


MORE: dict[str, Any] = {
    "across": lambda of: replace(of, across=replace(of.across, bandwidth=1e9)),
    "memory": lambda of: replace(of, device=replace(of.device, memory=1e9)),
    "node": lambda of: replace(of, within=replace(of.within, bandwidth=1e10)),
}


ROOMS = [
    ("across", cluster(2, 1)),
    ("memory", cluster(memory=LESS)),
    ("node", cluster(memory=LESS)),
    *((name, cluster(2, 2, memory=TIGHT)) for name in MORE),
]


@pytest.mark.parametrize(("name", "of"), first(ROOMS, quick=3))
def test_more_of_anything_makes_no_layout_slower(name: str, of: Cluster) -> None:
    before, after = search(of).best()[0], search(MORE[name](of)).best()[0]
    assert after.time.step_s <= before.time.step_s * (1 + 1e-9)


def test_the_samples_of_a_step_stay_and_ranks_are_all_used() -> None:
    for one in search(cluster(2, 2)).best():
        of = one.config.parallel
        assert (one.config.global_batch, of.pipe * of.data * of.tensor) == (4, 4)
        again = Config.read(changed_keys(one.config))
        assert again.as_dict() == one.config.as_dict(), "the file says all of it"


def test_one_step_away_is_never_faster_and_says_why() -> None:
    found = search(cluster(2, 2))
    best = found.with_parts(found.best()[0])
    away = list(steps_away(found, best))
    assert {step.key.partition(" ")[0] for step in away} >= {"parallel.pipe", "parallel.tensor"}
    for step in away:
        assert step.slower is None or step.slower > -1e-9, step
        assert step.why in (*best.time.parts, "")
