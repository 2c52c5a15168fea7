"""Learning rates by the names and formulas of DeepSpeed's schedulers.

A scheduler of theirs is asked after each step, so step t, from 0, has the rate that it gives for
t - 1, and the first step has the rate from before the warm-up.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from axrt.errors import ConfigError

Rate = Callable[[int], float]
_LOG, _LINEAR = "log", "linear"


def warmup_lr(
    warmup_max_lr: float,
    warmup_min_lr: float = 0.0,
    warmup_num_steps: int = 1000,
    warmup_type: str = _LOG,
) -> Rate:
    """WarmupLR: from the least rate to the highest, which then stays."""
    return _between(warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, lambda done: 1.0)


def warmup_decay_lr(
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: str = _LOG,
) -> Rate:
    """WarmupDecayLR: the same, and then down to 0 in a line."""
    falls = max(1.0, total_num_steps - max(2, warmup_num_steps))

    def share(done: int) -> float:
        return max(0.0, (total_num_steps - done) / falls)

    return _between(warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, share)


def warmup_cosine(
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: str = _LOG,
) -> Rate:
    """WarmupCosineLR, as a share of the optimizer's rate: up, and then down along a cosine."""
    warmup = max(2, warmup_num_steps)
    falls = max(1, total_num_steps - warmup)

    def ratio(step: int) -> float:
        done = step - 1
        if done < 0:
            return 0.0
        if done < warmup:
            return warmup_min_ratio + (1 - warmup_min_ratio) * _risen(done, warmup, warmup_type)
        fallen = min(1.0, (done - warmup + 1) / falls)
        cosine = (1 + math.cos(math.pi * fallen)) / 2
        return max(0.0, cos_min_ratio + (1 - cos_min_ratio) * cosine)

    return ratio


def _between(least: float, most: float, steps: int, kind: str, later: Rate) -> Rate:
    warmup = max(2, steps)

    def rate(step: int) -> float:
        done = step - 1
        if done < 0:
            return least
        share = _risen(done, warmup, kind) if done < warmup else later(done)
        return least + (most - least) * share

    return rate


def _risen(done: int, warmup: int, kind: str) -> float:
    if kind not in (_LOG, _LINEAR):
        raise ConfigError(f"warmup_type = {kind!r}; expected 'log' or 'linear'")
    return math.log(done + 1) / math.log(warmup) if kind == _LOG else done / warmup


class LearningRates(NamedTuple):
    """Learning rates by step.

    Args:
        highest: rate of the first parameter group.
        factor: factor on it by step.
    """

    highest: float
    factor: Rate


def learning_rate(section: Mapping[str, Any], lr: float) -> LearningRates:
    """The learning rate that `scheduler` of the JSON configuration asks for.

    Args:
        section: its type and params.
        lr: rate of the optimizer.
    Raises:
        ConfigError: the type or a parameter has no counterpart.
    """
    kind, params = str(section.get("type")), section.get("params", {})
    makers: Mapping[str, Callable[..., Rate]] = {
        "WarmupLR": warmup_lr,
        "WarmupDecayLR": warmup_decay_lr,
        "WarmupCosineLR": warmup_cosine,
    }
    if kind not in makers:
        raise ConfigError(
            f"scheduler.type = {kind!r} has no counterpart; expected {', '.join(makers)}, or "
            "lr_scheduler=lambda optimizer: one of torch.optim.lr_scheduler"
        )
    if kind == "WarmupLR":  # of which the optimizer's rate is the default
        params = {"warmup_max_lr": lr, **params}
    if listed := [name for name, value in params.items() if isinstance(value, list)]:
        raise ConfigError(f"scheduler.params.{listed[0]} is a list; expected a number for all")
    try:
        rate = makers[kind](**params)
        rate(0), rate(1)
    except TypeError as error:
        raise ConfigError(f"scheduler.params of {kind}: {error}") from None
    if kind == "WarmupCosineLR":
        return LearningRates(lr, rate)
    highest = float(params.get("warmup_max_lr", 0.001))
    if highest <= 0:
        raise ConfigError(f"scheduler.params.warmup_max_lr = {highest:g}; expected more than 0")
    return LearningRates(highest, lambda step: rate(step) / highest)
