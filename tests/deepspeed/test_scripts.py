"""Scripts for DeepSpeed's pipeline engine, of which only the imports have changed."""

import json
import sys
from argparse import ArgumentParser
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import axrt.deepspeed as deepspeed
from axrt.deepspeed.engine import PipelineEngine
from axrt.deepspeed.learning_rate import learning_rate
from axrt.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from axrt.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
)
from axrt.errors import ConfigError

from ..mpi.mpirun import ROOT, launcher, run
from ..sweeps import fewer, first
from .train_images import Net, join_layers

SCRIPT = Path(__file__).with_name("train_images.py")
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 2}}
CONFIG: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}},
    "scheduler": WARMUP,
    "gradient_clipping": 0.5,
    "steps_per_print": 2,
}
STEPS = 6


def _as_module(layer: Any) -> nn.Module:
    return layer if isinstance(layer, nn.Module) else nn.Flatten()


def plain_losses() -> list[float]:
    """The losses of plain PyTorch: AdamW, the norm clipped, replicas take every second sample."""
    torch.manual_seed(1138)
    net = nn.Sequential(*(_as_module(layer) for layer in join_layers(Net(classes=10))))  # type: ignore[no-untyped-call]
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(256, 3, 32, 32, generator=generator)
    labels = torch.randint(10, (256,), generator=generator)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)
    highest, factor = learning_rate(WARMUP, 0.01)
    replicas = [
        cycle(list(zip(torch.split(images[r::2], 8), torch.split(labels[r::2], 8), strict=True)))
        for r in (0, 1)
    ]
    losses = []
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = highest * factor(step)
        batches = [batch for of in replicas for batch in islice(of, 4)]
        of_all = [nn.functional.cross_entropy(net(x.clone()), y) for x, y in batches]
        loss = torch.stack(of_all).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_tutorials_script_trains_as_plain_pytorch_does(tmp_path: Path) -> None:
    (file := tmp_path / "ds_config.json").write_text(json.dumps(CONFIG))
    ended = run(
        [
            launcher(),
            "-n",
            "4",
            sys.executable,
            str(SCRIPT),
            "--deepspeed_config",
            str(file),
            "--steps",
            str(STEPS),
        ],
        timeout_s=300,
    )
    assert ended.code == 0, ended.err
    found = [line.split() for line in ended.out.splitlines() if line.startswith("loss")]
    assert [float(words[2]) for words in found] == pytest.approx(plain_losses(), rel=2e-5)
    told = [line for line in ended.out.splitlines() if line.startswith("steps:")]
    assert [line.split()[1] for line in told] == ["2", "4", "6"]


def test_a_refused_configuration_ends_all_ranks_with_code_2(tmp_path: Path) -> None:
    (file := tmp_path / "ds_config.json").write_text(json.dumps({**CONFIG, "amp": {"a": 1}}))
    ended = run(
        [launcher(), "-n", "2", sys.executable, str(SCRIPT), "--deepspeed_config", str(file)],
        timeout_s=300,
    )
    assert ended.code == 2, ended.err
    assert "DeepSpeed's configuration: amp.a = 1 has no counterpart; expected \"bf16" in ended.err


ONE: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD"},
    "gradient_clipping": 0,
}
DATA = TensorDataset(torch.randn(24, 4), torch.randn(24, 4))


def engine_of(
    layers: list[Any], config: dict[str, Any] = ONE, **more: Any
) -> tuple[PipelineEngine, Any]:
    model = PipelineModule(layers, num_stages=1, loss_fn=nn.MSELoss())
    engine, _, loader, _ = deepspeed.initialize(
        model=model, config=config, training_data=DATA, **more
    )
    return engine, loader


def sgd(lr: float = 0.1, **options: Any) -> dict[str, Any]:
    return {**ONE, "optimizer": {"type": "SGD", "params": {"lr": lr, **options}}}


