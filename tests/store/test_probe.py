"""Which moments an optimizer keeps, found out on tiny parameters."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn, optim

from axrt.errors import ModelError
from axrt.store.probe import Factory, Moments, made_by, probed


def moments_of(factory: Factory, named: Any) -> list[Moments] | None:
    return probed(factory, named).moments


META = torch.device("meta")


def named(*shapes: Sequence[int]) -> list[tuple[str, nn.Parameter]]:
    return [
        (f"{place}.weight", nn.Parameter(torch.empty(tuple(shape), device=META)))
        for place, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (lambda ps: optim.Adam(ps), {"exp_avg", "exp_avg_sq"}),
        (lambda ps: optim.AdamW(ps, amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (lambda ps: optim.SGD(ps, momentum=0.9), {"momentum_buffer"}),
        (lambda ps: optim.SGD(ps), set()),
        (lambda ps: optim.RMSprop(ps), {"square_avg"}),
    ],
)
def test_state_that_has_the_shape_of_the_parameter(make: Any, keys: set[str]) -> None:
    found = moments_of(lambda pairs: make([p for _, p in pairs]), named((7, 7), (9,), (2, 3, 4, 5)))
    assert found == [dict.fromkeys(keys, torch.float32)] * 3


def test_a_number_of_steps_is_no_moment_of_a_parameter_without_dimensions() -> None:
    assert moments_of(lambda pairs: optim.Adam(list(pairs)), named(())) == [{}]


def test_names_and_marks_are_those_of_the_parameters() -> None:
    pairs = named((4, 4), (4, 4))
    pairs[0][1].marked = True  # type: ignore[attr-defined]

    def factory(given: Any) -> optim.Optimizer:
        listed = list(given)
        assert [name for name, _ in listed] == ["0.weight", "1.weight"]
        groups = [
            {"params": [p], "momentum": 0.9 if hasattr(p, "marked") else 0.0} for _, p in listed
        ]
        return optim.SGD(groups, lr=1.0)

    assert moments_of(factory, pairs) == [{"momentum_buffer": torch.float32}, {}]


def test_an_optimizer_that_cannot_be_stepped_alone_is_not_known() -> None:
    assert moments_of(lambda pairs: optim.LBFGS([p for _, p in pairs]), named((4,))) is None
    assert moments_of(lambda pairs: optim.SparseAdam([p for _, p in pairs]), named((4, 4))) is None


def test_the_users_random_numbers_stay_as_they_are() -> None:
    before = torch.get_rng_state()
    moments_of(lambda pairs: optim.Adam([p + 0 * torch.rand(()) for _, p in pairs]), named((4,)))
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_factory_makes_is_looked_at() -> None:
    pairs = named((4,))
    assert made_by(lambda given: optim.Adam(list(given)), pairs) is not None
    assert made_by(lambda given: optim.Adam(list(given)), []) is None
    with pytest.raises(ModelError, match=r"returned None; expected a torch.optim.Optimizer"):
        made_by(lambda given: None, pairs)  # type: ignore[arg-type, return-value]
    with pytest.raises(ModelError, match=r"LBFGS.step wants closure"):
        made_by(lambda given: optim.LBFGS([p for _, p in given]), pairs)


def test_an_optimizer_of_torch_steps_each_element_unless_somebody_has_added_to_its_step() -> None:
    class Mine(optim.SGD):
        pass

    def hooked(given: Any) -> optim.Optimizer:
        optimizer = optim.SGD([p for _, p in given], lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer

    pairs = named((4,))
    assert probed(lambda given: optim.SGD(list(given)), pairs).elementwise
    assert not probed(lambda given: Mine(list(given)), pairs).elementwise
    assert not probed(hooked, pairs).elementwise
