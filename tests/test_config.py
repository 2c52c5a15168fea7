"""What a configuration takes, and how it refuses."""

import re
from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from axrt import Config, ConfigError
from axrt.checkpoint.folder import folder_at
from axrt.config import Model, Schedule
from axrt.config.former import with_present_keys, with_present_names
from axrt.config.reading import parse_file
from axrt.world.mesh import Mesh

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.layer=3", "there is no key model.layer; did you mean model.layers?"),
        ("schedule.policy=1F1B", "expected one of '', 1f1b, .*; did you mean '1f1b'?"),
        ("modle.layers=3", "there is no section modle; did you mean model?"),
        ("zzz.layers=3", "there is no section zzz; expected one of model, data"),
        ("run.steps=fast", "run.steps = 'fast' is a string; expected an integer"),
        ("run.steps=1.5", "run.steps = 1.5 is a number; expected an integer"),
        ("run.share_gpu=1", "run.share_gpu = 1 is an integer; expected a boolean"),
        ("run.steps=0", "run.steps = 0; expected at least 1"),
        ("optimizer.betas=[0.9, 2]", r"expected at least 0 and at most 1"),
        ("optimizer.betas=[0.9]", r"optimizer.betas = \[0.9\]; expected two numbers"),
        ("model.dropout=-0.1", "model.dropout = -0.1; expected at least 0 and at most 0.999"),
        ("optimizer.lr=nan", "optimizer.lr = nan; expected at least 0"),
        (
            "schedule.policy=1f2b",
            "expected one of '', 1f1b, adaptive, axonn, .*; did you mean '1f1b'?",
        ),
        (
            "schedule.global_batch=7",
            "parallel.data x schedule.microbatches x schedule.microbatch_size = 1 x 8 x 1 = 8",
        ),
        (
            "precision.compute=float16",
            "precision.compute = 'float16'; expected one of float32, bfloat16",
        ),
        ("parallel.data=0", "parallel.data = 0; expected at least 1"),
        (
            "model.width=100",
            "model.width = 100 is no multiple of 2 x model.heads = 8; set it to 104",
        ),
        (
            "parallel.partition=[0, 1.5]",
            "parallel.partition .* expected a string or a list, each an integer",
        ),
        (
            "run.seed=9223372036854775808",
            "run.seed = 9223372036854775808; expected at least 0 and at most",
        ),
        ("optimizer.lr=inf", "optimizer.lr = inf; expected at least 0 and finite"),
        ("data.validation=val.bin", "one is a token file and another is text"),
        ("run=3", "'run=3' is no override; expected section.key=value"),
        ('run.out="runs/x', "begins as a value of TOML and is none"),
        ("optimizer.betas=[0.9", "begins as a value of TOML and is none"),
        (
            "run.steps=1\nmodel.layers=2",
            r"'run.steps=1\\nmodel.layers=2' has more than one line; expected section.key=value, "
            r"one at a time",
        ),
        ("run.out=here\r", r"'run.out=here\\r' has more than one line"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Config.read({}, [override])


def test_mistakes_are_told_all_at_once_unknown_keys_first() -> None:
    tree = {
        "run": {"steps": 0, "share_gpu": 1},
        "modle": {"layers": 3},
        "model": {"width": 100, "layer": 3},
        "memory": {"recompute": "half"},
        "schedule": {"policy": "zb-v", "max_held": 2, "global_batch": 7},
        "data": 3,
    }
    with pytest.raises(ConfigError) as caught:
        Config.read(tree, ["run.seed=1.5", "nonsense", "optimizer.lr=-1"])
    first, *lines = str(caught.value).splitlines()
    begins = [
        "'nonsense' is no override; expected section.key=value",
        "there is no section modle; did you mean model?",
        "there is no key model.layer; did you mean model.layers?",
        "[data] is an integer; expected a section of keys",
        "optimizer.lr = -1; expected at least 0",
        "schedule.max_held: policy zb-v has a bound of its own",
        "memory.recompute = ",
        "run.steps = 0; expected at least 1",
        "run.seed = 1.5 is a number; expected an integer",
        "run.share_gpu = 1 is an integer; expected a boolean",
        "schedule.global_batch = 7, but",
        "model.width = 100 is no multiple of 2 x model.heads = 8",
    ]
    assert first == f"{len(begins)} mistakes in the configuration:"
    assert [line[: len(text) + 2] for line, text in zip(lines, begins, strict=True)] == [
        f"  {text}" for text in begins
    ]


def test_a_value_that_does_not_fit_is_not_held_against_others() -> None:
    for wrong in ("model.heads=0", "model.heads=two", "model.head=3"):
        with pytest.raises(ConfigError) as caught:
            Config.read({}, [wrong, "model.width=100"])
        assert "\n" not in str(caught.value), (
            "width = 100 may be right for the number of heads that is meant"
        )


def test_code_is_told_all_its_mistakes_too() -> None:
    from axrt.config import Run

    with pytest.raises(
        ConfigError,
        match="2 mistakes in the configuration:\n  run.steps = -1; .*\n  run.log_every = 0; ",
    ):
        Run(steps=-1, log_every=0)
    with pytest.raises(
        ConfigError,
        match=(
            "2 mistakes in the configuration:\n  schedule.global_batch = 7.*\n  model.width = 100 "
            "is no"
        ),
    ):
        Config(schedule=Schedule(global_batch=7), model=Model(width=100))


def test_a_cap_is_for_policies_that_take_one() -> None:
    with pytest.raises(ConfigError, match="schedule.max_held: policy zb-v has a bound of its own"):
        Config.read({}, ["schedule.policy=zb-v", "schedule.max_held=2"])


def test_a_schedule_that_has_no_steps_to_fall_is_refused() -> None:
    with pytest.raises(ConfigError, match="optimizer.warmup_steps = 9 of run.steps = 9"):
        Config.read({"optimizer": {"schedule": "linear", "warmup_steps": 9}, "run": {"steps": 9}})


def test_code_is_checked_like_a_file() -> None:
    from axrt.config import Run

    with pytest.raises(ConfigError, match="run.steps = -1; expected at least 1"):
        Run(steps=-1)


def test_overrides_lie_over_the_file_and_a_bare_word_is_a_string(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[run]\nsteps = 3\nseed = 4\n")
    config = Config.read(file, ["run.steps=5", "run.out=runs/x", "parallel.partition=[0, 1, 2]"])
    assert (config.run.steps, config.run.seed, config.run.out, config.parallel.partition) == (
        5,
        4,
        "runs/x",
        (0, 1, 2),
    )


def test_a_file_that_is_missing_or_no_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.toml: No such file or directory"):
        Config.read(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("run = [")
    with pytest.raises(ConfigError, match="bad.toml is not TOML"):
        Config.read(tmp_path / "bad.toml")


def test_a_section_must_be_a_section() -> None:
    with pytest.raises(ConfigError, match=r"\[run\] is an integer; expected a section"):
        Config.read({"run": 3}, ["run.steps=5"])
    with pytest.raises(ConfigError, match=r"\[run\] is an integer; expected a section"):
        Config.read({"run": 3})


def test_a_configuration_is_frozen_and_reads_itself_back() -> None:
    config = Config.read({"schedule": {"microbatches": 3}})
    assert Config.read(config) == Config.read(config.as_dict()) == config
    with pytest.raises(FrozenInstanceError):
        config.run = config.run  # type: ignore[misc]


def test_every_key_has_a_meaning() -> None:
    config = Config()
    for section in fields(config):
        for item in fields(getattr(config, section.name)):
            assert item.metadata["meaning"], f"{section.name}.{item.name}"


def test_the_examples_are_good() -> None:
    """But for that of a cluster, which tests/planning reads."""
    for path in {*(ROOT / "examples").glob("*.toml")} - {ROOT / "examples" / "cluster.toml"}:
        assert Config.read(path).run.out.startswith("runs/")


def test_every_key_is_described_in_a_line() -> None:
    from axrt.config import described

    told = described()
    assert "  microbatches = 8                microbatches of a step and replica" in told
    assert len(told) == sum(1 + len(keys) for keys in Config().as_dict().values())


def test_ranks_that_do_not_factor_are_refused_with_what_would() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            "6 ranks do not factor into parallel.pipe x parallel.data = 4 x 1. Start 4 ranks, or "
            "set parallel.pipe = 0 "
        ),
    ):
        Mesh.of(rank=0, size=6, pipe=4, data=1)
    with pytest.raises(
        ConfigError,
        match="= any x 2. Start 2 ranks, or set parallel.data = 1 and parallel.pipe = 0",
    ):
        Mesh.of(rank=0, size=3, pipe=0, data=2)
    assert Mesh.of(rank=4, size=6, pipe=0, data=2) == Mesh(rank=4, pipe=3, data=2)


@pytest.mark.parametrize(
    ("order", "coordinates", "mine"), [("pipe", (1, 1), [3, 4, 5]), ("data", (0, 2), [0, 2, 4])]
)
def test_consecutive_ranks_are_one_pipeline_or_the_replicas_of_a_stage(
    order: str, coordinates: tuple[int, int], mine: list[int]
) -> None:
    mesh = Mesh(rank=4, pipe=3, data=2, order=order)
    assert (mesh.data_rank, mesh.pipe_rank) == coordinates
    assert [mesh.rank_of(mesh.data_rank, r) for r in range(3)] == mine
    for rank in range(6):
        other = Mesh(rank, 3, 2, order)
        assert mesh.rank_of(other.data_rank, other.pipe_rank) == rank


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(["pipe", "data"]),
)
def test_a_mesh_is_a_bijection_and_a_team_stands_together(
    pipe: int, data: int, tensor: int, order: str
) -> None:
    size = pipe * data * tensor
    seen = set()
    for rank in range(size):
        mesh = Mesh.of(rank, size, pipe, data, order, tensor)
        where = mesh.data_rank, mesh.pipe_rank, mesh.member
        assert all(0 <= of < most for of, most in zip(where, (data, pipe, tensor), strict=True))
        seen.add(where)
        assert mesh.rank_of(mesh.data_rank, mesh.place) == rank
        assert rank - mesh.member == mesh.rank_of(mesh.data_rank, mesh.pipe_rank * tensor)
    assert len(seen) == size
    assert {Mesh(0, pipe, data, order, tensor).row_of(rank) for rank in range(size)} == set(
        range(size)
    )


