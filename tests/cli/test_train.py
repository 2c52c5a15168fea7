"""`axrt train` on one rank: what it writes, and what it refuses."""

import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from axrt.cli import main
from axrt.config import Config
from axrt.models.registry import model_of
from axrt.planning.schedule import few_microbatches

from ..mpi.mpirun import ROOT
from ..mpi.mpirun import environment as environment_of_ranks

TINY = """
[model]
layers = 1
width = 8
heads = 1
context = 8
[schedule]
microbatches = 2
[data]
source = "text.txt"
held_out = 0.2
[run]
steps = 4
log_every = 2
eval_every = 2
eval_microbatches = 2
out = "out"
device = "cpu"
[checkpoint]
background = "off"  # each that is due is there, however short a step is
"""


@pytest.fixture(autouse=True)
def in_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "text.txt").write_text("all work and no play " * 20)
    return tmp_path


def axrt(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", *arguments])


def environment() -> dict[str, str]:
    return environment_of_ranks({"PYTHONPATH": str(ROOT)})


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path, "metrics.jsonl").read_text().splitlines()]


def test_a_run_begins_and_ends_in_few_lines() -> None:
    """The example of the docs: what it is, its schedule, its memory, and what comes next."""
    said = axrt("tiny.toml", "run.eval_every=0").output.splitlines()
    steps = [place for place, line in enumerate(said) if line.startswith("step ")]
    layout, schedule, memory = said[: steps[0]]
    model = model_of(Config.read("out/config.toml"))
    parameters = sum(p.numel() for p in model.sequential(0).parameters())
    size = f"{parameters:,} parameters, 16 tokens a step, 4 steps"
    assert layout == f"1 rank x 1 replica on cpu, {size}; files in out"
    assert schedule == "schedule  1f1b"
    held = r"[\d.]+ kB of tensors a rank at most; [\d.]+ GB are free"
    assert re.fullmatch(rf"memory    {held}", memory)
    done = said[-1]
    assert len(said) - steps[-1] <= 3
    loss = [line["loss"] for line in lines("out") if "loss" in line][-1]
    last = [line["val_loss"] for line in lines("out") if "val_loss" in line][-1]
    found = f"loss {loss:.3f}, validation {last:.3f}"
    then = "next: axrt generate out, axrt report out"
    assert re.fullmatch(rf"done in \d+ s: {found}; {then}", done)


@pytest.mark.parametrize("name", ["muon", "soap", "kfac"])
def test_an_optimizer_of_matrices_says_how_much_it_steps(name: str) -> None:
    keys = (f"optimizer.name={name}", 'optimizer.matrices=["*.up.weight", "*.project_in.weight"]')
    said = axrt("tiny.toml", "run.steps=1", "model.layers=2", *keys).output.splitlines()
    trained = dict(model_of(Config.read("out/config.toml")).sequential(0).named_parameters())
    sizes = {key: one.numel() for key, one in trained.items()}
    of_matrices = sum(
        number for key, number in sizes.items() if key.endswith(("up.weight", "in.weight"))
    )
    rest = sum(sizes.values()) - of_matrices
    assert said[1] == (
        f"optimizer {name} steps 4 matrices of {of_matrices:,} parameters, "
        f"and AdamW the other {rest:,}"
    )


def test_what_is_predicted_stands_beside_what_was_measured() -> None:
    result = axrt("-v", "tiny.toml")
    size = r"[\d.]+ [kMG]?B"
    predicted = re.search(
        rf"memory, predicted: at most ({size}) on a device, on rank 0 \(.*weights", result.output
    )
    assert predicted, result.output
    assert re.search(
        rf"memory, measured: at most {size}, on rank 0; predicted for it: [\d.<]+ [kMG]?B \(growth "
        r"of the process since .*, with what torch and MPI load and keep for themselves",
        result.output,
    )


