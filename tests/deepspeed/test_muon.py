"""Muon by DeepSpeed's configuration, beside torch's own Muon and Adam."""

from typing import Any

import pytest
import torch
from torch import nn

import axrt.deepspeed as deepspeed
from axrt.deepspeed import start
from axrt.deepspeed.muon import MuonFactory
from axrt.deepspeed.pipe import PipelineModule
from axrt.errors import ConfigError

from ..engine.reference import plain_torch
from ..engine.test_owned_matrices import Both

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + torch.tanh(self.up(self.norm(value)))


def layers() -> list[Any]:
    torch.manual_seed(1)
    return [nn.Linear(4, WIDTH), Block(), Block(), nn.Linear(WIDTH, 3)]


def batches(step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2 + step)
    return [(torch.randn(64, 4), torch.randint(3, (64,)))]


def model(with_muon: tuple[str, ...]) -> PipelineModule:
    """Marked as DeepSpeed's scripts do, where names are given."""
    made = PipelineModule(layers(), num_stages=1, loss_fn=nn.functional.cross_entropy)
    for name, parameter in made.named_parameters() if with_muon else ():
        parameter.use_muon = name in with_muon  # type: ignore[attr-defined]
    return made


def configuration(params: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 64,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "Muon", "params": params},
    }


def trained(module: PipelineModule, **params: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine, *_ = deepspeed.initialize(model=module, config=configuration(params))
    losses = [float(engine.train_batch(iter(batches(step)))) for step in range(4)]
    return losses, {name: one.detach().clone() for name, one in module.named_parameters()}


@pytest.mark.parametrize("marked", [(), ("2.up.weight", "3.weight")])
def test_it_has_the_bits_of_torchs_own_muon_and_adam(marked: tuple[str, ...]) -> None:
    with_muon = marked or ("1.up.weight", "2.up.weight")

    def torchs(named: Any) -> Both:
        matrices = [one for name, one in named if name in with_muon]
        rest = [one for name, one in named if name not in with_muon]
        return Both(
            torch.optim.Muon(matrices, lr=0.02, momentum=0.9, weight_decay=0.05),
            torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.05),
        )

    expected = plain_torch(lambda: model(marked), batches, 4, torchs)
    keys = {"muon_lr": 0.02, "adam_lr": 0.003, "momentum": 0.9, "weight_decay": 0.05}
    losses, found = trained(model(marked), **keys)
    assert losses == expected.losses
    assert all(torch.equal(found[name], one) for name, one in expected.parameters.items())


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (
            {"ns_steps": 6},
            r"params\.ns_steps of Muon has no counterpart; expected one of lr, muon_lr",
        ),
    ],
)
def test_options_without_a_counterpart_are_refused(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MuonFactory(params, model(()))


@pytest.mark.parametrize(
    ("params", "rates"),
    [
        ({}, (0.02, 3e-4)),
        ({"lr": 0.5}, (0.5, 0.5)),
        ({"muon_lr": 0.5}, (0.5, 3e-4)),
        ({"lr": 0.1, "adam_lr": 0.0}, (0.1, 0.0)),
    ],
)
def test_each_of_two_rates_has_deepspeeds_default(
    params: dict[str, Any], rates: tuple[float, float]
) -> None:
    made = MuonFactory(params, model(()))([*model(()).named_parameters()])
    assert {group["lr"] for group in made.param_groups if group["blocks"]} == {rates[0]}
    assert {group["lr"] for group in made.param_groups if not group["blocks"]} == {rates[1]}


def test_a_schedule_of_one_rate_is_refused_for_two() -> None:
    scheduled = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 2}}
    with pytest.raises(ConfigError, match=r"rates of 0\.02 and 0\.0003, and a schedule"):
        translated({"muon_lr": 0.02, "adam_lr": 3e-4}, scheduler=scheduled)
    made = translated({"lr": 0.02}, scheduler=scheduled)([*model(()).named_parameters()])
    assert {group["lr"] for group in made.param_groups} == {0.1}


def translated(params: dict[str, Any], **more: Any) -> Any:
    of_all = {**configuration(params), **more}
    return start._translated(of_all, model(()), (1, 1), None, None, None)[2]


def test_a_mark_on_what_is_no_matrix_is_refused() -> None:
    bias = nn.Parameter(torch.zeros(3))
    bias.use_muon = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"3\.bias\.use_muon = True, and it has 1 dimensions"):
        MuonFactory({}, model(()))([("3.bias", bias)])