def test_what_scripts_ask_an_engine_for(tmp_path: Path) -> None:
    engine, loader = engine_of([nn.Linear(4, 4)], sgd())
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 4)
    assert (engine.gradient_accumulation_steps(), engine.world_size, engine.dp_world_size) == (
        2,
        1,
        1,
    )
    assert (engine.global_rank, engine.local_rank, engine.is_first_stage()) == (0, 0, True)
    first = engine.train_batch()
    for _ in range(2):
        engine.train_batch(iter(loader))  # the rest of the epoch
    assert engine.train_batch().item() < first.item()
    assert engine.get_lr() == [0.1]
    assert engine.global_steps == 4
    assert engine.global_samples == 32
    assert engine.get_global_grad_norm() is not None

    def alike() -> Any:
        return iter(DataLoader(DATA, 4))

    before, outputs = engine.eval_batch(alike(), return_logits=True)
    assert before.shape == ()
    assert [of.shape for of in outputs] == [(4, 4)] * 2
    assert engine.eval_batch(alike(), num_micro_batches=1) != before
    engine.save_checkpoint(tmp_path, client_state={"epoch": 3})
    assert (tmp_path / "global_step4").is_dir()
    engine.train_batch()
    engine.save_checkpoint(tmp_path / "others", tag=7, save_latest=False)
    engine.save_checkpoint(tmp_path / "others", tag=7)
    assert engine.load_checkpoint(tmp_path / "others", 7)[0] == str(tmp_path / "others" / "7")
    path, state = engine.load_checkpoint(tmp_path)
    assert (path, state) == (str(tmp_path / "global_step4"), {"epoch": 3})
    assert engine.eval_batch(alike()).item() == before.item()
    assert engine.load_checkpoint(tmp_path / "none") == (None, None)
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.set_dataiterator(iter([{"x": torch.zeros(4, 4), "y": torch.zeros(4, 4)}] * 2))
    assert engine.train_batch().isfinite()
    engine.set_dataloader([{"x": torch.zeros(4, 4), "y": torch.zeros(4, 4)}])
    assert engine.train_batch().isfinite()
    for name in ("forward", "backward", "step", "no_such_name"):
        with pytest.raises(AttributeError, match=name):
            getattr(engine, name)
    with pytest.raises(ConfigError, match="load_module_only"):
        engine.load_checkpoint(tmp_path, load_module_only=True)
    with pytest.raises(ConfigError, match="reduce_output"):
        engine.eval_batch(iter(loader), reduce_output=None)
    engine.destroy()


def trained(**more: Any) -> nn.Linear:
    """A layer after three steps."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    given = {name: make(layer) for name, make in more.items() if name != "config"}
    engine, _ = engine_of([layer], more.get("config", ONE), **given)
    for _ in range(3):
        engine.train_batch()
    engine.destroy()
    return layer


def plain(make: Any, decay: Any = None) -> nn.Linear:
    """The same by plain PyTorch."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    optimizer = make(layer)
    scheduler = decay and decay(optimizer)
    batches = iter(DataLoader(DATA, 4))
    for _ in range(3):
        optimizer.zero_grad()
        for inputs, targets in islice(batches, 2):
            torch.autograd.backward(nn.functional.mse_loss(layer(inputs), targets) / 2)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return layer


def same(found: nn.Linear, expected: nn.Linear) -> None:
    for mine, its in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)


def test_optimizers_are_taken_in_every_form() -> None:
    def adam(layer: nn.Linear) -> torch.optim.Optimizer:
        return torch.optim.Adam(layer.parameters(), lr=0.02, weight_decay=0.3)

    same(trained(optimizer=adam), plain(adam))
    same(
        trained(optimizer=lambda layer: lambda of: torch.optim.Adam(of, lr=0.02, weight_decay=0.3)),
        plain(adam),
    )
    params = {"lr": 0.02, "weight_decay": 0.3}
    coupled = {**ONE, "optimizer": {"type": "Adam", "params": {**params, "adam_w_mode": False}}}
    same(trained(config=coupled), plain(adam))
    decoupled = {**ONE, "optimizer": {"type": "Adam", "params": params}}
    same(
        trained(config=decoupled),
        plain(lambda layer: torch.optim.AdamW(layer.parameters(), lr=0.02, weight_decay=0.3)),
    )


