"""Odd models, on one and two ranks, under two policies, with and without recomputation, saved and
gone on with: the bits of plain PyTorch, or a refusal in one line, and never a third."""

import copy
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.model.layers import build, places_of, share
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..engine.reference import (
    SEED,
    adamw,
    configured,
    loss_in,
    made_once,
    random_batches,
    run_in_plain_torch,
)
from .odd import CLASSES, ODD, WIDTH, Extra, Odd

MICROBATCHES, STEPS = 4, 3
SAVED = 2  # steps that are done when it is saved
BATCHES = random_batches((6, WIDTH), classes=CLASSES, microbatches=MICROBATCHES)
Found = tuple[list[float], dict[str, Tensor]]  # losses, and weights and buffers by name


def batches(step: int) -> list[Any]:
    """Anew each time: losses may change targets."""
    return [(inputs.clone(), target.clone()) for inputs, target in BATCHES(step)]


@made_once
def in_plain_torch(name: str, saves: bool) -> Found:
    """Losses and parameters of plain PyTorch; what is saved goes to a new model by
    `load_state_dict`."""
    odd = ODD[name]
    (whole, optimizer, loss_fn), losses = _begun(odd), list[float]()
    for step in range(STEPS):
        if saves and step == SAVED:
            saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
            whole, optimizer, loss_fn = _begun(odd)
            whole.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        losses.append(_step(whole, loss_fn, optimizer, step))
        if odd.between:
            odd.between(list(whole))
    state = whole.state_dict()
    return losses, {name: one.clone() for name, one in state.items() if isinstance(one, Tensor)}


def _begun(odd: Odd) -> tuple[nn.Sequential, torch.optim.Optimizer, Any]:
    model = odd.model()
    layers = model.layers
    # not `sequential`, which copies: a copy of a weight has none of its hooks
    whole = nn.Sequential(*(build(layers, place, SEED) for place in range(len(layers))))
    for key in {layer.key for layer in layers if isinstance(layer, axrt.TiedLayerSpec)}:
        first, *others = places_of(layers, key)
        for other in others:
            share(layers, first, whole[first], other, whole[other])
    named = [(name, one) for name, one in whole.named_parameters() if one.requires_grad]
    return whole, (odd.optimizer or adamw)(named), loss_in(whole, model)


def _step(whole: nn.Sequential, loss_fn: Any, optimizer: torch.optim.Optimizer, step: int) -> float:
    of_step, weights = [], []
    for k, (inputs, target) in enumerate(batches(step)):
        loss = loss_fn(run_in_plain_torch(whole, inputs, step, k, None), target)
        if isinstance(loss, tuple):
            loss, weight = loss
            weights.append(weight)
        torch.autograd.backward(loss if weights else loss / MICROBATCHES)
        of_step.append(loss.item())
    for group in optimizer.param_groups if weights else ():
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(1 / sum(weights))
    optimizer.step()
    optimizer.zero_grad()
    return float(sum(of_step) / (sum(weights) if weights else MICROBATCHES))


class Run(NamedTuple):
    """How a model is trained.

    Args:
        ranks: number of ranks.
        policy, recompute: schedule.policy and memory.recompute.
        saves: True to save it, and go on in new engines.
    """

    ranks: int
    policy: str
    recompute: str
    saves: bool

    @property
    def has_stages(self) -> bool:
        return self.ranks > 1 or self.policy == "zb-v"


Main = Callable[[Transport], Found]


def on_ranks(
    odd: Odd, how: Run, folder: Path, run: Callable[[Main], list[Found]] | None = None
) -> Found:
    """The same with axrt; `run` returns what each rank found. Without it ranks are threads."""
    sections = {"memory": {"recompute": how.recompute}, "schedule": {"policy": how.policy}}
    config = configured(MICROBATCHES, **sections)

    def trained(transport: Transport, steps: range, goes_on: bool) -> Found:
        make = odd.optimizer or adamw
        with axrt.initialize(odd.model(), make, config=config, transport=transport) as engine:
            if goes_on:
                engine.load_checkpoint(folder / "saved")
            losses = []
            for step in steps:
                losses.append(engine.train_batch(iter(batches(step))).loss)
                if odd.between:
                    odd.between([layer for _, layer in engine._model.layers()])
            if how.saves and not goes_on:
                engine.save_checkpoint(folder / "saved")
            return losses, {
                name: value.clone()
                for place, layer in engine._model.layers()
                for name, value in layer.state_dict(prefix=f"{place}.").items()
                if isinstance(value, Tensor)
            }

    def of_all(steps: range, goes_on: bool = False) -> Found:
        found = (run or LocalWorld(how.ranks).run)(lambda of: trained(of, steps, goes_on))
        assert all(losses == found[0][0] for losses, _ in found)
        return found[0][0], {name: one for _, named in found for name, one in named.items()}

    if not how.saves:
        return of_all(range(STEPS))
    before, _ = of_all(range(SAVED))
    after, named = of_all(range(SAVED, STEPS), goes_on=True)
    return before + after, named


QUICK = [
    Run(1, "zb-v", "none", False),
    Run(2, "1f1b", "full", False),
    Run(2, "zb-v", "none", True),
]
EVERY = [
    Run(*of)
    for of in product((1, 2), ("1f1b", "zb-v"), ("none", "full"), (False, True))
    if Run(*of) not in QUICK
]