def test_what_does_not_fit_is_not_trained() -> None:
    result = axrt("tiny.toml", "memory.device_gb=0.00001")
    assert result.exit_code == 2
    assert "memory.device_gb = 1e-05, but rank 0 will hold" in result.output
    assert not Path("out").exists()


def test_a_run_writes_its_configuration_and_its_metrics() -> None:
    result = axrt("tiny.toml", "run.seed=5")
    assert result.exit_code == 0, result.output
    assert tomllib.loads(Path("out/config.toml").read_text())["run"]["seed"] == 5
    metrics = lines("out")
    assert [line["step"] for line in metrics] == [0, 2, 2, 4, 4]
    assert [line["step"] for line in metrics if "val_loss" in line] == [0, 2, 4]
    assert {
        "step",
        "loss",
        "lr",
        "grad_norm",
        "tokens_per_s",
        "samples_per_s",
        "time_s",
    } <= metrics[1].keys()
    first, *others = [line for line in metrics if "loss" in line]
    assert first["schedule"]["policy"] == "1f1b"
    assert not any("schedule" in line for line in others), "it stays until the next start"
    assert metrics[1]["tokens_per_s"] == pytest.approx(8 * metrics[1]["samples_per_s"], rel=0.01)
    assert "files in out" in result.output
    assert "step 4: validation loss" in result.output


def test_a_line_of_progress_has_the_norm_of_its_own_step_and_comes_with_those_of_metrics() -> None:
    shown = axrt("tiny.toml", "run.log_every=1", "run.eval_every=0", "optimizer.clip=20").output
    norms = re.findall(r"step \d/4 .* norm (\S+)", shown)
    assert norms == [f"{line['grad_norm']:.3g}" for line in lines("out") if "loss" in line]
    rarely = axrt("tiny.toml", "run.log_every=4", "run.eval_every=0", "optimizer.clip=20").output
    assert re.findall(r"step \d/4 .* norm (\S+)", rarely) == norms[-1:]
    assert len(set(norms)) > 1


def test_half_lines_of_a_killed_process_go_before_others_follow() -> None:
    axrt("tiny.toml", "run.steps=2")
    for name in ("metrics.jsonl", "starts.jsonl"):
        with Path("out", name).open("a") as file:
            file.write('{"step": 2, "be')
    more = axrt("out/config.toml", "checkpoint.resume=auto", "run.steps=4")
    assert more.exit_code == 0, more.output
    assert [line["step"] for line in lines("out") if "loss" in line] == [2, 4]
    starts = Path("out/starts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in starts] == [0, 2]


def test_a_run_goes_on_from_within_its_own_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    axrt("tiny.toml", "run.steps=2", f"data.source={Path('text.txt').absolute()}")
    monkeypatch.chdir("out")
    for steps in (4, 6):
        more = axrt("config.toml", "checkpoint.resume=auto", f"run.steps={steps}")
        assert more.exit_code == 0, more.output
    assert [line["step"] for line in lines(".") if "loss" in line] == [2, 4, 6]


def test_names_of_files_need_not_be_utf_8() -> None:
    folder = os.fsdecode(b"caf\xe9")
    Path(folder).mkdir()
    Path("text.txt").rename(f"{folder}/text.txt")
    out = f"run.out={folder}/out"
    began = axrt("tiny.toml", out, f"data.source={folder}/text.txt")
    assert began.exit_code == 0, began.output
    assert Config.read(Path(folder) / "out/config.toml").data.source == f"{folder}/text.txt"
    more = axrt(f"{folder}/out/config.toml", "checkpoint.resume=auto", "run.steps=6")
    assert more.exit_code == 0, more.output
    assert [line["step"] for line in lines(f"{folder}/out") if "loss" in line] == [2, 4, 6]
    assert CliRunner().invoke(main, ["runs", folder, "--json"]).exit_code == 0


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("run.out=", "run.out = ''; expected the name of a directory to make"),
        ("run.out=.", "run.out = '.'; expected the name of a directory to make"),
        ("run.out=a/..", "run.out = 'a/..'; expected the name of a directory to make"),
        ("run.out=" + "x" * 300, "has a name of 300 bytes in a path of 300"),
        ("run.out=" + "x/" * 3000, "has a name of 1 bytes in a path of 6000"),
        ('run.out="a\\u0000b"', "which is no character; expected text"),
        ('data.source="a\\u0000b"', "which is no character; expected text"),
        ("data.source=" + "x" * 300, "has a name of 300 bytes"),
        ("model.factory=:", "model.factory = ':'; expected 'package.module:function'"),
        ("model.factory=..a:b", "expected 'package.module:function'"),
        ("schedule.policy=:", "expected 'package.module:Class'"),
        ("schedule.policy=..a:b", "expected 'package.module:Class'"),
        ("model.width=9223372036854775807", "expected at least 1 and at most 16777216"),
    ],
)
def test_what_no_path_and_no_name_can_be_is_refused_with_code_2(setting: str, text: str) -> None:
    refused = axrt("tiny.toml", setting)
    assert refused.exit_code == 2, refused.output
    assert text in " ".join(refused.output.split())
    assert not Path("out").exists()


