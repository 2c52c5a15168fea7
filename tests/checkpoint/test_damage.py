"""Whatever has happened to the files of a checkpoint is found, named, and the one before it is
taken."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.checkpoint.manifest import MANIFEST, Manifest
from axrt.cli import main
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..engine.reference import adamw, configured, random_batches
from .damage import ON_FILES, flip_a_bit, put, remove, rewrite_manifest

BATCHES = random_batches((6, 8), classes=3, microbatches=2)
OLDER, NEWER = "step-1", "step-2"


def model() -> axrt.PipelineModule:
    return axrt.PipelineModule(
        [axrt.LayerSpec(nn.Linear, 8, 4), axrt.LayerSpec(nn.Linear, 4, 3)], functional.cross_entropy
    )


def engine_on(transport: Transport | None = None, factory: Any = adamw) -> axrt.Engine:
    return axrt.initialize(
        model(), factory, config=configured(2), transport=transport or LocalWorld(1).alone()
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    with engine_on() as engine:
        for step in range(2):
            engine.train_batch(iter(BATCHES(step)))
            engine.save_checkpoint(folder / f"step-{step + 1}")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


@pytest.fixture(scope="module")
def engine() -> Iterator[axrt.Engine]:
    with engine_on() as one:
        yield one


def weights_of(engine: axrt.Engine) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in engine.named_parameters()}


FILES = [MANIFEST, "layer-0000.safetensors", "optimizer-0001.safetensors"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ON_FILES, ids=lambda damage: damage.__name__)
def test_damage_of_the_newest_is_named_and_the_one_before_is_taken(
    folder: Path,
    engine: axrt.Engine,
    name: str,
    damage: Callable[[Path, Random], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = folder.parent / "copy"
    for seed in range(3):
        shutil.copytree(folder, copy)
        what = damage(copy / NEWER / name, Random(seed))
        engine.load_checkpoint(copy)
        assert engine.loaded_from == copy / OLDER, what
        told = capsys.readouterr().err
        assert told.startswith(f"axrt: damaged, and not taken: {copy / NEWER}"), (what, told)
        assert f"Taken is {copy / OLDER}, the newest undamaged one" in told
        shutil.rmtree(copy)


@pytest.mark.parametrize("name", FILES)
def test_every_one_of_many_flipped_bits_is_found_and_nothing_is_changed(
    folder: Path, engine: axrt.Engine, name: str
) -> None:
    file, random = folder / NEWER / name, Random(7)
    whole, before = file.read_bytes(), weights_of(engine)
    for _ in range(60):
        what = flip_a_bit(file, random)
        with pytest.raises(axrt.DamagedError, match=name):  # noqa: PT012 - what was flipped is told where nothing is raised
            engine.load_checkpoint(folder / NEWER)
            pytest.fail(what)
        file.write_bytes(whole)
    assert all(torch.equal(value, before[key]) for key, value in weights_of(engine).items())
    engine.load_checkpoint(folder / NEWER)


def test_a_rank_that_finds_damage_tells_all_and_none_has_changed(folder: Path) -> None:
    """The last layer's file is read by the last rank alone."""
    remove(folder / NEWER / "optimizer-0001.safetensors", Random(0))

    def rank_main(transport: Transport) -> tuple[int, bool]:
        with engine_on(transport) as engine:
            before = weights_of(engine)
            with pytest.raises(axrt.DamagedError, match="optimizer-0001"):
                engine.load_checkpoint(folder / NEWER)
            unchanged = all(
                torch.equal(value, before[key]) for key, value in weights_of(engine).items()
            )
            engine.load_checkpoint(folder)
            return engine.step, unchanged

    assert LocalWorld(2).run(rank_main) == [(1, True), (1, True)]


