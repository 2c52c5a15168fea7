"""Learning rates against those of DeepSpeed 0.19.8, whose schedulers were run beside an optimizer
with a rate of 0.01 and asked before each step."""

import pytest

from axrt.deepspeed.learning_rate import learning_rate
from axrt.errors import ConfigError

MIN_MAX = {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01}
COSINE = {"total_num_steps": 9, "warmup_min_ratio": 0.1, "warmup_num_steps": 4}
THEIRS = [
    (
        "WarmupLR",
        {**MIN_MAX, "warmup_num_steps": 5},
        [0.001, 0.001, 0.004876089, 0.007143456, 0.008752178, 0.01, 0.01],
    ),
    (
        "WarmupLR",
        {**MIN_MAX, "warmup_num_steps": 5, "warmup_type": "linear"},
        [0.001, 0.001, 0.0028, 0.0046, 0.0064, 0.0082, 0.01, 0.01],
    ),
    (
        "WarmupDecayLR",
        {**MIN_MAX, "warmup_num_steps": 4, "total_num_steps": 9},
        [0.001, 0.001, 0.0055, 0.008132331, 0.01, 0.01, 0.0082, 0.0064, 0.0046, 0.0028],
    ),
    (
        "WarmupCosineLR",
        COSINE,
        [0, 0.001, 0.0055, 0.008132331, 0.01, 0.00904518, 0.00654543, 0.00345557, 0.00095582, 1e-6],
    ),
    (
        "WarmupCosineLR",
        {**COSINE, "cos_min_ratio": 0.05, "warmup_type": "linear"},
        [0, 0.001, 0.00325, 0.0055, 0.00775, 0.009092831, 0.006717831, 0.003782169, 0.001407169]
        + [0.0005] * 3,
    ),
]


@pytest.mark.parametrize(("kind", "params", "theirs"), THEIRS)
def test_rates_are_deepspeeds(kind: str, params: dict[str, float], theirs: list[float]) -> None:
    highest, factor = learning_rate({"type": kind, "params": params}, lr=0.01)
    rates = [highest * factor(step) for step in range(len(theirs))]
    assert rates == pytest.approx(theirs, abs=1e-9)


def test_the_optimizers_rate_is_the_highest_where_none_is_named() -> None:
    assert learning_rate({"type": "WarmupLR"}, lr=0.05)[0] == 0.05
    decays = {"type": "WarmupDecayLR", "params": {"total_num_steps": 10}}
    assert learning_rate(decays, lr=0.05)[0] == 0.001


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"type": "OneCycle"}, "'OneCycle' has no counterpart; expected WarmupLR"),
        ({"type": "WarmupDecayLR"}, "total_num_steps"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 3}}, "warmup_steps"),
        ({"type": "WarmupLR", "params": {"warmup_type": "cubic"}}, "'cubic'; expected 'log'"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 0}}, "expected more than 0"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}, "is a list"),
    ],
)
def test_what_has_no_counterpart_is_refused(section: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        learning_rate(section, lr=0.01)