def test_few_microbatches_for_the_ranks_are_told_with_a_number_that_would_do() -> None:
    assert few_microbatches(2, 1) == (
        "schedule.microbatches = 1 on 2 ranks of a pipeline leaves each of them idle for about 50% "
        "of a step; expected 8 or more"
    )
    assert few_microbatches(2, 2) == few_microbatches(1, 1) == ""


def test_a_second_run_gets_a_directory_of_its_own_and_the_same_losses() -> None:
    axrt("tiny.toml")
    axrt("out/config.toml", "run.out=out")
    assert [line.get("loss") for line in lines("out")] == [
        line.get("loss") for line in lines("out-2")
    ]


def test_a_wrong_key_leaves_with_code_2_and_writes_nothing() -> None:
    result = axrt("tiny.toml", "run.step=3")
    assert result.exit_code == 2
    assert "there is no key run.step; did you mean run.steps?" in result.output
    assert not Path("out").exists()


def test_the_first_code_is_left_in_the_file_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AXRT_EXIT_FILE", "code")
    assert axrt("tiny.toml", "run.step=3").exit_code == 2
    assert axrt("tiny.toml").exit_code == 0
    assert Path("code").read_text() == "2\n"


def test_missing_data_is_named() -> None:
    result = axrt("tiny.toml", "data.source=nowhere")
    assert result.exit_code == 2
    assert "nowhere: No such file or directory" in result.output


def test_a_run_that_its_data_is_too_short_for_leaves_no_directory() -> None:
    result = axrt("tiny.toml", "model.context=400")
    assert result.exit_code == 2, result.output
    assert not Path("out").exists()


def test_more_stages_than_layers_are_refused() -> None:
    result = axrt("tiny.toml", "parallel.pipe=2")
    assert result.exit_code == 2
    assert "1 rank does not factor into" in result.output


OWN = """
import scheduler
from torch import nn
import axrt
from axrt.model import cross_entropy

def build(config):
    layers = [axrt.LayerSpec(nn.Embedding, 256, 8), nn.Linear(8, 256)]
    return axrt.PipelineModule(layers[:scheduler.DEPTH], cross_entropy)

def broken(config):
    return None
"""


def test_a_model_of_the_users_own_trains_and_a_scheduler_py_beside_it_does_no_harm(
    in_a_directory: Path,
) -> None:
    (in_a_directory / "mine.py").write_text(OWN)
    (in_a_directory / "scheduler.py").write_text("DEPTH = 2\n")
    (in_a_directory / "offload.py").write_text("raise RuntimeError('nobody asked for me')\n")
    result = axrt("tiny.toml", "model.factory=mine:build")
    assert result.exit_code == 0, result.output
    assert len(lines("out")) == 5


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        ("mine:without_argument", "without_argument cannot be called with one argument"),
        ("no_colon", "expected 'package.module:function'"),
        ("nowhere_at_all:build", "No module named 'nowhere_at_all'"),
        ("json:nothing", "nothing is not in json"),
        ("builtins:repr", "repr returned str; expected a function that returns a PipelineModule"),
    ],
)
def test_a_factory_that_gives_no_model_is_refused(factory: str, text: str) -> None:
    Path("mine.py").write_text("def without_argument(): ...")
    sys.modules.pop("mine", None)
    result = axrt("tiny.toml", f"model.factory={factory}")
    assert result.exit_code == 2, result.output
    assert text in result.output