def test_where_all_are_damaged_each_is_named(folder: Path, engine: axrt.Engine) -> None:
    for name in (OLDER, NEWER):
        flip_a_bit(folder / name / "layer-0001.safetensors", Random(1))
    with pytest.raises(axrt.ConfigError, match="step-2/layer-0001.*step-1/layer-0001"):
        engine.load_checkpoint(folder)


@pytest.mark.parametrize(
    "said",
    [
        *({"step": value} for value in ("x", None, 4.5, 10**30, -5, True, [1])),
        *({"samples": value} for value in ("x", None, -1, {"a": 1})),
        {"layers": []},
        {"layers": [3]},
        {"config": {"run": 3}},
        {"extra": []},
        {"versions": {"torch": 2}},
        {"files": {"layer-0000.safetensors": {"size_bytes": 3}}},
        {"files": {}},
        {"lr": "high"},
    ],
    ids=str,
)
def test_a_manifest_that_says_what_cannot_be_is_refused_in_one_line(
    folder: Path, engine: axrt.Engine, said: dict[str, Any]
) -> None:
    rewrite_manifest(folder / NEWER, lambda manifest: manifest.update(said))
    with pytest.raises(axrt.DamagedError) as refused:
        engine.load_checkpoint(folder / NEWER)
    assert "\n" not in str(refused.value)
    engine.load_checkpoint(folder)
    assert engine.step == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        '{"format": 2}',
        "[]",
        "3",
        '"' + "x" * 50,
        "\0\1",
        '{"format": 2, "step": 1e400}',
    ],
)
def test_a_manifest_that_is_no_manifest_is_refused_in_one_line(
    folder: Path, engine: axrt.Engine, text: str
) -> None:
    (folder / NEWER / MANIFEST).write_text(text)
    with pytest.raises(axrt.ConfigError):
        engine.load_checkpoint(folder / NEWER)


def test_a_checkpoint_of_a_format_before_this_one_is_refused_as_such(
    folder: Path, engine: axrt.Engine
) -> None:
    (folder / NEWER / MANIFEST).write_text('{\n "format": 1,\n "step": 3\n}')
    with pytest.raises(axrt.ConfigError, match="is of another format; expected format 2"):
        engine.load_checkpoint(folder)


def rewritten(path: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], object]) -> None:
    """Other tensors in a file, with digests that fit."""
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
    change(tensors, metadata)
    put(path, save(tensors, {key: json.dumps(value) for key, value in metadata.items()}))


