"""Keys of DeepSpeed's JSON configuration: read, without effect, or refused by name."""

from typing import Any

import pytest

from axrt.config import Config
from axrt.deepspeed.settings import Settings, read, refuse, settings_of
from axrt.errors import ConfigError

BATCH = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}


def read_settings(given: dict[str, Any], replicas: int) -> Settings:
    found, mistakes = settings_of(given, replicas)
    refuse(mistakes)
    return found


def of(**more: Any) -> Config:
    return Config.read(dict(read_settings({**BATCH, **more}, replicas=1).config))


@pytest.mark.parametrize(
    ("given", "size", "microbatches"),
    [
        ((48, 4, 4), 4, 4),
        ((48, 4, None), 4, 4),
        ((48, None, 4), 4, 4),
        ((None, 4, 4), 4, 4),
        ((48, None, None), 16, 1),
        ((None, 4, None), 4, 1),
    ],
)
def test_batch_sizes_follow_from_each_other(
    given: tuple[int | None, ...], size: int, microbatches: int
) -> None:
    names = (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
    )
    schedule = read_settings(dict(zip(names, given, strict=True)), replicas=3).config["schedule"]
    assert schedule == {"microbatches": microbatches, "microbatch_size": size}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gradient_accumulation_steps": 2},
        {"train_batch_size": 2},
        {"train_batch_size": 50, "train_micro_batch_size_per_gpu": 4},
        {"train_batch_size": 48, **BATCH},
        {"train_micro_batch_size_per_gpu": 0},
    ],
)
def test_batch_sizes_that_do_not_fit_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="train_batch_size"):
        read_settings(given, replicas=3)


def test_precision_is_read() -> None:
    assert of(bf16={"enabled": True}).precision.weights == "bfloat16"
    assert of(bf16={"enabled": False}, fp16={"enabled": False}).precision.weights == "float32"
    moving = of(fp16={"enabled": True, "initial_scale_power": 8, "loss_scale_window": 7}).precision
    assert (moving.weights, moving.loss_scale, moving.loss_scale_interval) == ("float16", 256.0, 7)
    fixed = of(fp16={"enabled": True, "loss_scale": 128}).precision
    assert (fixed.loss_scale, fixed.loss_scale_interval) == (128, 0)
    narrow = of(bf16={"enabled": True}, data_types={"grad_accum_dtype": "bf16"})
    assert narrow.precision.gradients == "weights"
    with pytest.raises(ConfigError, match="both enabled"):
        of(bf16={"enabled": True}, fp16={"enabled": True})


def test_sections_that_are_off_are_off_whatever_else_they_have() -> None:
    half = {"enabled": False, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2}
    found = of(fp16=half, bf16={"enabled": True}).precision
    assert found.weights == "bfloat16"
    with pytest.raises(ConfigError, match="grad_accum_dtype is of narrow weights"):
        of(data_types={"grad_accum_dtype": "bf16"})


def test_zero_and_offload_are_read() -> None:
    zero = {"stage": 2, "reduce_bucket_size": 2**20, "overlap_comm": True}
    memory = of(zero_optimization=zero).memory
    assert (memory.zero, memory.bucket_mb) == (2, 4.0)
    on_host = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    assert of(zero_optimization={"stage": 1, **on_host}).memory.offload == "cpu"
    some = {"offload_optimizer": {"device": "cpu", "ratio": 0.25}}
    assert of(zero_optimization={"stage": 1, **some}).memory.offload == "cpu"
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": "/scratch"}}
    assert of(zero_optimization=disk).memory.scratch == "disk:/scratch"


def test_the_rest_is_read_too() -> None:
    found = read_settings(
        {
            **BATCH,
            "gradient_clipping": 0.5,
            "steps_per_print": 3,
            "dataloader_drop_last": True,
            "wall_clock_breakdown": True,
            "prescale_gradients": False,
            "elasticity": {"enabled": False, "max_train_batch_size": 9},
            "axrt": {"schedule": {"policy": "gpipe"}, "run": {"patience_s": 5}},
        },
        replicas=1,
    )
    config = Config.read(dict(found.config))
    assert (config.optimizer.clip, config.schedule.policy, config.run.patience_s) == (
        0.5,
        "gpipe",
        5,
    )
    assert (found.prints_every, found.drop_last) == (3, True)
    assert found.unused == ("wall_clock_breakdown",)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"amp": {"enabled": True}}, "amp.enabled = True has no counterpart; expected .*bf16"),
        ({"elasticity": {"enabled": True, "version": 0.1}}, "elasticity.enabled = True"),
        ({"prescale_gradients": True}, "prescale_gradients = True"),
        ({"no_such_key": 3}, "no_such_key = 3 has no counterpart; leave it away"),
        (
            {"gradient_acumulation_steps": 4},
            "gradient_acumulation_steps = 4 has no counterpart; did you mean 'gradient_accumulat",
        ),
        (
            {"optimiser": {"type": "Adam"}},
            "optimiser.type = 'Adam' .* did you mean 'optimizer.type'",
        ),
        ({"fp16": {"enabled": True, "auto_cast": True}}, "fp16.auto_cast = True"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            'offload_param.device = .*expected "axrt"',
        ),
        ({"zero_optimization": {"offload_optimizer": {"device": "tape"}}}, "expected 'cpu'"),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "without nvme_path"),
        ({"zero_optimization": 3}, "zero_optimization = 3; expected an object"),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(more: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        read_settings({**BATCH, **more}, replicas=1)


def test_a_file_is_read_and_a_bad_one_refused(tmp_path: Any) -> None:
    (file := tmp_path / "ds.json").write_text('{"train_batch_size": 8}')
    assert read(file) == {"train_batch_size": 8}
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "missing.json")
    file.write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        read(file)
    file.write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        read(file)