EXITS = """
import sys
import torch
import axrt

def factory(config):
    sys.exit(0)

class Built(torch.nn.Module):
    def __init__(self):
        sys.exit()

class Run(torch.nn.Module):
    def forward(self, value):
        sys.exit(0)

def model_of(kind):
    def build(config):
        loss = torch.nn.functional.mse_loss
        return axrt.PipelineModule([axrt.LayerSpec(kind)], loss)
    return build

builds, runs = model_of(Built), model_of(Run)
"""


@pytest.mark.parametrize(
    ("factory", "code", "text"),
    [
        (
            "factory",
            2,
            r"axrt: model.factory = 'exits:factory': sys.exit was called in factory, .*exits.py:7; "
            r"expected a PipelineModule",
        ),
        (
            "builds",
            70,
            r"axrt: sys.exit\(\) was called in __init__, .*exits.py:11, within a call of the "
            r"engine, which was not done",
        ),
        (
            "runs",
            70,
            r"axrt: sys.exit\(0\) was called in forward, .*exits.py:15, within a call of the "
            r"engine, which was not done",
        ),
    ],
)
def test_an_exit_in_a_model_is_no_success(
    factory: str, code: int, text: str, in_a_directory: Path
) -> None:
    (in_a_directory / "exits.py").write_text(EXITS)
    sys.modules.pop("exits", None)
    result = axrt("tiny.toml", f"model.factory=exits:{factory}")
    assert result.exit_code == code, result.output
    assert re.search(text, result.output)


def test_a_run_saves_every_so_many_steps_and_at_its_end_and_keeps_the_last() -> None:
    axrt("tiny.toml", "run.steps=7", "checkpoint.every=2", "checkpoint.keep=3")
    folder = Path("out/checkpoints")
    assert sorted(path.name for path in folder.iterdir()) == [
        ".lock",
        "latest",
        "step-00000004",
        "step-00000006",
        "step-00000007",
    ]
    assert (folder / "latest").read_text() == "step-00000007\n"


def test_a_run_may_save_nothing() -> None:
    axrt("tiny.toml", "checkpoint.dir=")
    assert not Path("out/checkpoints").exists()


def losses(path: str) -> dict[float, float]:
    return {line["step"]: line["loss"] for line in lines(path) if "loss" in line}


def test_a_run_that_goes_on_has_the_losses_of_one_that_never_stopped() -> None:
    axrt("tiny.toml", "run.steps=8", "run.log_every=1", "run.out=whole")
    axrt("tiny.toml", "run.steps=8", "run.log_every=1", "checkpoint.every=3")
    kept = Path("out/checkpoints/step-00000006")
    result = axrt("whole/config.toml", "run.out=rest", f"checkpoint.resume={kept}")
    assert result.exit_code == 0, result.output
    assert f"going on from {kept} at step 6" in result.output
    assert losses("rest") == {step: loss for step, loss in losses("whole").items() if step > 6}
    assert [line["step"] for line in lines("rest") if "resumed_from" in line] == [6]


def test_a_run_that_goes_on_from_itself_stays_in_its_directory() -> None:
    first = axrt("tiny.toml", "checkpoint.resume=auto")
    assert "going on" not in first.output
    again = axrt("out/config.toml", "run.steps=6")
    assert "going on from out/checkpoints/step-00000004 at step 4" in again.output, again.output
    assert sorted(path.name for path in Path().iterdir() if path.is_dir()) == ["out"]
    assert max(losses("out")) == 6
    times = [line["time_s"] for line in lines("out")]
    assert times == sorted(times)  # of both starts together


