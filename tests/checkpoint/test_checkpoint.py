"""What is saved by some ranks is loaded by any others, to the bit on the same layout."""

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.checkpoint import folder as folders
from axrt.checkpoint import manifest as manifests
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..disks import small_disk
from ..engine.models import perceptron
from ..engine.reference import (
    adamw,
    configured,
    copies,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)
from ..engine.test_ties import batches as token_batches
from ..engine.test_ties import tied
from ..sweeps import swept

MICROBATCHES, STEPS, HALF = 4, 6, 3
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)


def momentum(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1e-2, momentum=0.9)


def config_for(data: int, **sections: Any) -> dict[str, dict[str, Any]]:
    return configured(MICROBATCHES // data, parallel={"data": data}, **sections)


def train(engine: axrt.Engine, first: int, end: int, batches: Any = BATCHES) -> list[float]:
    microbatches = engine.config.schedule.microbatches
    mine = slice(engine.data_rank * microbatches, (engine.data_rank + 1) * microbatches)
    return [engine.train_batch(iter(batches(step)[mine])).loss for step in range(first, end)]


def save(
    path: Path,
    ranks: int,
    data: int = 1,
    model: Any = perceptron,
    factory: Any = adamw,
    batches: Any = BATCHES,
    **sections: Any,
) -> None:
    def rank_main(transport: Transport) -> None:
        with axrt.initialize(
            model(), factory, config=config_for(data, **sections), transport=transport
        ) as engine:
            train(engine, 0, HALF, batches)
            engine.save_checkpoint(path, extra={"epoch": 2, "names": ["a"]})

    LocalWorld(ranks, seed=1).run(rank_main)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_disk_that_fills_up_on_one_rank_is_told_on_every_rank(tmp_path: Path, zero: int) -> None:
    """The second layer finds the disk full; ranks that write nothing hear of it too."""
    with small_disk(tmp_path / "disk", "64k") as disk:

        def rank_main(transport: Transport) -> list[float]:
            config = config_for(2, memory={"zero": zero, "bucket_mb": 0.001})
            with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
                train(engine, 0, 1)
                with pytest.raises(axrt.SaveError, match="No space left on device"):
                    engine.save_checkpoint(disk / "a")
                with pytest.raises(axrt.ConfigError, match="no whole checkpoint"):
                    engine.load_checkpoint(disk)
                return train(engine, 1, 2)

        LocalWorld(4, seed=zero).run(rank_main)


Loaded = tuple[list[float], dict[str, Tensor]]


def load(
    path: Path,
    ranks: int,
    data: int = 1,
    model: Any = perceptron,
    factory: Any = adamw,
    batches: Any = BATCHES,
    **sections: Any,
) -> Loaded:
    """Losses of the steps after loading, and the parameters at the end."""

    def rank_main(transport: Transport) -> Loaded:
        with axrt.initialize(
            model(), factory, config=config_for(data, **sections), transport=transport
        ) as engine:
            train(engine, 0, 1, batches)  # something to forget
            assert engine.load_checkpoint(path) == {"epoch": 2, "names": ["a"]}
            assert (engine.step, engine.samples) == (HALF, HALF * MICROBATCHES)
            return train(engine, HALF, STEPS, batches), {
                n: p.detach().clone() for n, p in copies(engine)
            }

    ranks_loaded = LocalWorld(ranks, seed=2).run(rank_main)
    return ranks_loaded[0][0], {
        name: tensor for _, parameters in ranks_loaded for name, tensor in parameters.items()
    }


@swept(
    ("sections", [{}, {"optimizer": {"clip": 0.5}, "memory": {"bucket_mb": 0.001}}]),
    ("factory", [adamw, momentum, lambda named: torch.optim.Adafactor([p for _, p in named])]),
)
def test_n_steps_equal_k_plus_the_rest_to_the_bit(
    tmp_path: Path, factory: Any, sections: Any
) -> None:
    whole = train_in_plain_torch(
        perceptron(), BATCHES, STEPS, factory, clip=0.5 if sections else 0.0
    )
    save(tmp_path / "a", 2, factory=factory, **sections)
    losses, parameters = load(tmp_path / "a", 2, factory=factory, **sections)
    assert losses == whole.losses[HALF:]
    assert all(torch.equal(parameters[name], tensor) for name, tensor in whole.parameters.items())


@swept(
    ("loaded", [(1, 1), (2, 1), (4, 1), (2, 2), (6, 2), (4, 4)]),
    ("saved", [(1, 1), (3, 1), (4, 2), (2, 2)]),
)
def test_any_pipe_and_data_sizes_load_any_other(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    save(tmp_path / "a", *saved)
    losses, _ = load(tmp_path / "a", *loaded)
    # Dropout's seeds count microbatches over all replicas, so the only difference is rounding.
    assert losses == pytest.approx(
        train_in_plain_torch(perceptron(), BATCHES, STEPS, adamw).losses[HALF:], rel=1e-4
    )
    if saved[1] == loaded[1] == 1:
        assert losses == train_in_plain_torch(perceptron(), BATCHES, STEPS, adamw).losses[HALF:]


def test_replicas_go_on_to_the_bit(tmp_path: Path) -> None:
    config = config_for(2)
    whole = together(
        LocalWorld(4).run(
            lambda t: train_on_a_rank(t, perceptron(), BATCHES, STEPS, config, adamw)
        ),
        2,
    )
    save(tmp_path / "a", 4, 2)
    losses, parameters = load(tmp_path / "a", 4, 2)
    assert losses == whole.losses[HALF:]
    assert all(torch.equal(parameters[name], tensor) for name, tensor in whole.parameters.items())


@pytest.mark.parametrize(("saved", "loaded"), [(1, 2), (2, 1), (3, 2)])
def test_tied_weights_go_on_to_the_bit_on_other_ranks(
    tmp_path: Path, saved: int, loaded: int
) -> None:
    config, batches = config_for(1), token_batches()
    whole = together(
        LocalWorld(2).run(lambda t: train_on_a_rank(t, tied(), batches, STEPS, config, adamw))
    )
    save(tmp_path / "a", saved, model=tied, batches=batches)
    losses, parameters = load(tmp_path / "a", loaded, model=tied, batches=batches)
    assert losses == whole.losses[HALF:]
    assert all(torch.equal(parameters[name], tensor) for name, tensor in whole.parameters.items())


def test_files_are_by_layer_with_the_names_of_the_whole_model(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save(tmp_path / "a", 3)
    names = {
        key for file in (tmp_path / "a").glob("layer-*.safetensors") for key in load_file(file)
    }
    assert names == set(perceptron().sequential(7).state_dict())
    assert {"0.up.weight/exp_avg", "0.up.weight/exp_avg_sq", "0.up.weight/step"} <= set(
        load_file(tmp_path / "a" / "optimizer-0000.safetensors")
    )
    told = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert told["step"] == HALF
    assert told["seed"] == 7
    assert told["config"]["schedule"]["microbatches"] == MICROBATCHES
    assert {"torch", "axrt", "python"} <= told["versions"].keys()
    assert (tmp_path / "latest").read_text() == "a\n"
    assert not list(tmp_path.glob("*.partial"))


def test_buffers_are_saved_from_the_first_replica_and_loaded_everywhere(tmp_path: Path) -> None:
    def rank_main(transport: Transport, then: str) -> list[float]:
        model = axrt.PipelineModule(
            [axrt.LayerSpec(nn.BatchNorm1d, 16), axrt.LayerSpec(nn.Linear, 16, 5)],
            functional.cross_entropy,
        )
        with axrt.initialize(model, config=config_for(2), transport=transport) as engine:
            if then == "save":
                train(engine, 0, 2)
                engine.save_checkpoint(tmp_path / "a")
            else:
                engine.load_checkpoint(tmp_path / "a")
            return [
                float(value.sum())
                for _, layer in engine._model.layers()
                for value in layer.buffers()
            ]

    saved = LocalWorld(2).run(lambda transport: rank_main(transport, "save"))
    loaded = LocalWorld(2).run(lambda transport: rank_main(transport, "load"))
    assert saved[0] != saved[1]
    assert loaded == [saved[0], saved[0]]


def alone(model: axrt.PipelineModule | None = None) -> axrt.Engine:
    return axrt.initialize(
        model or perceptron(), adamw, config=config_for(1), transport=LocalWorld(1).alone()
    )


def narrower() -> axrt.PipelineModule:
    return axrt.PipelineModule(
        [axrt.LayerSpec(nn.Linear, 16, 8), axrt.LayerSpec(nn.Linear, 8, 5)],
        functional.cross_entropy,
    )


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    save(tmp_path / "a", 1)
    other = axrt.PipelineModule(
        [*perceptron().layers[:-1], axrt.LayerSpec(nn.Linear, 16, 7)], functional.cross_entropy
    )
    engine = alone(other)
    before = [p.detach().clone() for _, p in engine.named_parameters()]
    with pytest.raises(
        axrt.ConfigError, match=r"7.weight has shape \(5, 16\), and \(7, 16\) in the model"
    ):
        engine.load_checkpoint(tmp_path / "a")
    assert all(
        torch.equal(old, new)
        for old, (_, new) in zip(before, engine.named_parameters(), strict=True)
    )
    with pytest.raises(
        axrt.ConfigError, match=r"has layers \['Block', .*, and the model \['Linear', 'Linear'\]"
    ):
        alone(narrower()).load_checkpoint(tmp_path / "a")


def no_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def other_format(path: Path) -> None:
    (path / "manifest.json").write_text('{"format": 99}')


def torn(path: Path) -> None:
    file = path / "layer-0002.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def missing(path: Path) -> None:
    (path / "optimizer-0001.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (shutil.rmtree, "a does not exist; expected a run or a checkpoint"),
        (no_manifest, "has no whole checkpoint"),
        (other_format, "is of another format; expected format 2"),
        (torn, "layer-0002.safetensors has .* bytes, and .* were saved"),
        (missing, "optimizer-0001.safetensors: .*; expected a file of a whole checkpoint"),
    ],
)
def test_what_is_not_whole_is_refused(tmp_path: Path, harm: Any, text: str) -> None:
    save(tmp_path / "a", 1)
    harm(tmp_path / "a")
    with pytest.raises(axrt.ConfigError, match=text):
        alone().load_checkpoint(tmp_path / "a")


def test_a_name_that_is_taken_and_an_extra_that_is_no_json_are_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(
        axrt.ConfigError, match="taken exists; expected the name of a new checkpoint"
    ):
        alone().save_checkpoint(tmp_path / "taken")
    with pytest.raises(
        axrt.ConfigError, match="extra of a checkpoint: .* is not JSON serializable"
    ):
        alone().save_checkpoint(tmp_path / "new", extra={"a": {1, 2}})
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@swept(("waits", [True, False]), quick=1)
def test_a_checkpoint_that_has_the_name_is_replaced_once_the_new_one_is_whole(
    tmp_path: Path, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 1)
    engine = alone()
    engine.save_checkpoint(tmp_path / "a", extra={"second": True}, wait=waits, replace=True)
    engine.finish_saving()
    engine.close()
    assert alone().load_checkpoint(tmp_path / "a") == {"second": True}
    assert not list(tmp_path.glob("set-aside*"))
    (tmp_path / "other").mkdir()
    with pytest.raises(axrt.ConfigError, match="other exists; expected the name of a new check"):
        alone().save_checkpoint(tmp_path / "other", replace=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def killed() -> None:
        raise RuntimeError("killed")

    def replaced() -> None:
        with alone() as engine, pytest.raises(axrt.SaveError, match="No space left"):
            engine.save_checkpoint(tmp_path / "a", replace=True)
        assert alone().load_checkpoint(tmp_path) == {"second": True}, "it stands"

    with monkeypatch.context() as patched:
        patched.setattr("axrt.checkpoint.manifest.Manifest.write", full)
        replaced()
    rename = Path.rename
    with monkeypatch.context() as patched:
        patched.setattr(
            Path,
            "rename",
            lambda path, to: full() if path.suffix == ".partial" else rename(path, to),
        )
        replaced()
    with monkeypatch.context() as patched:  # killed between the two names
        patched.setattr(
            Path,
            "rename",
            lambda path, to: killed() if path.suffix == ".partial" else rename(path, to),
        )
        with pytest.raises(RuntimeError, match="killed"), alone() as engine:
            engine.save_checkpoint(tmp_path / "a", replace=True)
    former = tmp_path / "set-aside-replaced" / "a"
    assert alone().load_checkpoint(former) == {"second": True}
    with alone() as engine:
        engine.save_checkpoint(tmp_path / "a", {"third": True}, replace=True)
    assert alone().load_checkpoint(tmp_path) == {"third": True}


class Breaks(axrt.AxrtError):
    pass


@swept(("seed", range(5)), quick=2)
def test_the_same_engines_save_and_load_what_they_have_saved(tmp_path: Path, seed: int) -> None:
    def rank_main(transport: Transport) -> list[float]:
        with axrt.initialize(
            perceptron(), adamw, config=config_for(1), transport=transport
        ) as engine:
            engine.save_checkpoint(tmp_path / "a")
            losses = train(engine, 0, 2)
            engine.save_checkpoint(tmp_path / "b")
            engine.load_checkpoint(tmp_path)
            assert engine.step == 2
            engine.load_checkpoint(tmp_path / "a")
            assert engine.step == 0
            assert train(engine, 0, 2) == losses
            return losses

    assert len({tuple(losses) for losses in LocalWorld(3, seed).run(rank_main)}) == 1


def test_a_refusal_leaves_the_engines_as_they_were(tmp_path: Path) -> None:
    def rank_main(transport: Transport) -> list[float]:
        with axrt.initialize(
            perceptron(), adamw, config=config_for(1), transport=transport
        ) as engine:
            with pytest.raises(axrt.ConfigError, match="nowhere does not exist"):
                engine.load_checkpoint(tmp_path / "nowhere")
            (tmp_path / "taken").mkdir(exist_ok=True)
            with pytest.raises(axrt.ConfigError, match="taken exists"):
                engine.save_checkpoint(tmp_path / "taken")
            return train(engine, 0, 2)

    assert LocalWorld(2).run(rank_main)[0] == train_in_plain_torch(perceptron(), BATCHES, 2).losses


def counting_in_its_group() -> Any:
    class Counting(torch.optim.SGD):
        """Its rate falls with the steps that it has counted in its parameter group."""

        def __init__(self, named: Any) -> None:
            super().__init__([p for _, p in named], lr=1e-2)
            self.param_groups[0]["count"] = 0

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.param_groups[0]["count"] += 1
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.data -= 1e-2 / self.param_groups[0]["count"] * parameter.grad

    return Counting


def test_what_an_optimizer_keeps_in_its_groups_goes_on(tmp_path: Path) -> None:
    counting = counting_in_its_group()
    whole = train_in_plain_torch(perceptron(), BATCHES, STEPS, counting)
    save(tmp_path / "a", 2, factory=counting)
    losses, parameters = load(tmp_path / "a", 3, factory=counting)
    assert losses == whole.losses[HALF:]
    assert all(torch.equal(parameters[name], tensor) for name, tensor in whole.parameters.items())


def test_another_optimizer_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, factory=momentum)
    engine = alone()
    before = [p.detach().clone() for _, p in engine.named_parameters()]
    with pytest.raises(
        axrt.ConfigError, match=r"the optimizer of 0.norm.weight was SGD, and is AdamW here"
    ):
        engine.load_checkpoint(tmp_path / "a")
    assert all(
        torch.equal(old, new)
        for old, (_, new) in zip(before, engine.named_parameters(), strict=True)
    )


@pytest.mark.parametrize("name", ["latest", "a.partial"])
def test_names_that_mean_something_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(axrt.ConfigError, match="a checkpoint cannot be called"):
        alone().save_checkpoint(tmp_path / name)


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        axrt.ConfigError, match="expected a directory that checkpoints can be written to"
    ):
        alone().save_checkpoint(tmp_path / "file" / "a")


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("step", range(12))
def test_wherever_a_save_is_killed_a_whole_checkpoint_is_found(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rename, the last act of writing a file or a directory, may be the one that does not
    happen."""
    model = lambda: axrt.PipelineModule(  # noqa: E731
        [axrt.LayerSpec(nn.Linear, 16, 5)], functional.cross_entropy
    )
    save(tmp_path / "step-1", 1, model=model)
    left = [step]

    def until_killed(act: Any) -> Any:
        def wrapped(self: Path, target: Path) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return act(self, target)

        return wrapped

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", until_killed(Path.replace))
        patched.setattr(Path, "rename", until_killed(Path.rename))
        with suppress(Killed):
            save(tmp_path / "step-2", 1, model=model)
    whole = (tmp_path / "step-2" / "manifest.json").exists()
    assert whole == (step >= 4)  # two files, the manifest, the directory
    newest = folders.checkpoint_in(tmp_path)
    assert newest == tmp_path / ("step-2" if step >= 5 else "step-1")
    load(tmp_path, 1, model=model)
    (tmp_path / "latest").write_text("gone\n")
    assert folders.checkpoint_in(tmp_path) == tmp_path / ("step-2" if whole else "step-1")
    folders.prune(tmp_path, 2, folders.checkpoint_in(tmp_path))
    assert not list(tmp_path.glob("*.partial"))


def test_a_save_that_fails_leaves_the_one_before_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a", 2)

    def fail(self: object, directory: Path) -> None:
        raise Breaks("no space")

    with monkeypatch.context() as patched:
        patched.setattr(manifests.Manifest, "write", fail)
        with pytest.raises(Breaks):
            save(tmp_path / "b", 2)
    assert folders.checkpoint_in(tmp_path) == tmp_path / "a"
    assert not (tmp_path / "b").exists()
    save(tmp_path / "b", 3)  # over what was left of it
    assert folders.checkpoint_in(tmp_path) == tmp_path / "b"
    load(tmp_path, 2)


def test_a_save_that_fails_on_one_rank_is_told_on_all_and_training_goes_on(tmp_path: Path) -> None:
    """A directory stands where the last rank wants to write."""
    whole = train_in_plain_torch(perceptron(), BATCHES, STEPS).losses

    def rank_main(transport: Transport) -> list[float]:
        with axrt.initialize(
            perceptron(), adamw, config=config_for(1), transport=transport
        ) as engine:
            losses = train(engine, 0, 2)
            if engine.is_main:
                (tmp_path / "a.partial" / "layer-0007.safetensors.new").mkdir(parents=True)
            with pytest.raises(
                axrt.SaveError,
                match=(
                    r"layer-0007.*: Is a directory; .*a is not saved, what was saved before stands"
                ),
            ):
                engine.save_checkpoint(tmp_path / "a")
            assert not (tmp_path / "a.partial").exists()
            losses += train(engine, 2, 4)
            engine.save_checkpoint(tmp_path / "a")
            return losses + train(engine, 4, STEPS)

    assert LocalWorld(3).run(rank_main)[0] == whole
    assert folders.checkpoint_in(tmp_path) == tmp_path / "a"


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step:08}", 1)
        folders.prune(tmp_path, 2, folders.checkpoint_in(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock",
        "latest",
        "step-00000002",
        "step-00000003",
    ]
    folders.prune(tmp_path, 0, folders.checkpoint_in(tmp_path))
    assert len(list(tmp_path.iterdir())) == 4
