"""Advice over a grid of settings: whatever was set, what is advised can be set."""

from typing import Any

import pytest
import torch

import axrt
from axrt.config import Config
from axrt.ledger.advice import advices
from axrt.ledger.prediction import Predictor
from axrt.models.gpt import gpt

from ..engine.reference import adamw, configured
from ..sweeps import swept

GPT = {"layers": 6, "width": 32, "heads": 2, "context": 16, "vocab": 256}
TOKENS = torch.zeros(1, 16, dtype=torch.int64)
PREDICTOR = Predictor(gpt(Config.read({"model": GPT})), adamw, (TOKENS, TOKENS))


@swept(
    ("zero", [0, 1, 2, 3]),
    ("offload", ["stream", "none", "cpu"]),
    ("weights", ["bfloat16", "float32"]),
    ("policy", ["", "breadth-first", "1f1b", "zb-h1"]),
    ("recompute", ["none", "full"]),
    ("clip", [0.0, 1.0, 0.0]),
    quick=12,
)
def test_whatever_is_advised_can_be_set(
    zero: int, offload: str, weights: str, policy: str, recompute: str, clip: float
) -> None:
    """With ZeRO 1 or 2 beside offload the advice was once an error about a key that nobody set."""
    memory: dict[str, Any] = {"zero": zero, "offload": offload, "recompute": recompute}
    sections: dict[str, dict[str, Any]] = {
        "memory": {**memory, "bucket_mb": 2.0, "gathered": 2},
        "schedule": {"policy": policy},
        "precision": {"weights": weights},
        "optimizer": {"clip": clip},
        "parallel": {"data": 2, "pipe": 2},
        "model": GPT,
    }
    try:
        config = Config.read(configured(4, **sections))
        now = PREDICTOR.predict(config, 4)
    except axrt.ConfigError as error:
        pytest.skip(f"refused itself: {error}")
    for one in advices(PREDICTOR, now):
        taken = Config.read(one.then.config.as_dict())
        assert PREDICTOR.predict(taken, one.then.size).most == now.most - one.saves, one.text


def test_what_is_advised_to_a_team_keeps_its_members() -> None:
    """More stages were once counted as if each had one rank, and no such advice was given."""
    parallel = {"pipe": 2, "tensor": 2}
    config = Config.read(configured(4, model=GPT, parallel=parallel, schedule={"policy": "gpipe"}))
    found = advices(PREDICTOR, PREDICTOR.predict(config, 4))
    sizes = {one.text: one.then.size for one in found}
    assert sizes["parallel.gather_again = true"] == 4
    assert sizes["parallel.pipe = 4 on 8 ranks"] == 8
    for one in found:
        taken = Config.read(one.then.config.as_dict())
        assert PREDICTOR.predict(taken, one.then.size).most == one.then.most, one.text
