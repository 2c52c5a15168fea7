"""What is known of an optimizer before its first step: which moments it keeps for a parameter, and
whether it is one of torch's own. It is found out on tiny parameters."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from axrt.errors import ModelError

from . import eager_optimizers
from .state import restore_state, saved_state

Factory = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
Moments = dict[str, torch.dtype]  # the type of each moment of a parameter, by key
_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)  # all different, so that no other state has a tiny's shape


class Probed(NamedTuple):
    """What is known of an optimizer."""

    # types of the moments of each parameter, by the optimizer's own key; None where the
    # optimizer cannot be stepped on tiny parameters
    moments: list[Moments] | None
    # what a step does to an element follows from that element's own numbers, so that parameters
    # may be cut anywhere
    elementwise: bool = False


def made_by(
    factory: Factory, named: Sequence[tuple[str, nn.Parameter]]
) -> torch.optim.Optimizer | None:
    """The optimizer that the user's factory makes for a bucket; None for a bucket without
    parameters.

    Raises:
        ModelError: what it makes is no optimizer, or one whose step wants an argument.
    """
    if not named:
        return None
    made: object = factory(list(named))
    if not isinstance(made, torch.optim.Optimizer):
        raise ModelError(
            f"the optimizer's factory returned {made!r}; expected a torch.optim.Optimizer for the "
            f"(name, parameter) pairs from {named[0][0]} to {named[-1][0]}"
        )
    held = {id(parameter) for group in made.param_groups for parameter in group["params"]}
    if not any(id(parameter) in held for _, parameter in named):
        raise ModelError(
            f"the optimizer's factory made {type(made).__name__} of none of the parameters from "
            f"{named[0][0]} to {named[-1][0]}, which would never be trained; expected an optimizer "
            "of the (name, parameter) pairs that it is given"
        )
    wanted = inspect.signature(made.step).parameters.values()
    if needed := [p.name for p in wanted if p.default is p.empty and p.kind in _BY_PLACE]:
        raise ModelError(
            f"{type(made).__name__}.step wants {', '.join(needed)}, which a pipeline cannot give, "
            "since gradients are whole when it steps; expected an optimizer whose step takes no "
            "argument, such as torch.optim.AdamW"
        )
    return made


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def probed(factory: Factory, named: Sequence[tuple[str, nn.Parameter]]) -> Probed:
    """Find out what is known of an optimizer. A moment of a parameter is state that has its shape.

    The factory makes an optimizer of tiny parameters, which have the names, the types, the numbers
    of dimensions and the marks of the given ones. It is stepped once with gradients of zero. State
    without dimensions, such as a number of steps, is no moment.

    Args:
        factory: function that makes the optimizer of a bucket.
        named: (name, parameter) pairs of one bucket, as the factory gets them; only looked at.
    """
    if not named:
        return Probed([], False)
    tinies = [(name, _tiny(parameter)) for name, parameter in named]
    with torch.random.fork_rng(devices=[]):
        try:
            optimizer = factory(tinies)
            for _, tiny in tinies:
                tiny.grad = torch.zeros_like(tiny)
            optimizer.step()
        except Exception:  # of the user's own code: whatever it is, nothing is known
            return Probed(None, False)
    moments = [
        {key: value.dtype for key, value in of_one.items() if _is_moment(value, tiny)}
        for _, tiny in tinies
        for of_one in [optimizer.state.get(tiny, {})]
    ]
    return Probed(moments, _is_torchs(optimizer) and type(optimizer).__name__ in _ELEMENTWISE)


def options_of(factory: Factory, named: Sequence[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """The options that an optimizer has for each parameter, as a text, by name."""
    names = {id(parameter): name for name, parameter in named}
    told = ("params", "param_names")
    return {
        names[id(parameter)]: repr({key: of for key, of in group.items() if key not in told})
        for group in getattr(factory(list(named)), "param_groups", ())
        for parameter in group["params"]
        if id(parameter) in names
    }


# An optimizer is asked once whether it can go on. It is stepped twice on tiny parameters, and once
# more from what was saved in between; what differs is refused at the start. To look for attributes
# that hold tensors was thought of, and finds neither counters nor optimizers within optimizers.
def check_goes_on(
    factory: Factory,
    named: Sequence[tuple[str, nn.Parameter]],
    made: torch.optim.Optimizer | None,
) -> None:
    """Check on tiny parameters that an optimizer goes on from what is saved of it as if nothing had
    happened. Those of `torch.optim` do.

    Args:
        made: what the factory has made of them; None: nothing.
    Raises:
        ModelError: it would not, or its state cannot be saved by parameter.
    """
    if made is None or _is_torchs(made):
        return
    tinies = [(name, _tiny(parameter)) for name, parameter in named]
    with torch.random.fork_rng(devices=[]):
        try:
            first = factory(tinies)
            initial = [dict(group, params=None) for group in first.param_groups]
            _step_tinies(first, tinies, 1)
        except Exception:  # of the user's own code, which real parameters may suit
            return
        name = type(first).__name__
        try:
            states = {
                of: replace(state, tensors={key: one.clone() for key, one in state.tensors.items()})
                for of, state in saved_state(first, initial, {tiny: of for of, tiny in tinies})
            }
            others = [(of, nn.Parameter(tiny.detach().clone())) for of, tiny in tinies]
            for (_, other), (_, tiny) in zip(others, tinies, strict=True):
                other.__dict__.update(tiny.__dict__)
            second = factory(others)
            restore_state(second, initial, {other: of for of, other in others}, states)
            for optimizer, stepped in ((first, tinies), (second, others)):
                _step_tinies(optimizer, stepped, 2)
        except Exception as error:  # of the user's own code
            raise ModelError(
                f"the state of the optimizer {name} cannot be saved and taken up again: {error}; "
                f"{_BY_PARAMETER}"
            ) from error
    for (of, one), (_, other) in zip(tinies, others, strict=True):
        if not torch.equal(one, other):
            raise ModelError(
                f"the optimizer {name} would not go on from a checkpoint as it had begun: what it "
                f"knows of {of} is not in its state_dict(); {_BY_PARAMETER}"
            )


_BY_PARAMETER = (
    "expected all of it in `state[parameter]`, as tensors and plain values, or in a state_dict() "
    "of the same form"
)


def _step_tinies(
    optimizer: torch.optim.Optimizer, tinies: Sequence[tuple[str, nn.Parameter]], seed: int
) -> None:
    torch.default_generator.manual_seed(seed)
    for _, tiny in tinies:
        tiny.grad = torch.randn(tiny.shape).to(tiny.dtype)
    optimizer.step()


def _tiny(parameter: nn.Parameter) -> nn.Parameter:
    sizes = _SIZES[: parameter.dim()] + (1,) * (parameter.dim() - len(_SIZES))
    tiny = nn.Parameter(torch.zeros(sizes, dtype=parameter.dtype))
    tiny.__dict__.update(parameter.__dict__)  # marks that factories look at
    return tiny


# The others of torch look at whole parameters: Adafactor, Muon.
_ELEMENTWISE = frozenset(
    [
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ]
)


_OF_TORCH = ("torch.optim", eager_optimizers.__name__)  # modules


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    is_of_torch = type(optimizer).__module__.startswith(_OF_TORCH)
    return is_of_torch and not any(hooks) and "step" not in vars(optimizer)


def _is_moment(value: object, tiny: nn.Parameter) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == tiny.shape
