"""Weights behind a plain function are found, by whatever way it reaches them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.model.hidden import check_loss_stays_with_its_stage, check_none_hidden, globals_of

GLOBAL = nn.Linear(3, 3)
SCALE = nn.Parameter(torch.ones(3))
NUMBER = 2.0


class Holder:
    """An object that has a module, and is called, or whose method is."""

    def __init__(self) -> None:
        self.module = GLOBAL

    def __call__(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]

    def method(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]


def uses_a_global(x: Tensor) -> Tensor:
    return GLOBAL(x)  # type: ignore[no-any-return]


def uses_a_parameter(x: Tensor) -> Tensor:
    return x * SCALE


def calls_another(x: Tensor) -> Tensor:
    return uses_a_global(x) * NUMBER


def has_a_default(x: Tensor, of: nn.Module = GLOBAL) -> Tensor:
    return of(x)  # type: ignore[no-any-return]


def has_a_keyword(x: Tensor, *, of: nn.Module = GLOBAL) -> Tensor:
    return of(x)  # type: ignore[no-any-return]


def closes_over() -> Callable[[Tensor], Tensor]:
    one, several = 2.0, {"a": [GLOBAL]}
    return lambda x: several["a"][0](x) * one


REACH: dict[str, Any] = {
    "a global name": uses_a_global,
    "a parameter": uses_a_parameter,
    "another function": calls_another,
    "a default": has_a_default,
    "a keyword's default": has_a_keyword,
    "a closure": closes_over(),
    "a method": Holder().method,
    "an object that is called": Holder(),
    "a partial": partial(torch.nn.functional.linear, weight=GLOBAL.weight),
    "a partial's keyword": partial(has_a_default, of=GLOBAL),
}


@pytest.mark.parametrize("name", REACH)
def test_weights_that_nobody_would_train_are_found(name: str) -> None:
    with pytest.raises(axrt.ConfigError, match="layer 1 is a function that uses a .*nobody would"):
        check_none_hidden("layer 1", REACH[name], ())


@pytest.mark.parametrize("name", REACH)
def test_weights_that_are_listed_or_frozen_are_nobodys_fault(name: str) -> None:
    listed = {id(one) for one in (*GLOBAL.parameters(), SCALE)}
    check_none_hidden("layer 1", REACH[name], listed)


@pytest.mark.parametrize("name", sorted({*REACH} - {"a parameter", "a partial"}))
def test_a_loss_that_looks_at_a_layer_of_another_stage_is_found(name: str) -> None:
    layers = [nn.Linear(3, 3), GLOBAL, nn.Linear(3, 3)]
    with pytest.raises(axrt.ConfigError, match=r"loss_fn uses layer 1 \(Linear\)"):
        check_loss_stays_with_its_stage(REACH[name], layers, 2)
    check_loss_stays_with_its_stage(REACH[name], layers, 1)  # its own stage has it


def test_functions_without_weights_and_of_libraries_pass() -> None:
    for function in (torch.relu, nn.functional.cross_entropy, axrt.cross_entropy, lambda x: x):
        check_none_hidden("layer 1", function, ())


def test_global_names_are_those_that_the_code_reads() -> None:
    assert dict(globals_of(calls_another)) == {"uses_a_global": uses_a_global, "NUMBER": NUMBER}
    assert dict(globals_of(torch.relu)) == {}