@pytest.mark.parametrize(
    ("size", "pipe", "data", "tensor", "said"),
    [
        (6, 0, 1, 4, "= any x 1 x 4. Start 4 ranks, or set parallel.tensor = 1, parallel.data"),
        (8, 3, 1, 2, "= 3 x 1 x 2. Start 6 ranks, or set parallel.pipe = 0 to take"),
        (8, 0, 3, 2, "= any x 3 x 2. Start 6 ranks, or set parallel.data = 1 and parallel.pipe"),
        (12, 3, 1, 2, "to take what there is, or parallel.data = 2"),
    ],
)
def test_ranks_that_no_team_fits_are_refused_with_what_would(
    size: int, pipe: int, data: int, tensor: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Mesh.of(0, size, pipe, data, "pipe", tensor)


def test_a_key_that_was_renamed_is_refused_with_its_new_name() -> None:
    with pytest.raises(ConfigError, match="schedule.in_flight is now schedule.max_held"):
        Config.read({"schedule": {"in_flight": 3}})
    with pytest.raises(ConfigError, match="parallel.order is now parallel.rank_order"):
        Config.read({}, ["parallel.order=data"])


def test_a_key_that_is_gone_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match="schedule.replan is gone: .* schedule.costs makes one"):
        Config.read({"schedule": {"replan": 3}})
    with pytest.raises(ConfigError, match="start_patience_s is gone: run.patience_s is how long"):
        Config.read({"run": {"start_patience_s": 60.0}})
    of_now = {"schedule": {"replan": 0}, "optimizer": {"speculate": "auto"}}
    assert Config.read(of_now) == Config()


