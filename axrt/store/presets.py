"""Optimizers and learning-rate schedules by the names of the configuration."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from axrt.config import Optimizer

from .bucket_settings import LrSchedule, OptimizerFactory
from .eager_optimizers import SGD, Adam, AdamW


def optimizer_factory(config: Optimizer) -> OptimizerFactory:
    """The factory that `[optimizer]` describes.

    Weight decay is for parameters of two and more dimensions: biases and norms keep their scale.
    """

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
