"""An optimizer goes on from what is saved of it, or is refused at the start."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.store.probe import check_goes_on

NAMED = [("0.weight", nn.Parameter(torch.ones(3, 4))), ("0.bias", nn.Parameter(torch.ones(3)))]
Named = Iterable[tuple[str, nn.Parameter]]


class Both(torch.optim.Optimizer):
    """Matrices in one optimizer and all else in another, whose states are their own."""

    def __init__(self, named: Named) -> None:
        listed = list(named)
        super().__init__([p for _, p in listed], {"lr": 0.1})
        matrices = [p for _, p in listed if p.dim() > 1]
        others = [p for _, p in listed if p.dim() < 2]
        self.parts = [
            *([torch.optim.SGD(matrices, lr=0.1, momentum=0.9)] if matrices else []),
            *([torch.optim.AdamW(others, lr=0.1)] if others else []),
        ]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


class Told(Both):
    """The same, which tells its parts' states as torch's own tell theirs."""

    def state_dict(self) -> dict[str, Any]:
        whole = super().state_dict()
        numbers = {id(p): n for n, p in enumerate(self.param_groups[0]["params"])}
        states = {p: state for part in self.parts for p, state in part.state.items()}
        return {**whole, "state": {numbers[id(p)]: state for p, state in states.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        parameters = self.param_groups[0]["params"]
        for part in self.parts:
            for parameter in part.param_groups[0]["params"]:
                number = next(n for n, one in enumerate(parameters) if one is parameter)
                if number in state_dict["state"]:
                    part.state[parameter] = dict(state_dict["state"][number])


class SlowWeights(torch.optim.AdamW):
    """Lookahead: slow weights beside the state."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], lr=0.1)
        self.slow: list[Tensor] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        parameters = self.param_groups[0]["params"]
        with torch.no_grad():
            self.slow = self.slow or [p.clone() for p in parameters]
            for slow, parameter in zip(self.slow, parameters, strict=True):
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


class ToldBeside(SlowWeights):
    """The same, which tells its slow weights under a key of their own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}


class Counting(torch.optim.SGD):
    """Counts its steps aside, and warms up by that."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], lr=0.1)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.steps
        super().step()


class Listing(torch.optim.SGD):
    """Keeps a list a parameter."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("norms", []).append(float(parameter.detach().norm()))


class Whole(torch.optim.SGD):
    """Of torch's form, in a class of the user's."""

    def __init__(self, named: Named) -> None:
        super().__init__([p for _, p in named], lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


@pytest.mark.parametrize("make", [Whole, Told])
def test_what_state_dict_tells_by_parameter_is_taken(make: Callable[[Named], Any]) -> None:
    check_goes_on(make, NAMED, make(NAMED))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Both, "Both would not go on from a checkpoint as it had begun: what it knows of 0.weight"),
        (SlowWeights, "SlowWeights would not go on"),
        (ToldBeside, r"ToldBeside cannot be saved .*state_dict\(\) has slow besides the state"),
        (Counting, "Counting would not go on"),
        (Listing, "Listing cannot be saved and taken up again: .*0.weight/norms is list"),
    ],
)
def test_what_is_kept_elsewhere_is_refused_by_name(make: Callable[[Named], Any], text: str) -> None:
    """It once went on with moments of zero."""
    with pytest.raises(axrt.ModelError, match=text):
        check_goes_on(make, NAMED, make(NAMED))


def test_an_engine_refuses_it_at_the_start() -> None:
    model = axrt.PipelineModule([nn.Linear(4, 3)], nn.functional.cross_entropy)
    with pytest.raises(axrt.ModelError, match="Both would not go on"):
        axrt.initialize(model, Both)