def test_what_a_former_version_has_written_is_read_without_keys_that_are_gone() -> None:
    saved = {"schedule": {"replan": 3, "in_flight": 2}, "memory": {"offload": "auto", "zero": 1}}
    assert with_present_names(saved) == {
        "schedule": {"max_held": 2},
        "memory": {"offload": "cpu", "zero": 1},
    }


@pytest.mark.parametrize(("shard", "group"), [(2, 2), (0, 4)])
def test_a_key_that_has_gone_to_another_section_is_read_there(shard: int, group: int) -> None:
    saved = {"memory": {"zero": 1, "shard": shard}, "parallel": {"data": 4, "group": 4}}
    found = {"memory": {"zero": 1}, "parallel": {"data": 4, "group": group}}
    assert with_present_names(saved) == found


def test_a_scaling_that_a_former_version_has_written_is_one_key_now() -> None:
    saved = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_low": 1.0, "rope_high": 4.0}
    found = with_present_names({"model": {**saved, "rope_original": 16, "width": 64}})
    assert found == {"model": {"rope_scaling": "llama3:8,1,4,16", "width": 64}}
    none = {"rope_scaling": "", "rope_factor": 1.0, "rope_original": 8192}
    assert with_present_names({"model": none}) == {"model": {"rope_scaling": ""}}
    with pytest.raises(ConfigError, match="model.rope_factor is gone: model.rope_scaling says it"):
        Config.read({"model": {"rope_factor": 2.0}})


