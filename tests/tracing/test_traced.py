"""Any module, traced: the bits of the module alone, wherever its graph is cut."""

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import axrt
from axrt.model.layer_runs import RunSettings
from axrt.model.layers import TiedLayerSpec
from axrt.model.matrices import Matrices
from axrt.model.stage import Stage
from axrt.tracing.exporting import called_with
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..engine.reference import (
    Outcome,
    adamw,
    configured,
    together,
    train_in_plain_torch,
    train_on_a_rank,
    train_with_masters,
)
from ..model.test_stage import GENERATOR, with_gradients
from ..model.test_stage import alone as job_alone
from ..sweeps import swept
from .models import MODELS, Encoder, loss_fn, made, microbatches

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # theirs
NUMBER, STEPS = 4, 2


@cache
def traced(name: str, **precision: str) -> axrt.PipelineModule:
    """Traced once: every rank gets a copy."""
    return axrt.traced(made(name), microbatches(name, 1, 0)[0], loss_fn, **precision)


def tied(name: str) -> bool:
    return any(isinstance(layer, TiedLayerSpec) for layer in traced(name).layers)


@cache
def alone(name: str) -> tuple[Outcome, dict[str, Tensor]]:
    """The module by itself in plain torch, and its buffers at the end."""
    module = made(name).train()
    optimizer, losses = adamw(module.named_parameters()), []
    for step in range(STEPS):
        of_step = []
        for inputs, targets in microbatches(name, NUMBER, step):
            loss = loss_fn(called_with(module, inputs), targets)
            torch.autograd.backward(loss / NUMBER)
            of_step.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(of_step) / NUMBER)
    named = {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)}
    return Outcome(losses, [], named), dict(module.named_buffers())


def on_ranks(name: str, pipe: int, policy: str, **sections: Any) -> Outcome:
    config = configured(NUMBER, schedule={"policy": policy}, **sections)
    precision = sections.get("precision", {})

    def on_one(transport: Transport) -> Outcome:
        mine = copy.deepcopy(traced(name, **precision))
        return train_on_a_rank(transport, mine, batches_of(name), STEPS, config)

    return together(LocalWorld(pipe).run(on_one))


def batches_of(name: str) -> Callable[[int], list[Any]]:
    return lambda step: microbatches(name, NUMBER, step)


def check_equal(name: str, found: Outcome) -> None:
    """The bits of the module alone; close to them where weights are tied, since sums of gradients
    have another order."""
    expected, _ = alone(name)
    assert found.losses[0] == expected.losses[0]
    if not tied(name):
        assert found.losses == expected.losses
    for full, tensor in found.parameters.items():
        its = expected.parameters[full.partition(".")[2]]
        if tied(name):
            torch.testing.assert_close(tensor, its, rtol=1e-3, atol=1e-4)
        else:
            assert torch.equal(tensor, its), full


@swept(
    ("name", list(MODELS)),
    ("pipe, policy", [(1, "1f1b"), (2, "1f1b"), (4, "zb-h1"), (2, "zb-v"), (2, "breadth-first")]),
)
def test_it_trains_with_the_bits_of_the_module_alone(name: str, pipe: int, policy: str) -> None:
    check_equal(name, on_ranks(name, pipe, policy))


@swept(
    ("name", ["unet", "llama"]),
    (
        "memory",
        [
            {"recompute": "full"},
            {"offload": "stream"},
            {"bucket_mb": 0.001},
        ],
    ),
)
def test_it_does_so_however_memory_is_saved(name: str, memory: dict[str, Any]) -> None:
    check_equal(name, on_ranks(name, 2, "zb-h1", memory=memory))


def test_dropout_is_that_of_its_layers_one_after_the_other() -> None:
    torch.manual_seed(5)
    model = axrt.traced(Encoder(0.2), microbatches("encoder", 1, 0)[0], loss_fn)
    expected = train_in_plain_torch(copy.deepcopy(model), batches_of("encoder"), STEPS)
    config = configured(NUMBER, schedule={"policy": "zb-h1"})
    outcomes = LocalWorld(2).run(
        lambda transport: train_on_a_rank(
            transport, copy.deepcopy(model), batches_of("encoder"), STEPS, config
        )
    )
    assert together(outcomes) == expected
    assert expected.losses != alone("encoder")[0].losses


@pytest.mark.parametrize("name", ["gemma2", "unet"])
def test_narrow_weights_are_those_of_its_layers(name: str) -> None:
    model = traced(name, weights="bfloat16")
    expected = train_with_masters(copy.deepcopy(model), batches_of(name), STEPS, in_weights=False)
    found = on_ranks(name, 2, "1f1b", precision={"weights": "bfloat16"})
    assert found.losses == expected.losses