def test_another_layout_of_the_same_global_batch_reads_on_where_the_first_stopped() -> None:
    axrt(
        "tiny.toml",
        "run.steps=8",
        "run.log_every=1",
        "run.out=whole",
        "schedule.microbatches=4",
        "schedule.microbatch_size=1",
    )
    axrt(
        "tiny.toml",
        "run.steps=4",
        "run.log_every=1",
        "schedule.microbatches=2",
        "schedule.microbatch_size=2",
    )
    other = ("schedule.microbatches=1", "schedule.microbatch_size=4", "checkpoint.resume=out")
    axrt("tiny.toml", "run.steps=8", "run.log_every=1", "run.out=rest", *other)
    whole = losses("whole")
    assert {**losses("out"), **losses("rest")} == pytest.approx(whole, rel=1e-4)


def test_a_checkpoint_to_go_on_from_must_be_there() -> None:
    result = axrt("tiny.toml", "checkpoint.resume=nowhere")
    assert result.exit_code == 2
    assert "nowhere does not exist" in result.output
    assert not Path("out").exists()


def test_a_place_for_checkpoints_that_cannot_be_written_is_refused_before_the_first_step() -> None:
    Path("file").write_text("")
    result = axrt("tiny.toml", f"checkpoint.dir={Path('file').absolute()}")
    assert result.exit_code == 2
    assert (
        "expected a directory that checkpoints can be written to (checkpoint.dir)" in result.output
    )
    assert (
        not any("loss" in line for line in lines("out"))
        if Path("out/metrics.jsonl").exists()
        else True
    )


def test_what_latest_says_decides_nothing_and_is_told_where_it_is_wrong() -> None:
    axrt("tiny.toml", "checkpoint.every=2", "checkpoint.keep=0")
    latest = Path("out/checkpoints/latest")
    latest.write_text("step-00000002\n")
    result = axrt("out/config.toml", "checkpoint.resume=auto")
    assert "latest names 'step-00000002'; taken is step-00000004" in result.output
    assert latest.read_text() == "step-00000004\n"
    for said in (b"gone\n", b"\xff\xfe", b"x" * 5000, b"", b"../..", b"a\0b"):
        latest.write_bytes(said)
        assert "at step 4" in axrt("out/config.toml", "checkpoint.resume=auto").output
        assert latest.read_text() == "step-00000004\n"


def test_whoever_goes_back_to_what_was_set_aside_has_it_saved_whatever_is_kept() -> None:
    axrt("tiny.toml", "checkpoint.every=1", "checkpoint.keep=0", "run.steps=4")
    config, folder = "out/config.toml", Path("out/checkpoints")
    axrt(config, f"checkpoint.resume={folder}/step-00000001", "run.steps=8")
    told = axrt(
        config,
        f"checkpoint.resume={folder}/set-aside-after-step-00000001/step-00000002",
        "run.steps=4",
        "checkpoint.keep=2",
    )
    assert told.exit_code == 0, told.output
    assert "at step 2" in told.output
    assert (folder / "latest").read_text() == "step-00000004\n"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000003", "step-00000004"]
    assert len(list((folder / "set-aside-after-step-00000002").iterdir())) == 6


def test_whoever_has_gone_back_once_goes_on_from_there() -> None:
    axrt("tiny.toml", "checkpoint.every=1", "checkpoint.keep=0")
    axrt("out/config.toml", "checkpoint.resume=out/checkpoints/step-00000002", "run.steps=5")
    assert "at step 5" in axrt("out/config.toml", "run.steps=6").output


def test_to_go_on_and_to_save_nothing_is_refused() -> None:
    axrt("tiny.toml")
    result = axrt("out/config.toml", "checkpoint.resume=auto", "checkpoint.dir=")
    assert result.exit_code == 2
    assert "nothing is saved that the run could go on from" in result.output


