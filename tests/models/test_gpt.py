"""The built-in model in all its forms: what it remembers, and documents that do not see each
other."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.config import Config
from axrt.errors import ConfigError
from axrt.generation.generation import Choice, Stage
from axrt.model import masked_cross_entropy
from axrt.models.gpt import gpt
from axrt.runtime.losses import IGNORED
from axrt.transport.local import LocalWorld

from ..engine.reference import configured as run_settings
from ..engine.reference import momentum, train_in_plain_torch, train_on_a_rank
from .writing import written, written_by_ranks

CONTEXT, VOCAB, END = 24, 64, 63
SMALL: dict[str, Any] = {"layers": 2, "width": 32, "heads": 4, "context": CONTEXT, "vocab": VOCAB}
FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "gpt2": {"norm": "layer", "feed": "gelu-tanh", "bias": "all", "tied": True}
    | {"positions": "learned"},
    "llama": {"feed": "swiglu", "kv_heads": 2, "norm_eps": 1e-5, "rope_theta": 5e5}
    | {"rope_scaling": "llama3:8,1,4,16"},
    "qwen": {"feed": "swiglu", "kv_heads": 1, "head_width": 12, "qk_norm": True, "bias": "qkv"}
    | {"rope_scaling": "linear:2"},
}


def configured(form: str, **sections: dict[str, Any]) -> Config:
    tokens = {"data": {"source": "tokens.bin"}}  # not read
    return Config.read({"model": SMALL | FORMS[form], **tokens, **sections})


def grown(config: Config) -> nn.Sequential:
    """A model whose residual branches are no zeros any more."""
    whole = gpt(config).sequential(config.run.seed).eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            if not parameter.any():
                parameter.normal_(std=0.2)
    return whole


@pytest.mark.parametrize("form", FORMS)
def test_a_token_alone_gets_the_logits_that_it_has_behind_all_others(form: str) -> None:
    model, tokens = grown(configured(form)), torch.randint(VOCAB, (2, CONTEXT))
    stage, parts = Stage(model, CONTEXT), []
    with torch.inference_mode():
        for number, part in enumerate(torch.split(tokens, [10, 1, 1, 5, 7], dim=1)):
            parts.append(stage.forward(0, part, is_fresh=number == 0))
        whole = Stage(model, CONTEXT).forward(0, tokens, is_fresh=True)
        assert torch.allclose(torch.cat(parts, dim=1), whole, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_is_the_same_with_and_without_memory_also_behind_the_context(
    form: str,
) -> None:
    model = grown(configured(form))
    plain, keeping_ = (
        written(Stage(model, CONTEXT), [1, 2, 3], 2 * CONTEXT, CONTEXT, Choice(0), keeps=k)
        for k in (False, True)
    )
    assert plain == keeping_
    assert len(plain) == 2 * CONTEXT


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cuts", [(0, 1, 4), (0, 2, 3, 4)])
def test_a_pipeline_writes_what_one_rank_does_whatever_comes_first(
    form: str, cuts: tuple[int, ...]
) -> None:
    """More texts than are under way at a time, of many lengths; some end before the others."""
    whole, choice = grown(configured(form)), Choice(0.9, top_k=20)
    stages = [whole[begin:end] for begin, end in pairwise(cuts)]
    prompts = [[7 * n % VOCAB for n in range(1, 2 + 3 * k)] for k in range(9)]
    number = CONTEXT
    alone = [written(Stage(whole, CONTEXT), of, number, CONTEXT, choice, True, 5) for of in prompts]
    end = alone[3][10]
    expected = {
        n: tokens[: tokens.index(end)] if end in tokens else tokens
        for n, tokens in enumerate(alone)
    }
    assert len({len(tokens) for tokens in expected.values()}) > 1
    for seed in range(3):
        found = written_by_ranks(stages, prompts, number, CONTEXT, choice, end, seed)
        assert found == expected


@pytest.mark.parametrize("form", FORMS)
def test_documents_do_not_see_each_other(form: str) -> None:
    """Each document has the logits that it has alone; learned positions go on over all of them."""
    model = grown(configured(form, data={"source": "tokens.bin", "document_end": END}))
    first, second = torch.randint(END, (1, 9)), torch.randint(END, (1, CONTEXT - 9))
    first[0, -1] = END
    both = model(torch.cat([first, second], dim=1))
    assert torch.allclose(both[:, :9], model(first), atol=1e-5)
    if form != "gpt2":
        assert torch.allclose(both[:, 9:], model(second), atol=1e-5)
    other = torch.cat([(first + 1) % END, second], dim=1)
    other[0, 8] = END
    assert torch.equal(model(other)[:, 9:], both[:, 9:]), "the first one changes nothing there"
    apart = grown(configured(form))
    assert not torch.allclose(apart(other)[:, 9:], apart(torch.cat([first, second], 1))[:, 9:])


def test_a_target_that_does_not_count_changes_no_gradient() -> None:
    logits = torch.randn(2, 5, VOCAB, requires_grad=True)
    targets = torch.randint(VOCAB, (2, 5))
    targets[0, 2] = targets[1, 4] = IGNORED
    loss, number = masked_cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert int(number) == 8
    assert not gradient[0, 2].any()
    assert not gradient[1, 4].any()
    kept = targets != IGNORED
    assert torch.allclose(loss / number, nn.functional.cross_entropy(logits[kept], targets[kept]))


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_train_in_a_pipeline_as_in_plain_torch(form: str) -> None:
    config = configured(form, data={"source": "tokens.bin", "document_end": END})

    def batches(step: int) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(step)
        rows = [torch.randint(VOCAB, (2, CONTEXT + 1)) for _ in range(4)]
        for row in rows:
            row[:, 7] = END
        return [(row[:, :-1], row[:, 1:].clone()) for row in rows]

    whole = train_in_plain_torch(gpt(config), batches, 3, momentum)
    settings = run_settings(4, schedule={"policy": "1f1b"})
    found = LocalWorld(2).run(
        lambda transport: train_on_a_rank(transport, gpt(config), batches, 3, settings, momentum)
    )
    for rank in found:
        exact = not config.model.tied  # the gradients of a tied weight have an order of their own
        assert rank.losses == (whole.losses if exact else pytest.approx(whole.losses, rel=1e-6))
        for name, value in rank.parameters.items():
            # a tied head goes by the name of the embedding in plain torch
            expected = whole.parameters.get(name, whole.parameters["0.tokens.weight"])
            same = torch.equal if exact else partial(torch.allclose, atol=1e-5)
            assert same(value, expected), name


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"kv_heads": 3}, "model.heads = 4 is no multiple of model.kv_heads = 3"),
        ({"width": 36}, "is no multiple of 2 x model.heads"),
        ({"head_width": 7}, "model.head_width = 7; expected an even number"),
        ({"positions": "learned", "rope_scaling": "linear:2"}, "expected positions = 'rotary'"),
        ({"rope_scaling": "llama3:8,5,4,8192"}, "expected 'linear:FACTOR', or 'llama3:FACTOR,LOW"),
        ({"rope_scaling": "linear"}, "expected 'linear:FACTOR', or"),
        ({"rope_scaling": "linear:0.5"}, "with factors of at least 1"),
        ({"rope_scaling": "yarn:2"}, "expected 'linear:FACTOR', or"),
    ],
)
def test_what_does_not_go_together_is_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Config.read({"model": SMALL | keys, "data": {"source": "tokens.bin"}})
    assert axrt.Config.read({"model": SMALL | {"factory": "mine:build"} | keys})
