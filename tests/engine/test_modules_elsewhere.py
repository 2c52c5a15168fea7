"""Modules that are given as they are: a rank lets go of those that others hold, or says that it
cannot."""

import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import axrt
from axrt.model import elsewhere
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from .reference import configured


@pytest.mark.parametrize("keeps", [True, False])
def test_modules_that_another_rank_holds_are_let_go_unless_somebody_keeps_them(
    keeps: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(elsewhere, "_LEAST_BYTES", 100)
    batches = [(torch.ones(2, 8), torch.ones(2, 8)) for _ in range(2)]

    def rank_main(transport: Transport) -> int:
        layers: list[Any] = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
        refs = [weakref.ref(layer) for layer in layers]
        model = axrt.PipelineModule(layers, functional.mse_loss)
        with axrt.initialize(model, config=configured(2), transport=transport) as engine:
            if not keeps:
                del layers, model
            engine.train_batch(iter(batches))
            engine.train_batch(iter(batches))
            return sum(ref() is not None for ref in refs)

    alive = LocalWorld(2).run(rank_main)
    told = capsys.readouterr().err.splitlines()
    if keeps:
        assert alive == [3, 3]
        assert sorted(line.partition(" layers")[0] for line in told) == [
            "axrt: rank 0: 2",
            "axrt: rank 1: 1",
        ]
    else:
        assert (sum(alive), told) == (3, [])
