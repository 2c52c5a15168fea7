"""What docs/coming-from.md says of DeepSpeed's keys is what axrt.deepspeed does with them."""

import inspect
import re

import pytest

from axrt.deepspeed import settings
from axrt.deepspeed.monitors import SECTIONS
from axrt.errors import ConfigError

from .pages import text_of

BATCH = {"train_micro_batch_size_per_gpu": 1}
PAGE = text_of("coming-from")
SECTION = PAGE[PAGE.index("### Keys of the JSON") : PAGE.index("### What differs")]


def keys_of(row: str) -> list[str]:
    return re.findall(r"`([a-z0-9_]+(?:\.[a-z0-9_]+)*)`", row.split("|")[1])


def row_of(end: str) -> str:
    return next(row for row in SECTION.splitlines() if row.startswith("|") and end in row)


def nested(key: str, value: object) -> dict[str, object]:
    first, _, rest = key.partition(".")
    return {first: nested(rest, value) if rest else value}


@pytest.mark.parametrize("key", [*keys_of(row_of("They change nothing")), "fp16.hysteresis"])
def test_a_key_that_changes_nothing_is_told(key: str) -> None:
    found, _ = settings.settings_of({**BATCH, **nested(key, 3)}, replicas=1)
    assert found.unused == (key,)


@pytest.mark.parametrize("key", keys_of(row_of("They are refused")))
def test_a_key_without_counterpart_is_refused_with_what_to_write_instead(key: str) -> None:
    with pytest.raises(ConfigError, match="has no counterpart; expected"):
        settings.refuse(settings.settings_of({**BATCH, **nested(key, 3)}, replicas=1)[1])


def test_the_keys_that_are_taken_are_those_that_the_code_reads() -> None:
    taken = {
        key.rpartition(".")[2]
        for row in SECTION.partition("| key | what happens |")[0].splitlines()
        if row.startswith("| `")
        for key in keys_of(row)
    }
    code = inspect.getsource(settings)
    read = set(
        re.findall(r'keys\.(?:flag|number|section|text|whole)\(f?"(?:[\w.{}]*\.)?(\w+)"', code)
    ) | set(settings._BATCH)
    read |= {*SECTIONS, settings._CLIPPING[0]}
    sections = {"optimizer", "scheduler"}  # whose type the page has
    assert taken - {"type"} == read - sections