def test_what_is_saved_has_the_names_of_the_module_and_loads_into_it(tmp_path: Path) -> None:
    """Running means too; and an evaluation is that of the module."""
    config = configured(NUMBER, schedule={"policy": "zb-h1"})
    evaluated = microbatches("unet", 2, 9)

    def on_one(transport: Transport) -> float:
        with axrt.initialize(
            copy.deepcopy(traced("unet")), adamw, config=config, transport=transport
        ) as engine:
            for step in range(STEPS):
                engine.train_batch(iter(microbatches("unet", NUMBER, step)))
            engine.save_checkpoint(tmp_path / "saved")
            return engine.eval_batch(iter(evaluated) if engine.reads else ()).loss

    losses = LocalWorld(2).run(on_one)
    saved: dict[str, Tensor] = {}
    for file in (tmp_path / "saved").glob("layer-*.safetensors"):
        saved |= {name.partition(".")[2]: of for name, of in load_file(file).items()}
    module = made("unet").eval()
    module.load_state_dict(saved)
    outcome, buffers = alone("unet")
    for name, of in module.state_dict().items():
        assert torch.equal(of, {**outcome.parameters, **buffers}[name]), name
    with torch.no_grad():
        each = [loss_fn(module(inputs), targets).item() for inputs, targets in evaluated]
    assert losses == [sum(each) / 2] * 2


def test_the_users_module_has_the_trained_weights_and_is_as_it_was() -> None:
    module = made("llama")
    modes = [one.training for one in module.eval().modules()]
    names = [name for name, _ in module.named_parameters()]
    model = axrt.traced(module, microbatches("llama", 1, 0)[0], loss_fn)
    assert [one.training for one in module.modules()] == modes
    with axrt.initialize(model, adamw, config=configured(NUMBER)) as engine:
        for step in range(STEPS):
            engine.train_batch(iter(microbatches("llama", NUMBER, step)))
    assert [name for name, _ in module.named_parameters()] == names
    for name, of in module.named_parameters():
        assert torch.equal(of, alone("llama")[0].parameters[name])


@pytest.mark.parametrize(
    ("name", "products"), [("llama", 15), ("gpt2", 8), ("t5", 32), ("translator", 15), ("unet", 0)]
)
def test_weight_gradients_of_products_wait(name: str, products: int) -> None:
    """Those of all linear modules, and of GPT-2's `Conv1D`."""
    model = copy.deepcopy(traced(name))
    layers = list(model.sequential(0))
    stage = with_gradients(Stage(layers, 0, loss_fn, RunSettings(job_alone(1, "zb-h1"), GENERATOR)))
    inputs, targets = microbatches(name, 1, 0)[0]
    stage.forward(0, inputs, targets)
    stage.input_gradient(0, None)
    assert stage.deferral.pieces(0) == products


def test_tables_of_embeddings_are_no_matrices_of_an_optimizer() -> None:
    """Wherever they are: T5 has some in its encoder and decoder, GPT-2 one for positions."""
    for name, number in (("t5", 32), ("gpt2", 8), ("bert", 13)):
        matrices = Matrices(traced(name))
        names = [n for n, p in alone(name)[0].parameters.items() if p.dim() == 2]
        tables = [n for n in names if "embedding" in n or n.endswith(("wpe.weight", "bias.weight"))]
        found = [n for n in names for at in range(40) if matrices.place_of(f"{at}.{n}") or at == 99]
        assert not set(found) & set(tables)
        assert len(set(found)) == number - 1, "the first one has place 0"


@pytest.mark.parametrize("method", ["muon", "soap", "kfac"])
def test_its_matrices_have_owners(method: str) -> None:
    optimizer = {"name": method, "lr": 1e-2, "warmup_steps": 0}
    config = configured(NUMBER, schedule={"policy": "zb-h1"}, optimizer=optimizer)

    def on_one(transport: Transport) -> list[float]:
        model = copy.deepcopy(traced("llama"))
        with axrt.initialize(model, config=config, transport=transport) as engine:
            steps = [iter(microbatches("llama", NUMBER, step)) for step in range(3)]
            return [engine.train_batch(of if engine.reads else None).loss for of in steps]

    alone_on_one = LocalWorld(1).run(on_one)[0]
    assert LocalWorld(2).run(on_one) == [alone_on_one] * 2