def test_a_start_that_is_refused_sets_nothing_aside() -> None:
    axrt("tiny.toml", "checkpoint.every=1", "checkpoint.keep=0")
    before = sorted(Path("out/checkpoints").iterdir())
    result = axrt(
        "out/config.toml", "checkpoint.resume=out/checkpoints/step-00000002", "model.heads=2"
    )
    assert result.exit_code == 2, result.output
    assert sorted(Path("out/checkpoints").iterdir()) == before


def test_a_run_that_was_complete_ends_at_once_and_says_so() -> None:
    axrt("tiny.toml")
    result = axrt("out/config.toml", "checkpoint.resume=auto")
    assert result.exit_code == 0, result.output
    assert "is reached; set run.steps higher" in result.output
    assert (
        "interrupted" not in axrt("out/config.toml", "checkpoint.resume=auto", "run.steps=2").output
    )


def test_settings_that_are_others_on_going_on_are_told_and_another_model_is_refused() -> None:
    axrt("tiny.toml")
    told = axrt(
        "out/config.toml",
        "checkpoint.resume=auto",
        "run.steps=6",
        "run.seed=9",
        "schedule.microbatches=4",
    ).output
    assert "changed since then: run.seed 0 -> 9, run.steps 4 -> 6, samples a step 2 -> 4" in told
    refused = axrt("tiny.toml", "checkpoint.resume=out", "model.heads=2")
    assert refused.exit_code == 2
    assert "is of a model with model.heads = 1, and it is 2 here" in refused.output


def test_data_that_has_changed_is_told_on_going_on() -> None:
    axrt("tiny.toml")
    same = axrt("out/config.toml", "checkpoint.resume=auto", "run.steps=5")
    assert "changed since then: run.steps 4 -> 5\n" in same.output
    Path("text.txt").write_text("all work and no pray " * 20)
    told = axrt("out/config.toml", "checkpoint.resume=auto", "run.steps=6").output
    assert re.search(r"run.steps 5 -> 6, text.txt 420 bytes \(digest (\w+)\) -> 420 bytes \(", told)


def test_a_run_goes_on_from_itself_wherever_it_was_moved_and_says_when_there_is_nothing() -> None:
    assert (
        "no checkpoint in out: beginning anew" in axrt("tiny.toml", "checkpoint.resume=auto").output
    )
    Path("out").rename("moved")
    told = axrt("moved/config.toml", "checkpoint.resume=auto", "run.steps=6").output
    assert "going on from moved/checkpoints/step-00000004 at step 4" in told
    assert not Path("out").exists()


def test_a_run_with_nothing_left_to_do_says_so_and_changes_nothing() -> None:
    axrt("tiny.toml", "run.steps=3")
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    again = axrt("out/config.toml", "checkpoint.resume=auto", "run.steps=3")
    assert again.exit_code == 0, again.output
    assert "run.steps = 3 is reached; set run.steps higher" in again.output
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_a_run_whose_steps_are_all_skipped_ends() -> None:
    result = axrt(
        "tiny.toml",
        "optimizer.lr=1e30",
        "optimizer.clip=1",
        "run.steps=100",
        "data.held_out=0",
        "run.eval_every=0",
    )
    assert result.exit_code == 70
    assert "skipped" in result.output or "the loss is" in result.output
    assert result.output.count("skipped, the norm") <= 2