def test_the_directory_of_a_run_of_a_former_version_is_read(tmp_path: Path) -> None:
    former = """
        [model]
        rope_scaling = "linear"
        rope_factor = 2.0
        [schedule]
        replan = 3
        [memory]
        offload = "auto"
        [checkpoint]
        dir = "saved"
    """
    (tmp_path / "config.toml").write_text(former)
    config = Config.of_run(tmp_path)
    assert (config.memory.offload, config.model.rope_scaling) == ("cpu", "linear:2")
    assert folder_at(tmp_path) == tmp_path / "saved"
    with pytest.raises(ConfigError, match="is gone"):  # a user who trains from that file is told
        Config.read(parse_file(tmp_path / "config.toml"))


def test_settings_by_section_and_key_are_brought_to_todays_names() -> None:
    former = {"schedule.in_flight": 2, "schedule.replan": 3, "memory.recompute": "auto"}
    assert with_present_keys(former) == {"schedule.max_held": 2, "memory.recompute": "none"}


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [("offload", "auto", "'cpu'"), ("offload", "hybrid", "'cpu'"), ("recompute", "auto", "'full'")],
)
def test_a_value_that_is_gone_is_refused_with_what_to_do_instead(
    key: str, value: str, instead: str
) -> None:
    with pytest.raises(ConfigError, match=f"memory.{key} = '{value}' is gone: .*take {instead}"):
        Config.read({"memory": {key: value}})


@pytest.mark.parametrize("word", ["false", "off", '"false"', '"off"'])
def test_a_no_has_several_spellings_and_one_value(word: str) -> None:
    config = Config.read({}, [f"run.cuda_aware={word}", f"checkpoint.background={word}"])
    assert (config.run.cuda_aware, config.checkpoint.background) == ("false", "off")
    yes = "true" if word == "false" else "on"
    assert Config.read({}, [f"run.cuda_aware={yes}"]).run.cuda_aware == "true"
    with pytest.raises(ConfigError, match="run.progress = .*expected one of|is a boolean"):
        Config.read({}, [f"run.progress={yes}"])
