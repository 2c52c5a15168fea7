"""Optimizers as DeepSpeed's scripts and JSON configurations ask for them."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from axrt.errors import ConfigError
from axrt.store.bucket_settings import LrSchedule, OptimizerFactory

from .muon import checked as muon_options
from .pipe import PipelineModule

Options = Mapping[str, Any]
Make = Callable[..., torch.optim.Optimizer]
_ONLY_SO = {"bias_correction": True, "amsgrad": False}  # of their Adam
_PARAMS = "params"


def optimizer_class(section: Mapping[str, Any]) -> tuple[Make, dict[str, Any]]:
    """The class and the options that `optimizer` of the JSON configuration asks for.

    DeepSpeed's "Adam" has the weight decay of AdamW, unless `adam_w_mode` is false.

    Args:
        section: its type and params.
    Raises:
        ConfigError: torch has no such optimizer, or an option has no counterpart.
    """
    if "max_grad_norm" in section.get("params", {}):
        raise ConfigError("optimizer.params.max_grad_norm; expected gradient_clipping instead")
    kind, options = str(section.get("type")), dict(section.get("params", {}))
    if kind.lower() in ("adam", "adamw"):
        by_torch = options.pop("torch_adam", False)
        options.pop("fused", None)
        decouples = options.pop("adam_w_mode", True) or kind.lower() == "adamw"
        for name, only in _ONLY_SO.items():
            if options.pop(name, only) != only:
                raise ConfigError(f"optimizer.params.{name} has no counterpart; expected {only}")
        if not by_torch:  # DeepSpeed's own has no decay by default, and torch's AdamW has
            options.setdefault("weight_decay", 0.0)
        return torch.optim.AdamW if decouples else torch.optim.Adam, options
    if kind.lower() == "muon":
        return alone_by_adam, muon_options(options)
    found = getattr(torch.optim, kind, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            f"optimizer.type = {kind!r} has no counterpart; expected Adam, AdamW, Muon or the name "
            "of a class of torch.optim"
        )
    return found, options


def alone_by_adam(given: Any, **options: Any) -> torch.optim.Optimizer:
    """What Muon does of parameters that are no matrices; stands for Muon where it is only asked for
    its rate. The model says which are matrices, see `MuonFactory`."""
    return torch.optim.AdamW(given, lr=options["lr"])


def factory_of(make: Make, options: Options, groups: Mapping[str, Options]) -> OptimizerFactory:
    """A function that makes the optimizer of a bucket.

    Args:
        make: class, or function of parameters or groups of them.
        options: options of all parameters.
        groups: options by name of the parameter, see `groups_of`.
    """

    def factory(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        alike: dict[tuple[tuple[str, Any], ...], list[nn.Parameter]] = {}
        for name, parameter in named:
            its = {key: _hashable(value) for key, value in groups.get(name, {}).items()}
            alike.setdefault(tuple(sorted(its.items())), []).append(parameter)
        if list(alike) == [()]:
            return make(alike[()], **options)
        return make([{_PARAMS: of, **dict(its)} for its, of in alike.items()], **options)

    return factory


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def given_optimizer(given: Any) -> tuple[Make, dict[str, Any]]:
    """The class and the options, or the function, of `optimizer=` of `initialize`.

    Raises:
        ConfigError: it is neither an optimizer nor a function.
    """
    if isinstance(given, torch.optim.Optimizer):
        takes = inspect.signature(type(given)).parameters
        return type(given), {key: value for key, value in given.defaults.items() if key in takes}
    if callable(given):
        return given, {}
    raise ConfigError(
        f"optimizer is of type {type(given).__name__}; expected an optimizer of torch.optim, or a "
        "function of parameters"
    )


def rate_of(make: Make, options: Options, by_configuration: bool) -> float:
    """The learning rate of an optimizer, which is made once to try it. Options of the configuration
    that its class does not take are refused; errors of the user's own function are raised as they
    are."""
    try:
        alone = make([nn.Parameter(torch.zeros(1))], **options)
    except (TypeError, ValueError) as error:
        if not by_configuration:
            raise
        raise ConfigError(f"optimizer.params: {error}") from None
    return float(alone.param_groups[0]["lr"])


def groups_of(model: PipelineModule, given: Any) -> dict[str, Options]:
    """The options of parameters that are given in groups, by name of the parameter.

    Args:
        model: layers that the parameters are of.
        given: parameters, or groups of them (dicts with "params"); None: all, in no groups.
    Raises:
        ConfigError: a parameter is not the model's, or one that is trained is left away.
    """
    if given is None:
        return {}
    given = list(given)
    if model.builds_later and given and isinstance(given[0], dict):
        raise ConfigError(
            "parameters are given in groups, and those of LayerSpecs are not there yet; expected "
            "modules in place of LayerSpecs, or optimizer=function of parameters"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, Options] = {}
    for group in _grouped(given):
        options = {key: value for key, value in group.items() if key not in (_PARAMS, "name")}
        for parameter in group[_PARAMS]:
            if id(parameter) not in names:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is to be stepped and is in no "
                    "module of the PipelineModule; expected those of PipelineModule.parameters()"
                )
            found[names[id(parameter)]] = options
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and name not in found:
            raise ConfigError(
                f"{name} is trained and is not among the parameters to step; expected all of "
                "them, or requires_grad = False"
            )
    return found


def _grouped(given: Sequence[Any]) -> list[dict[str, Any]]:
    if given and isinstance(given[0], dict):
        return list(given)
    return [{_PARAMS: given}]


def schedule_of_given(given: Any, lr: float) -> LrSchedule:
    """The factor on the learning rate by step, for `lr_scheduler=` of `initialize`.

    Args:
        given: function of an optimizer that makes a scheduler of torch's. It is asked for one
            parameter group.
        lr: rate of the optimizer.
    Raises:
        ConfigError: it is no function, or makes no such scheduler.
    """
    if isinstance(given, LRScheduler) or not callable(given):
        raise ConfigError(
            f"lr_scheduler is of type {type(given).__name__}, which belongs to one optimizer; "
            "expected a function that makes one: each bucket of a rank has an optimizer of its own"
        )
    if not lr:
        raise ConfigError(
            "the optimizer's lr is 0; expected the rate that lr_scheduler begins with"
        )
    alone = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    usual = _all_but_rates(alone)
    scheduler = given(alone)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            f"lr_scheduler makes {type(scheduler).__name__}; expected a scheduler of "
            "torch.optim.lr_scheduler that needs no metric"
        )
    factors: list[float] = []

    def factor(step: int) -> float:
        while len(factors) <= step:
            factors.append(alone.param_groups[0]["lr"] / lr)
            alone.step()
            scheduler.step()
            if {key: alone.param_groups[0][key] for key in usual} != usual:
                raise ConfigError(
                    f"{type(scheduler).__name__} changes more than the learning rate; expected one "
                    "that does not, such as with cycle_momentum=False"
                )
        return factors[step]

    factor(1)
    return factor


def _all_but_rates(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The options of an optimizer that no learning rate is."""
    rates = ("lr", "initial_lr", "max_lr", "min_lr")
    group = optimizer.param_groups[0]
    return {key: value for key, value in group.items() if key not in (_PARAMS, *rates)}
