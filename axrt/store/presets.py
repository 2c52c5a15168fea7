"""Optimizers and learning-rate schedules by the names of the configuration."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from axrt.config import Optimizer
from axrt.model.matrices import Matrices
from axrt.model.module import PipelineModule

from .bucket_settings import LrSchedule, OptimizerFactory
from .eager_optimizers import SGD, Adam, AdamW
from .muon import OPERATIONS_OF_ADAMW, Blocks, MuonAndAdamW, operations_of_muon


def optimizer_factory(config: Optimizer, model: PipelineModule | None = None) -> OptimizerFactory:
    """The factory that `[optimizer]` describes.

    Weight decay is for parameters of two and more dimensions: biases and norms keep their scale.

    Args:
        model: model whose matrices Muon steps; None where the optimizer is another one.
    Raises:
        ConfigError: it has none that are named.
    """
    if config.name == "muon":
        assert model is not None, "Muon steps matrices of a model"
        matrices = Matrices(model, config.patterns)
        matrices.check(model)
        return _OfMatrices(config, matrices)

    def factory(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        parameters = [parameter for _, parameter in named]
        groups = [
            {
                "params": [p for p in parameters if p.dim() >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        betas = (config.betas[0], config.betas[1])
        if config.name == "adamw":
            return AdamW(groups, lr=config.lr, betas=betas)
        if config.name == "adam":
            return Adam(groups, lr=config.lr, betas=betas)
        return SGD(groups, lr=config.lr, momentum=config.momentum)

    return factory


class _OfMatrices:
    """Makes Muon for matrices and AdamW for the rest, and knows what their steps cost."""

    def __init__(self, config: Optimizer, matrices: Matrices) -> None:
        self._config, self._matrices = config, matrices

    def __call__(self, named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        config = self._config
        stepped: dict[Blocks, list[nn.Parameter]] = {}
        rest: list[nn.Parameter] = []
        for name, parameter in named:
            blocks = self._matrices.blocks_of(name, parameter)
            (stepped.setdefault(blocks, []) if blocks else rest).append(parameter)
        common = {"lr": config.rest_lr or config.lr, "betas": (config.betas[0], config.betas[1])}
        groups = [
            {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ]
        options = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
            "adjust_lr_fn": config.adjust_lr,
        }
        return MuonAndAdamW(
            stepped, options, [{**common, **group} for group in groups if group["params"]]
        )

    def cost(self, name: str, parameter: nn.Parameter) -> float:
        """What a step of a parameter costs, in operations."""
        blocks = self._matrices.blocks_of(name, parameter)
        if not blocks:
            return float(OPERATIONS_OF_ADAMW * parameter.numel())
        return sum(operations_of_muon(rows, parameter.shape[1]) for rows in blocks)


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