def test_a_run_in_float16_writes_its_scale_and_goes_on_in_another_type() -> None:
    keys = ("precision.weights=float16", "precision.loss_scale=16777216", "run.log_every=1")
    told = axrt("tiny.toml", *keys, "run.steps=12")
    assert told.exit_code == 0, told.output
    scales = [line["loss_scale"] for line in lines("out") if "loss" in line]
    skipped = [line.get("skipped", False) for line in lines("out") if "loss" in line]
    assert scales[0] == 2.0**24
    assert skipped[0]
    assert not skipped[-1]
    fallen = [after == before / 2 for before, after in pairwise(scales)]
    assert fallen == skipped[:-1]
    assert "step 1: skipped, a gradient overflows at scale 1.67772e+07" in told.output
    for done, weights in ((14, "bfloat16"), (16, "float32"), (18, "float16")):
        keys = (f"precision.weights={weights}", f"run.steps={done}", "checkpoint.resume=auto")
        then = axrt("out/config.toml", *keys)
        assert then.exit_code == 0, then.output
        assert lines("out")[-1]["step"] == done


def test_the_last_step_of_an_interrupted_run_has_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from axrt.cli.train.interrupt import Interrupt

    def three_steps(self: Interrupt, batches: Iterator[Any], microbatches: int) -> Iterator[Any]:
        return islice(batches, 3 * microbatches)

    monkeypatch.setattr(Interrupt, "until", three_steps)
    assert "interrupted after step 3" in axrt("tiny.toml", "run.steps=100").output
    assert [line["step"] for line in lines("out") if "loss" in line] == [2, 3]


def test_the_keys_can_be_asked_for() -> None:
    assert "  clip = 0.0" in CliRunner().invoke(main, ["train", "--keys"]).output


def test_workers_change_no_loss() -> None:
    axrt("tiny.toml", "run.log_every=1")
    axrt("tiny.toml", "run.log_every=1", "data.workers=2")
    assert losses("out") == losses("out-2")


@pytest.mark.parametrize("out", ["", ".", ".."])
def test_a_run_that_may_go_on_has_a_name_of_its_own_too(out: str) -> None:
    """`axrt launch` sets this key: once a run was begun among the user's files."""
    result = axrt("tiny.toml", f"run.out={out}", "checkpoint.resume=auto")
    assert result.exit_code == 2
    assert "expected the name of a directory to make" in result.output
    assert sorted(path.name for path in Path().iterdir()) == ["text.txt", "tiny.toml"]


def test_another_file_beside_a_run_does_not_say_where_it_goes_on() -> None:
    assert axrt("tiny.toml", "run.steps=1").exit_code == 0
    Path("out/other.toml").write_text(TINY)
    result = axrt("out/other.toml", "run.out=elsewhere", "checkpoint.resume=auto", "run.steps=1")
    assert "files in elsewhere" in result.output


ODD = """
import torch
from torch import nn
import axrt

class Looks(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        if self.weight.is_meta:
            raise TypeError("there is nothing to look at")

def of(config):
    return axrt.PipelineModule([nn.Embedding(256, 8), axrt.LayerSpec(Looks, 8, 256)], loss)

def looks(config):
    head = nn.Linear(8, 256)
    return axrt.PipelineModule([nn.Embedding(256, 8), lambda x: x * float(x.sum()), head], loss)

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
"""


@pytest.fixture
def odd(in_a_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(in_a_directory)
    (in_a_directory / "odd_models.py").write_text(ODD)


@pytest.mark.usefixtures("odd")
def test_memory_of_which_some_is_unknown_is_no_upper_bound() -> None:
    result = axrt("tiny.toml", "model.factory=odd_models:looks")
    assert result.exit_code == 0, result.output
    assert "of tensors a rank at least, as some is unknown (-v: what)" in result.output


@pytest.mark.usefixtures("odd")
def test_layers_that_cannot_be_built_without_memory_are_trained_and_not_counted() -> None:
    result = axrt("tiny.toml", "model.factory=odd_models:of")
    assert result.exit_code == 0, result.output
    assert "1 rank x 1 replica on cpu, 16 tokens a step, 4 steps; files in out" in result.output


def test_a_run_that_saves_nothing_is_not_to_generate() -> None:
    result = axrt("tiny.toml", "checkpoint.dir=")
    assert result.exit_code == 0, result.output
    assert "next: axrt report out" in result.output
    assert "axrt generate" not in result.output
