"""Muon as DeepSpeed's configurations ask for it: matrices by Muon, and all else by its Adam."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from axrt.errors import ConfigError
from axrt.model.matrices import Matrices
from axrt.store.matrix_optimizer import OPERATIONS_OF_ADAMW
from axrt.store.muon import COEFFICIENTS, ITERATIONS, MuonAndAdamW, operations_of_muon

from .pipe import PipelineModule

_DEFAULTS = {"momentum": 0.95, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-10}
_RATES = {"muon_lr": 0.02, "adam_lr": 3e-4}  # where neither these keys nor lr say it
_MARK = "use_muon"


class MuonFactory:
    """Makes the optimizer of a bucket.

    Which parameters Muon steps is said by `parameter.use_muon`, as DeepSpeed's scripts set it; of
    those without that mark, matrices between the first and the last layer.

    Args:
        options: `optimizer.params`: lr, or muon_lr and adam_lr; momentum, weight_decay; betas and
            eps of Adam.
    """

    def __init__(self, options: Mapping[str, Any], model: PipelineModule) -> None:
        self._options = {**_DEFAULTS, **checked(options)}
        self._matrices = Matrices(model)
        if not any(hasattr(one, _MARK) for _, one in model.named_parameters()):
            self._matrices.check(model)

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        of = self._options
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, parameter in named:
            groups.setdefault(self._blocks_of(name, parameter), []).append(parameter)
        rest = groups.pop((), [])
        own = {
            "lr": of["muon_lr"],
            "momentum": of["momentum"],
            "nesterov": True,
            "ns_steps": ITERATIONS,
            "ns_coefficients": COEFFICIENTS,
            "weight_decay": of["weight_decay"],
            "adjust_lr": "original",
            "matrix_type": "bfloat16",
        }
        others = {
            "lr": of["adam_lr"],
            "betas": tuple(of["betas"]),
            "eps": of["eps"],
            "weight_decay": of["weight_decay"],
        }
        return MuonAndAdamW(
            [{"params": given, "blocks": blocks, **own} for blocks, given in groups.items()],
            [{"params": rest, **others}] if rest else [],
        )

    def cost(self, name: str, parameter: nn.Parameter) -> float:
        """What a step of a parameter costs, in operations."""
        blocks = self._blocks_of(name, parameter)
        if not blocks:
            return float(OPERATIONS_OF_ADAMW * parameter.numel())
        return sum(operations_of_muon(rows, parameter.shape[1]) for rows in blocks)

    def num_bytes(self, name: str, parameter: nn.Parameter) -> int:
        """What is kept of a parameter beside moments, in bytes."""
        return 0

    def _blocks_of(self, name: str, parameter: nn.Parameter) -> tuple[int, ...]:
        marked = getattr(parameter, _MARK, None)
        if marked and parameter.dim() != 2:
            raise ConfigError(
                f"{name}.{_MARK} = True, and it has {parameter.dim()} dimensions; expected that "
                "mark on matrices"
            )
        if marked is None:
            return self._matrices.blocks_of(name, parameter)
        return (self._matrices.fused_of(name, parameter)) if marked else ()


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a rate for each of the two; `lr` is that of Muon.

    Raises:
        ConfigError: one has no counterpart.
    """
    known = ("lr", *_RATES, *_DEFAULTS)
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(
            f"optimizer.params.{unknown[0]} of Muon has no counterpart; expected one of "
            f"{', '.join(known)}"
        )
    rates = {key: options.get(key, options.get("lr", usual)) for key, usual in _RATES.items()}
    return {**options, **rates, "lr": rates["muon_lr"]}