def test_groups_of_parameters_keep_their_options() -> None:
    def groups(layer: nn.Linear) -> list[dict[str, Any]]:
        return [
            {"params": [layer.weight], "weight_decay": 0.5},
            {"params": [layer.bias], "lr": 0.3},
        ]

    def make(layer: nn.Linear) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups(layer), lr=0.1)

    same(trained(config=sgd(), model_parameters=groups), plain(make))
    same(trained(optimizer=make), plain(make))


def test_a_rate_that_warms_up_is_that_of_all_groups() -> None:
    def groups(layer: nn.Linear) -> list[dict[str, Any]]:
        return [{"params": [layer.weight], "lr": 0.5}, {"params": [layer.bias]}]

    warms = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    found = trained(config={**sgd(), "scheduler": warms}, model_parameters=groups)

    def rate(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        _, factor = learning_rate(warms, 0.1)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    same(found, plain(lambda layer: torch.optim.SGD(layer.parameters(), lr=0.1), rate))


def test_data_go_on_where_they_are() -> None:
    """The loader that is returned repeats, and an iterator that was given is drawn from again."""
    engine, loader = engine_of([nn.Linear(4, 4)], sgd(0.0))
    epoch = [engine.train_batch().item() for _ in range(3)]
    assert engine.train_batch(iter(loader)).item() == epoch[0]
    own = iter([(torch.ones(4, 4), torch.ones(4, 4))] * 4)
    first = engine.train_batch(own)
    assert engine.train_batch() == first
    with pytest.raises(StopIteration):
        engine.train_batch()
    engine.destroy()


def test_an_adamw_is_taken_with_its_options() -> None:
    def adamw(layer: nn.Linear) -> torch.optim.Optimizer:
        return torch.optim.AdamW(layer.parameters(), lr=0.02, weight_decay=0.3)

    same(trained(optimizer=adamw), plain(adamw))
    by_torch = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}
    default = plain(lambda layer: torch.optim.AdamW(layer.parameters(), lr=0.02))
    same(trained(config={**ONE, "optimizer": by_torch}), default)


def test_functions_get_plain_parameters_and_their_own_errors_are_shown() -> None:
    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in parameters if p.requires_grad], lr=0.02)

    same(
        trained(optimizer=lambda layer: adam),
        plain(lambda layer: torch.optim.Adam(layer.parameters(), lr=0.02)),
    )

    def broken(parameters: Any) -> torch.optim.Optimizer:
        raise AttributeError("of my own")

    with pytest.raises(AttributeError, match="of my own"):
        engine_of([nn.Linear(4, 4)], optimizer=broken)


def test_keys_of_axrts_own_run_count_before_ranks_come_up() -> None:
    config = {**ONE, "axrt": {"run": {"device": "cpu", "transport": "local"}}}
    engine, _ = engine_of([nn.Linear(4, 4)], config)
    assert engine.axrt.config.run.transport == "local"
    engine.destroy()


def test_norms_are_clipped_at_1_unless_the_configuration_says_otherwise() -> None:
    config = {key: value for key, value in ONE.items() if key != "gradient_clipping"}
    engine, _ = engine_of([nn.Linear(4, 4)], config)
    assert engine.axrt.config.optimizer.clip == 1
    engine.destroy()