def emptied(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    tensors.clear()
    metadata["parameters"].clear()


def without_moments(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    for key in [key for key in tensors if key.endswith("exp_avg")]:
        del tensors[key]


def in_half(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    tensors.update({key: value.half() for key, value in tensors.items()})


def of_other_fields(tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    metadata["parameters"] = {name: {"what": 1} for name in metadata["parameters"]}


@pytest.mark.parametrize("change", [emptied, without_moments, in_half, of_other_fields])
def test_optimizer_state_that_is_not_all_there_is_refused(
    folder: Path, engine: axrt.Engine, change: Any
) -> None:
    rewritten(folder / NEWER / "optimizer-0000.safetensors", change)
    with pytest.raises(axrt.DamagedError, match="optimizer-0000|no optimizer state of 0.weight"):
        engine.load_checkpoint(folder / NEWER)


@pytest.mark.parametrize("kind", [torch.float16, torch.float64, torch.int64])
def test_weights_of_another_type_are_refused(
    folder: Path, engine: axrt.Engine, kind: torch.dtype
) -> None:
    rewritten(
        folder / NEWER / "layer-0000.safetensors",
        lambda tensors, _: tensors.update({k: v.to(kind) for k, v in tensors.items()}),
    )
    with pytest.raises(
        axrt.ConfigError, match=f"0.(bias|weight) has type {kind}, and torch.float32 in the model"
    ):
        engine.load_checkpoint(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_not_gone_on_from(
    folder: Path, engine: axrt.Engine, value: float
) -> None:
    rewritten(
        folder / NEWER / "layer-0000.safetensors",
        lambda tensors, _: tensors["0.weight"][2, 1:2].fill_(value),
    )
    with pytest.raises(axrt.DamagedError, match="0.weight holds what is no finite number"):
        engine.load_checkpoint(folder / NEWER)
    engine.load_checkpoint(folder)
    assert engine.step == 1


def test_a_layer_that_was_frozen_when_it_was_saved_begins_to_train_and_buffers_may_be_infinite(
    tmp_path: Path,
) -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 3)
            self.register_buffer("mask", torch.full((3,), float("-inf")))

    def trained(freeze: bool) -> axrt.Engine:
        layers = [nn.Linear(8, 8).requires_grad_(not freeze), Masked()]
        return axrt.initialize(
            axrt.PipelineModule(layers, functional.cross_entropy),
            adamw,
            config=configured(2),
            transport=LocalWorld(1).alone(),
        )

    with trained(freeze=True) as engine:
        engine.train_batch(iter(BATCHES(0)))
        engine.save_checkpoint(tmp_path / "a")
    with trained(freeze=False) as engine:
        engine.load_checkpoint(tmp_path / "a")
        before = weights_of(engine)["0.weight"]
        engine.train_batch(iter(BATCHES(1)))
        assert not torch.equal(weights_of(engine)["0.weight"], before)


def checkpoint(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["checkpoint", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_manifest_of_a_former_version_is_read_by_todays_names(folder: Path) -> None:
    def as_before(manifest: dict[str, Any]) -> None:
        schedule, parallel = manifest["config"]["schedule"], manifest["config"]["parallel"]
        schedule["in_flight"], parallel["order"] = schedule.pop("max_held"), "data"
        del parallel["rank_order"]

    rewrite_manifest(folder / NEWER, as_before)
    config = axrt.Config.read(Manifest.read(folder / NEWER).config)
    assert (config.schedule.max_held, config.parallel.rank_order) == (0, "data")


def test_the_command_lists_verifies_and_shows(folder: Path) -> None:
    assert checkpoint("verify", str(folder)) == (
        0,
        f"{folder / NEWER}: as it was saved\n{folder / OLDER}: as it was saved\n",
    )
    code, shown = checkpoint("show", str(folder))
    assert json.loads(shown)["step"] == Manifest.read(folder / NEWER).step == 2
    flip_a_bit(folder / NEWER / "layer-0001.safetensors", Random(3))
    flip_a_bit(folder / OLDER / MANIFEST, Random(3))
    shutil.copytree(folder / NEWER, folder / "step-9.partial")
    code, listed = checkpoint("list", str(folder), "--json")
    rows = {Path(row["path"]).name: row for row in map(json.loads, listed.splitlines())}
    assert code == 0
    assert {name: row["state"] for name, row in rows.items()} == {
        NEWER: "whole",
        OLDER: "damaged",
        "step-9.partial": "not whole",
    }
    assert rows[NEWER]["step"] == "2"
    code, verified = checkpoint("verify", str(folder))
    assert code == 2
    assert verified.count("damaged: ") == 2
    code, told = checkpoint("list", str(folder / "nowhere"))
    assert (code, told) == (
        2,
        f"axrt: {folder / 'nowhere'} does not exist; expected a run or a checkpoint\n",
    )


def test_a_file_that_is_listed_and_of_no_layer_is_looked_for_too(folder: Path) -> None:
    def with_another(manifest: dict[str, Any]) -> None:
        files = manifest["files"]
        files["other.safetensors"] = files["layer-0000.safetensors"]

    rewrite_manifest(folder / NEWER, with_another)
    code, told = checkpoint("verify", str(folder / NEWER))
    assert code == 2
    assert "other.safetensors" in told
    shutil.copy(folder / NEWER / "layer-0000.safetensors", folder / NEWER / "other.safetensors")
    assert checkpoint("verify", str(folder / NEWER))[0] == 0