def test_all_mistakes_come_at_once() -> None:
    wrong = {"amp": {"a": 1}, "bf16": {"enabled": True}, "fp16": {"enabled": True}, "zero": 3}
    with pytest.raises(ConfigError) as refused:
        read_settings({**BATCH, **wrong, "train_batch_size": 9}, replicas=1)
    told = str(refused.value)
    assert "4 mistakes:" in told
    for text in ("train_batch_size = 9", "both enabled", "amp.a = 1", "zero = 3"):
        assert text in told


@pytest.mark.parametrize("value", ["false", "off", 2])
def test_what_is_no_yes_or_no_enables_nothing(value: Any) -> None:
    with pytest.raises(ConfigError, match="fp16.enabled = .*; expected true or false"):
        read_settings({**BATCH, "fp16": {"enabled": value}}, replicas=1)


def test_an_interval_of_checkpointed_activations_recomputes_them() -> None:
    assert of(pipeline={"activation_checkpoint_interval": 2}).memory.recompute == "full"
    assert of(pipeline={"activation_checkpoint_interval": 0}).memory.recompute == "none"


def test_monitors_that_are_on_are_taken_with_their_keys() -> None:
    section = {"enabled": True, "output_path": "a", "job_name": "b"}
    off = {"enabled": False, "project": "x"}
    found = read_settings({**BATCH, "csv_monitor": section, "wandb": off}, replicas=1)
    assert found.monitors == {"csv_monitor": section}
    with pytest.raises(ConfigError, match="csv_monitor.path = 'a' has no counterpart"):
        read_settings({**BATCH, "csv_monitor": {**section, "path": "a"}}, replicas=1)


def test_a_value_of_another_type_is_named_beside_all_others() -> None:
    wrong = {
        "train_batch_size": 2.5,
        "gradient_accumulation_steps": "four",
        "gradient_clipping": "x",
        "steps_per_print": -1,
        "dataloader_drop_last": "yes",
        "bf16": {"enabled": 2},
        "fp16": {"enabled": True, "loss_scale": "x", "loss_scale_window": 1.5},
        "data_types": {"grad_accum_dtype": "fp8"},
        "zero_optimization": {
            "stage": 7,
            "reduce_bucket_size": "5e8",
            "offload_optimizer": {"device": "tape", "nvme_path": 3},
        },
        "pipeline": {"activation_checkpoint_interval": "all"},
        "csv_monitor": {"enabled": True, "job_name": 4},
        "optimizer": "Adam",
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}},
        "axrt": {"memory": 3},
        "comms_logger": {"enabled": "off"},
        "amp": {"enabled": True},
    }
    _, mistakes = settings_of(wrong, replicas=1)
    for name in (
        "train_batch_size = 2.5; expected a whole number",
        "gradient_accumulation_steps = 'four'; expected a whole number",
        "gradient_clipping = 'x'; expected a number",
        "steps_per_print = -1; expected a number, 0 or more",
        "dataloader_drop_last = 'yes'; expected true or false",
        "bf16.enabled = 2; expected true or false",
        "fp16.loss_scale = 'x'; expected a number",
        "fp16.loss_scale_window = 1.5; expected a whole number",
        "data_types.grad_accum_dtype = 'fp8'; expected 'fp32' or 'bf16' or 'fp16'",
        "zero_optimization.stage = 7; expected a whole number from 0 to 3",
        "zero_optimization.reduce_bucket_size = '5e8'; expected a number",
        "zero_optimization.offload_optimizer.device = 'tape'; expected 'cpu' or 'nvme' or 'none'",
        "zero_optimization.offload_optimizer.nvme_path = 3; expected text",
        "pipeline.activation_checkpoint_interval = 'all'; expected a whole number",
        "csv_monitor.job_name = 4; expected text",
        "optimizer = 'Adam'; expected an object",
        "scheduler.params.warmup_max_lr = 'auto' is for a trainer that fills it in",
        "axrt.memory = 3; expected an object",
        "comms_logger.enabled = 'off'; expected true or false",
        "amp.enabled = True has no counterpart",
    ):
        (mistake,) = [text for text in mistakes if text.startswith(name)]
        mistakes.remove(mistake)
    assert mistakes == []


def test_what_a_trainer_would_fill_in_may_stand_where_it_changes_nothing() -> None:
    assert of(zero_optimization={"stage": 1, "overlap_comm": "auto"}).memory.zero == 1
