"""What the weights of the built-in model are called in `transformers`' files."""

from collections.abc import Iterator
from typing import NamedTuple

from axrt.config import Model

_PARTS = ("weight", "bias")


class Entry(NamedTuple):
    """A weight."""

    place: int  # index of its layer
    name: str  # name in the layer
    theirs: tuple[str, ...]  # names in their files: the weight is these one below the other
    is_transposed: bool = False  # theirs are of shape (inputs, outputs)


def entries(model: Model, kind: str) -> Iterator[Entry]:
    """All weights, each once: a head that shares that of the embedding is left away."""
    yield from _gpt2(model) if kind == "gpt2" else _llama(model)


def _gpt2(model: Model) -> Iterator[Entry]:
    yield Entry(0, "tokens.weight", ("transformer.wte.weight",))
    yield Entry(0, "positions.weight", ("transformer.wpe.weight",))
    linear = {
        "attention.project_in": "attn.c_attn",
        "attention.project_out": "attn.c_proj",
        "feed.up": "mlp.c_fc",
        "feed.down": "mlp.c_proj",
    }
    for place in range(1, model.layers + 1):
        of = f"transformer.h.{place - 1}."
        for part in _PARTS:
            yield Entry(place, f"attention_norm.{part}", (f"{of}ln_1.{part}",))
            yield Entry(place, f"feed_norm.{part}", (f"{of}ln_2.{part}",))
            for name, theirs in linear.items():
                yield Entry(place, f"{name}.{part}", (f"{of}{theirs}.{part}",), part == "weight")
    last = model.layers + 1
    for part in _PARTS:
        yield Entry(last, f"norm.{part}", (f"transformer.ln_f.{part}",))
    if not model.tied:
        yield Entry(last, "logits.weight", ("lm_head.weight",))


def _llama(model: Model) -> Iterator[Entry]:
    yield Entry(0, "tokens.weight", ("model.embed_tokens.weight",))
    for place in range(1, model.layers + 1):
        of = f"model.layers.{place - 1}."
        attention, feed = f"{of}self_attn.", f"{of}mlp."
        for part in _PARTS if model.bias == "qkv" else _PARTS[:1]:
            whole = tuple(f"{attention}{one}_proj.{part}" for one in "qkv")
            yield Entry(place, f"attention.project_in.{part}", whole)
        yield Entry(place, "attention.project_out.weight", (f"{attention}o_proj.weight",))
        if model.qk_norm:
            yield Entry(place, "attention.query_norm.weight", (f"{attention}q_norm.weight",))
            yield Entry(place, "attention.key_norm.weight", (f"{attention}k_norm.weight",))
        yield Entry(place, "attention_norm.weight", (f"{of}input_layernorm.weight",))
        yield Entry(place, "feed_norm.weight", (f"{of}post_attention_layernorm.weight",))
        for name in ("up", "gate", "down"):
            yield Entry(place, f"feed.{name}.weight", (f"{feed}{name}_proj.weight",))
    last = model.layers + 1
    yield Entry(last, "norm.weight", ("model.norm.weight",))
    if not model.tied:
        yield Entry(last, "logits.weight", ("lm_head.weight",))