def test_parameters_of_layers_that_are_built_later_are_told_of(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = PipelineModule([LayerSpec(nn.Linear, 4, 4), nn.Linear(4, 4)], 1, loss_fn=nn.MSELoss())
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    assert "layers of LayerSpecs are built later, by initialize" in capsys.readouterr().err
    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    with pytest.raises(ConfigError, match="expected modules in place of LayerSpecs"):
        deepspeed.initialize(model=model, config=sgd(), model_parameters=groups)


def test_a_function_makes_the_learning_rate() -> None:
    def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def make(layer: nn.Linear) -> torch.optim.Optimizer:
        return torch.optim.SGD(layer.parameters(), lr=0.1)

    same(trained(config=sgd(), lr_scheduler=lambda layer: decay), plain(make, decay))


def test_layers_that_are_tied_or_built_late_train() -> None:
    def out(module: nn.Embedding, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ module.weight.T

    layers = [
        TiedLayerSpec("words", nn.Embedding, 16, 8),
        LayerSpec(nn.Linear, 8, 8),
        TiedLayerSpec("words", nn.Embedding, 16, 8, forward_fn=out),
    ]
    model = PipelineModule(
        layers,
        topology=PipeDataParallelTopology(1, 1),
        loss_fn=lambda logits, of: nn.functional.cross_entropy(logits, of),
        seed_layers=True,
        base_seed=7,
        activation_checkpoint_interval=1,
    )
    engine, *_ = deepspeed.initialize(model=model, config_params=sgd(0.5))
    assert engine.axrt.config.run.seed == 7
    assert engine.axrt.config.memory.recompute == "full"
    words = torch.split(torch.arange(16), 8)
    batches = [(of, of) for of in words]
    losses = [engine.train_batch(iter(batches)).item() for _ in range(5)]
    assert losses[-1] < losses[0]
    engine.destroy()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: PipelineModule([nn.Linear(1, 1)]), "num_stages and topology"),
        (lambda: PipelineModule([nn.Linear(1, 1)], 1, seed_fn=print), "seed_fn"),  # type: ignore
        (lambda: PipeModelDataParallelTopology(1, 2, 1), "tensor parallelism"),
        (lambda: engine_of([nn.Linear(4, 4)], mpu=object()), "mpu"),
        (lambda: engine_of([nn.Linear(4, 4)], optimizer=3), "optimizer is of type int"),
        (lambda: engine_of([nn.Linear(4, 4)], lr_scheduler=3), "lr_scheduler is of type int"),
        (
            lambda: engine_of(
                [nn.Linear(4, 4)],
                lr_scheduler=lambda of: torch.optim.lr_scheduler.ReduceLROnPlateau(of),
            ),
            "needs no metric",
        ),
        (
            lambda: engine_of(
                [nn.Linear(4, 4)],
                lr_scheduler=lambda of: torch.optim.lr_scheduler.OneCycleLR(of, 0.1, 10),
            ),
            "changes more than the learning rate",
        ),
        (lambda: engine_of([nn.Linear(4, 4)], sgd(no_such=3)), "no_such"),
        (lambda: engine_of([nn.Linear(4, 4)], sgd(max_grad_norm=3)), "gradient_clipping instead"),
        (lambda: engine_of([nn.Linear(4, 4)], {**ONE, "optimizer": "SGD"}), "expected an object"),
        (
            lambda: engine_of(
                [nn.Linear(4, 4)], {**ONE, "optimizer": {"type": "SGD", "params": {"lr": "1e-3"}}}
            ),
            "optimizer.params: ",
        ),
        (lambda: engine_of([nn.Linear(4, 4)], {**ONE, "bf16": {"enabled": "auto"}}), "fills it in"),
        (lambda: engine_of([nn.Linear(4, 4)], {**ONE, "axrt": {"run": 3}}), "axrt.run = 3"),
        (lambda: engine_of([nn.Linear(4, 4)], {**ONE, "train_batch_size": "8"}), "a whole number"),
        (
            lambda: engine_of([nn.Linear(4, 4)], {**ONE, "eigenvalue": {"enabled": True, "a": 0}}),
            "eigenvalue.enabled = True",
        ),
        (lambda: engine_of([nn.Linear(4, 4)], model_parameters=[]), "0.weight is trained"),
        (
            lambda: engine_of([nn.Linear(4, 4)], model_parameters=nn.Linear(3, 3).parameters()),
            "in no module",
        ),
        (lambda: engine_of([nn.Linear(4, 4)], {"train_batch_size": 1}), "no optimizer"),
        (
            lambda: engine_of([nn.Linear(4, 4)], {**ONE, "optimizer": {"type": "OneBitAdam"}}),
            "'OneBitAdam' has no counterpart",
        ),
        (
            lambda: engine_of(
                [nn.Linear(4, 4)],
                {**ONE, "optimizer": {"type": "Adam", "params": {"amsgrad": True}}},
            ),
            "amsgrad has no counterpart",
        ),
        (lambda: deepspeed.initialize(model=nn.Linear(1, 1), config=ONE), "PipelineModule"),
        (
            lambda: deepspeed.initialize(
                model=PipelineModule([nn.Linear(1, 1)], 3, loss_fn=nn.MSELoss()), config=ONE
            ),
            "1 rank for pipelines of 3",
        ),
        (lambda: engine_of([nn.Linear(4, 4)], config_params=ONE), "2 configurations are given"),
    ],
)
def test_what_has_no_counterpart_is_refused(call: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        call()


def test_names_that_are_not_there_are_told() -> None:
    with pytest.raises(AttributeError, match=r"axrt.deepspeed has no zero; it has LayerSpec"):
        deepspeed.zero  # noqa: B018
    options = deepspeed.add_config_arguments(ArgumentParser()).parse_args(["--deepspeed"])
    assert options.deepspeed
    assert options.deepspeed_config is None


@pytest.mark.parametrize(
    ("ranks", "layout"),
    first([(2, "1 replica, 8 microbatches"), (4, "2 replicas, 4 microbatches")]),
)
def test_the_example_trains_on_replicas_of_two_stages_and_tells_its_layout(
    ranks: int,
    layout: str,
    tmp_path: Path,
) -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 10, 64).astype(np.uint8)
    images = np.repeat(labels[:, None] * 25, 3072, axis=1).astype(np.uint8)  # a shade each
    (tmp_path / "data").mkdir()
    np.concatenate([labels[:, None], images], axis=1).tofile(tmp_path / "data/data_batch_1.bin")
    file = ROOT / "examples/deepspeed_alexnet.json"
    words = ["--deepspeed_config", str(file), "--steps", str(fewer(2, 1)), "--pixels", "64"]
    ended = run(
        [
            *(launcher(), "-n", str(ranks), sys.executable),
            str(ROOT / "examples/deepspeed_alexnet.py"),
            *(*words, "--data", str(tmp_path / "data")),
        ],
        timeout_s=300,
    )
    assert ended.code == 0, ended.err
    assert f"axrt: 2 stages x {layout} of 8 a step and replica" in ended.err


def test_an_engine_says_where_its_rank_stands_and_keeps_losses_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "mine"}
    engine, *_ = engine_of([nn.Linear(4, 4)], {**ONE, "csv_monitor": section})
    assert (engine.stage_id, engine.num_stages) == (0, 1)
    assert engine.is_first_stage()
    assert engine.is_last_stage()
    assert engine.grid.get_data_parallel_world_size() == 1
    assert engine.grid.get_model_parallel_world_size() == 1
    assert isinstance(engine.module, PipelineModule)
    steps = [engine.train_batch().item() for _ in range(2)]
    engine.destroy()
    rows = (tmp_path / "mine/Train_Samples_train_loss.csv").read_text().splitlines()
    assert rows[0] == "step,train_loss"
    assert [float(row.split(",")[1]) for row in rows[1:]] == pytest.approx(steps)
    assert "axrt: 1 stage x 1 replica," in capsys.readouterr().err