@pytest.mark.parametrize("name", list(ODD))
@pytest.mark.parametrize(
    "how", [*QUICK, *(pytest.param(of, marks=pytest.mark.sweep) for of in EVERY)], ids=str
)
@pytest.mark.filterwarnings("ignore")  # of what odd models do to torch
def test_an_odd_model_has_the_bits_of_plain_torch_or_is_refused(
    name: str, how: Run, tmp_path: Path
) -> None:
    odd = ODD[name]
    try:
        losses, named = on_ranks(odd, how, tmp_path)
    except axrt.AxrtError as refusal:
        told = str(refusal)
    else:
        told = ""
    if told:
        may_be = odd.refused_where == "always" or how.has_stages
        assert odd.refused, told
        assert may_be, told
        assert re.search(odd.refused, told), told
        assert "\n" not in told
        return
    assert not (odd.refused and odd.refused_where == "always")
    is_that_of_plain_torch(name, how, (losses, named))


def is_that_of_plain_torch(name: str, how: Run, found: Found) -> None:
    """Losses, weights and buffers are those of plain PyTorch."""
    odd, (losses, named) = ODD[name], found
    expected, parameters = in_plain_torch(name, how.saves)
    assert losses == (expected if odd.exact else pytest.approx(expected, rel=1e-6))
    assert named.keys() == parameters.keys()
    for key, value in named.items():
        its = parameters[key]
        is_same = torch.equal(value, its) if odd.exact else torch.allclose(value, its, atol=1e-6)
        assert is_same, key


class Hooks(nn.Linear):
    """Puts a hook on what it is given, or on what it gives."""

    def __init__(self, on: str, hook: Callable[[Tensor], Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.on, self.hook = on, hook

    def forward(self, value: Tensor) -> Tensor:
        out = super().forward(value)
        tensor = {"input": value, "output": out}.get(self.on)
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(self.hook)  # type: ignore[no-untyped-call]
        return out


def hooked(*layers: tuple[str, Callable[[Tensor], Tensor]]) -> Callable[[], axrt.PipelineModule]:
    specs = [axrt.LayerSpec(Hooks, *layer) for layer in layers]
    return lambda: axrt.PipelineModule(
        [*specs, axrt.LayerSpec(nn.Linear, WIDTH, CLASSES)],
        functional.cross_entropy,
        partition_method=[0, 1, 3] if len(layers) > 1 else "uniform",
    )


def test_two_hooks_on_the_tensor_between_layers_run_in_the_order_that_the_page_says(
    tmp_path: Path,
) -> None:
    """Within a stage as they were put there; across stages the later layer's first."""
    twice, more = (lambda g: g * 2), (lambda g: g + 1)
    both = (("output", twice), ("input", more))
    as_put = (("output", lambda g: g * 2 + 1), ("", twice))
    later_first = (("output", lambda g: (g + 1) * 2), ("", twice))
    for ranks, like in ((1, as_put), (2, later_first)):
        how = Run(ranks, "1f1b", "none", False)
        found = on_ranks(Odd(hooked(*both) if ranks > 1 else one_stage(*both)), how, tmp_path)
        expected = on_ranks(Odd(one_stage(*like)), Run(1, "1f1b", "none", False), tmp_path)
        assert found[0] == expected[0]
        assert all(torch.equal(value, expected[1][name]) for name, value in found[1].items())


def one_stage(*layers: tuple[str, Callable[[Tensor], Tensor]]) -> Callable[[], axrt.PipelineModule]:
    def make() -> axrt.PipelineModule:
        made = hooked(*layers)()
        made.partition_method = "uniform"
        return made

    return make


def test_extra_state_that_no_file_can_hold_any_more_fails_a_save_and_training_goes_on(
    tmp_path: Path,
) -> None:
    def rank_main(transport: Transport) -> tuple[str, int]:
        odd = ODD["extra state, a tensor"]
        config = configured(MICROBATCHES, schedule={"policy": "1f1b"})
        with axrt.initialize(odd.model(), adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(batches(0)))
            extra = [of for _, of in engine._model.layers() if isinstance(of, Extra)]
            for layer in extra:
                layer.kind = "unknown"
                layer.get_extra_state = object  # type: ignore[method-assign]
            with pytest.raises(axrt.SaveError, match="_extra_state .get_extra_state. has object"):
                engine.save_checkpoint(tmp_path / "saved")
            engine.train_batch(iter(batches(1)))
            for layer in extra:
                del layer.get_extra_state
            engine.save_checkpoint(tmp_path / "saved")
            return "saved", engine.step

    assert LocalWorld(2).run(rank_main) == [("saved", 2)] * 2


@pytest.mark.parametrize("name", ["loading of its own", "what a hook makes as it loads"])
def test_loading_of_its_own_is_no_change_of_the_users(name: str, tmp_path: Path) -> None:
    """With narrow weights a run once could not go on after a load."""
    config = configured(MICROBATCHES, precision={"weights": "bfloat16"})
    model = ODD[name].model

    def begun() -> axrt.Engine:
        return axrt.initialize(model(), adamw, config=config)

    with begun() as engine:
        engine.train_batch(iter(batches(0)))
        engine.save_checkpoint(tmp_path / "saved")
        loss = engine.train_batch(iter(batches(1))).loss
    with begun() as engine:
        engine.load_checkpoint(tmp_path / "saved")
        found = engine.train_batch(iter(batches(1))).loss
    assert found == pytest.approx(loss, rel=0.05)  # what it makes of weights is of another moment
