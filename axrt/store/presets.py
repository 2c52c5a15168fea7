"""Optimizers and learning-rate schedules by the names of the configuration."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from axrt.config import Optimizer
from axrt.errors import ConfigError
from axrt.model.matrices import Matrices
from axrt.model.module import PipelineModule

from .bucket_settings import LrSchedule, OptimizerFactory
from .eager_optimizers import SGD, Adam, AdamW
from .kfac import KfacAndAdamW, kept_by_kfac, operations_of_kfac
from .matrix_optimizer import OPERATIONS_OF_ADAMW, Blocks, MatrixOptimizer
from .muon import MuonAndAdamW, operations_of_muon
from .soap import SoapAndAdamW, kept_by_soap, operations_of_soap


def optimizer_factory(config: Optimizer, model: PipelineModule | None = None) -> OptimizerFactory:
    """The factory that `[optimizer]` describes.

    Weight decay is for parameters of two and more dimensions: biases and norms keep their scale.

    Args:
        model: model whose matrices are stepped whole; None where the optimizer is another one.
    Raises:
        ConfigError: it has none that are named.
    """
    if config.steps_matrices:
        assert model is not None, "the matrices are a model's"
        matrices = Matrices(model, config.patterns)
        matrices.check(model)
        if _METHODS[config.name].of_linears:
            matrices.check_linear(model, config.name)
        return _OfMatrices(config, matrices)

    def factory(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        parameters = [parameter for _, parameter in named]
        groups = _by_dimensions(parameters, config.weight_decay)
        betas = (config.betas[0], config.betas[1])
        if config.name == "adamw":
            return AdamW(groups, lr=config.lr, betas=betas)
        if config.name == "adam":
            return Adam(groups, lr=config.lr, betas=betas)
        return SGD(groups, lr=config.lr, momentum=config.momentum)

    return factory


class _Method(NamedTuple):
    """How matrices are stepped."""

    make: Callable[[list[dict[str, Any]], list[dict[str, Any]]], MatrixOptimizer]
    # options of a group beside lr and weight_decay, by the place of a matrix in the model
    options: Callable[[Optimizer, int], dict[str, Any]]
    operations: Callable[[Optimizer, int, int], float]  # of a step of one matrix, by its sides
    # kept beside moments of the matrices that a parameter is fused of, by their rows and columns
    numbers: Callable[[Optimizer, Blocks, int], int]
    of_linears: bool = False  # each matrix is the weight of a linear layer


def _muon_options(config: Optimizer, place: int) -> dict[str, Any]:
    return {
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "ns_steps": config.ns_steps,
        "ns_coefficients": config.ns_coefficients,
        "adjust_lr": config.adjust_lr,
        "matrix_type": config.matrix_type,
    }


def _soap_options(config: Optimizer, place: int) -> dict[str, Any]:
    betas = config.betas[0], config.betas[1]
    return {"betas": betas, "eps": 1e-8, **_times(config, place)}


def _kfac_options(config: Optimizer, place: int) -> dict[str, Any]:
    return {
        "momentum": config.momentum,
        "decay": config.betas[1],
        "damping": config.damping,
        "kl_clip": config.kl_clip,
        "sample": config.sample,
        **_times(config, place),
    }


def _times(config: Optimizer, place: int) -> dict[str, Any]:
    """When a matrix is refreshed."""
    return {"refresh": config.refresh, "lag": config.lag, "offset": place % config.refresh}


_METHODS = {
    "muon": _Method(
        MuonAndAdamW,
        _muon_options,
        lambda config, rows, columns: operations_of_muon(rows, columns, config.ns_steps),
        lambda config, blocks, columns: 0,
    ),
    "soap": _Method(
        SoapAndAdamW,
        _soap_options,
        lambda config, rows, columns: operations_of_soap(rows, columns, config.refresh),
        lambda config, blocks, columns: sum(
            kept_by_soap(rows, columns, config.refresh, config.lag) for rows in blocks
        ),
    ),
    "kfac": _Method(
        KfacAndAdamW,
        _kfac_options,
        lambda config, rows, columns: operations_of_kfac(rows, columns, config.refresh),
        lambda config, blocks, columns: kept_by_kfac(blocks, columns, config.refresh, config.lag),
        of_linears=True,
    ),
}


class _OfMatrices:
    """Makes the optimizer of matrices and of the rest, and knows what a matrix costs."""

    def __init__(self, config: Optimizer, matrices: Matrices) -> None:
        self._config, self._matrices = config, matrices
        self._method = _METHODS[config.name]

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        config, matrices = self._config, self._matrices
        groups: dict[object, dict[str, Any]] = {}
        rest: list[nn.Parameter] = []
        for name, parameter in named:
            blocks = matrices.blocks_of(name, parameter)
            if not blocks:
                rest.append(parameter)
                continue
            if config.refreshes and parameter.itemsize < 4:
                raise ConfigError(
                    f"optimizer.name = {config.name!r} and {name} is {parameter.dtype}, in which "
                    "nothing is factored here; expected parameters in float32, and "
                    "precision.weights for narrow layers"
                )
            options = self._method.options(config, matrices.place_of(name))
            own = {"blocks": blocks, "lr": config.lr, "weight_decay": config.weight_decay}
            group = groups.setdefault((blocks, *options.values()), {"params": [], **own, **options})
            group["params"].append(parameter)
        common = {"lr": config.rest_lr or config.lr, "betas": (config.betas[0], config.betas[1])}
        others = [{**common, **group} for group in _by_dimensions(rest, config.weight_decay)]
        return self._method.make(list(groups.values()), others)

    def is_matrix(self, name: str, parameter: Tensor) -> bool:
        """A parameter is stepped as a whole."""
        return bool(self._matrices.blocks_of(name, parameter))

    def cost(self, name: str, parameter: nn.Parameter) -> float:
        """What a step of a parameter costs, in operations."""
        operations = self._method.operations
        blocks, columns = self._matrices.blocks_of(name, parameter), parameter.shape[-1:].numel()
        if not blocks:
            return float(OPERATIONS_OF_ADAMW * parameter.numel())
        return sum(operations(self._config, rows, columns) for rows in blocks)

    def num_bytes(self, name: str, parameter: Tensor) -> int:
        """What is kept of a parameter beside moments, in bytes."""
        blocks, columns = self._matrices.blocks_of(name, parameter), parameter.shape[-1:].numel()
        if not blocks:
            return 0
        return self._method.numbers(self._config, blocks, columns) * parameter.itemsize


def _by_dimensions(parameters: Sequence[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of those with two and more dimensions, which decay, and of the others."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def lr_schedule(config: Optimizer, steps: int) -> LrSchedule:
    """The function that gives the factor on the learning rate for a step.

    The factor rises linearly over `warmup_steps`, then stays, or falls to `final_lr`, which it
    would reach just after the last of `steps`.
    """

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        if config.schedule == "constant":
            return 1.0
        done = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
        left = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
        return config.final_lr + (1 - config.final_lr) * left

    return factor
