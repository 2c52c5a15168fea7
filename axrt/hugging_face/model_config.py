"""The keys of `[model]` for a config.json of GPT-2, Llama, Qwen2 or Qwen3, and the other way round.

What a config.json asks for and the built-in model does not have is refused by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from axrt.config import Model
from axrt.errors import ConfigError
from axrt.models.rope_scaling import RopeScaling
from axrt.scheduler.regular_file import MALFORMED

Values = Mapping[str, Any]
LONGEST = 4096  # of rotary models, where nobody says: their tables grow with the context
_FLOAT32_EPS = 1.1920928955078125e-07  # what torch's RMSNorm takes where it is told nothing
_FUNCTIONS = {
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
_KINDS = ("gpt2", "llama", "qwen2", "qwen3")
# Keys of a config.json that change what a model computes, with the values that are taken.
_TAKEN: dict[str, tuple[Any, ...]] = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}


def kind_of(config: Values) -> str:
    """The family that a config.json is of.

    Raises:
        ConfigError: it is none that is known.
    """
    kind = config.get("model_type")
    if kind not in _KINDS:
        raise ConfigError(
            f"config.json: model_type = {kind!r}; expected one of {', '.join(_KINDS)}"
        )
    return str(kind)


def model_keys(config: Values, context: int = 0) -> dict[str, Any]:
    """The keys of `[model]`.

    Args:
        context: tokens of a sequence; 0: those of config.json, but `LONGEST` at most where
            positions are rotary.
    Raises:
        ConfigError: the built-in model cannot be that one.
    """
    try:
        return _keys_of(kind_of(config), config, context)
    except ConfigError:
        raise
    except MALFORMED as error:
        raise ConfigError(f"config.json: {error}; expected that of a model") from None


def _keys_of(kind: str, config: Values, context: int) -> dict[str, Any]:
    for key, taken in _TAKEN.items():
        if config.get(key, taken[0]) not in taken:
            raise ConfigError(f"config.json: {key} = {config[key]!r}; expected {taken[0]!r}")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError("config.json: layer_types; expected 'full_attention' alone")
    try:
        made = _gpt2(config) if kind == "gpt2" else _llama(config, kind)
    except KeyError as error:
        raise ConfigError(f"config.json has no {error}; expected that of a {kind}") from None
    most = int(made["context"])
    if context > most:
        raise ConfigError(f"--context {context}; expected at most the {most} of config.json")
    if kind != "gpt2":
        made["context"] = context or min(most, LONGEST)
    elif context not in (0, most):
        raise ConfigError(
            f"--context {context}; expected {most}, since each learned position has a weight"
        )
    return made


def _gpt2(config: Values) -> dict[str, Any]:
    return {
        "layers": config["n_layer"],
        "width": config["n_embd"],
        "heads": config["n_head"],
        "context": config["n_positions"],
        "vocab": config["vocab_size"],
        "norm": "layer",
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "feed": _function(config, "activation_function"),
        "feed_width": config.get("n_inner") or 4 * config["n_embd"],
        "bias": "all",
        "tied": config.get("tie_word_embeddings", True),
        "positions": "learned",
    }


def _function(config: Values, key: str) -> str:
    if config[key] not in _FUNCTIONS:
        raise ConfigError(
            f"config.json: {key} = {config[key]!r}; expected one of {', '.join(_FUNCTIONS)}"
        )
    return _FUNCTIONS[config[key]]


def _llama(config: Values, kind: str) -> dict[str, Any]:
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"config.json: hidden_act = {config['hidden_act']!r}; expected 'silu'")
    width, heads = config["hidden_size"], config["num_attention_heads"]
    return {
        "layers": config["num_hidden_layers"],
        "width": width,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_width": config.get("head_dim") or width // heads,
        "context": config["max_position_embeddings"],
        "vocab": config["vocab_size"],
        "norm_eps": config["rms_norm_eps"],
        "qk_norm": kind == "qwen3",
        "feed": "swiglu",
        "feed_width": config["intermediate_size"],
        "bias": "qkv" if kind == "qwen2" else "none",
        "tied": config.get("tie_word_embeddings", False),
        **_rope(config),
    }


def _rope(config: Values) -> dict[str, Any]:
    """Rotary positions, as new files and old ones say them."""
    new, old = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    said: Values = {**new, **old}  # transformers lets the old key win where both are there
    if old and "rope_type" not in old:
        said = {**said, "rope_type": old.get("type", "default")}
    theta = float(said.get("rope_theta") or config.get("rope_theta") or 10000.0)
    scaling = said.get("rope_type", said.get("type", "default"))
    if scaling == "default":
        return {"rope_theta": theta}
    if scaling not in ("linear", "llama3"):
        raise ConfigError(f"config.json: rope_type = {scaling!r}; expected linear or llama3")
    found = RopeScaling(scaling, float(said["factor"]))
    if scaling == "llama3":
        found = found._replace(
            low=float(said["low_freq_factor"]),
            high=float(said["high_freq_factor"]),
            original=int(said["original_max_position_embeddings"]),
        )
    return {"rope_theta": theta, "rope_scaling": str(found)}


def their_config(model: Model) -> dict[str, Any]:
    """The config.json of a model, but for what it says of text.

    Raises:
        ConfigError: no family that is known has such a model.
    """
    for make in (_their_gpt2, _their_llama):
        made = make(model)
        if _is_same(model, made):
            return {**made, "dtype": "float32"}
    raise ConfigError(
        "no family of transformers' has this model; expected that of GPT-2 (norm = 'layer', feed "
        "= 'gelu-tanh', 'gelu', 'relu' or 'silu', bias = 'all', positions = 'learned'), or of "
        "Llama and Qwen (norm = 'rms', feed = 'swiglu', bias = 'none' or 'qkv', positions = "
        "'rotary'), and not "
        f"{_differing(model)}"
    )


def _is_same(model: Model, config: Values) -> bool:
    """The file makes this model."""
    try:
        again = Model(**{**model_keys(config, model.context), "dropout": model.dropout})
    except ConfigError:
        return False
    return computed(again) == computed(model)


def computed(model: Model) -> dict[str, Any]:
    """What a model computes: its keys with the values that stand for "the default" filled in."""
    keys = {item.name: getattr(model, item.name) for item in fields(model)}
    keys |= {
        "kv_heads": model.kv_heads or model.heads,
        "head_width": model.features_of_a_head,
        "feed_width": model.features_within,
        "rope_scaling": RopeScaling.parse(model.rope_scaling),
        "norm_eps": model.norm_eps or (_FLOAT32_EPS if model.norm == "rms" else 1e-5),
    }
    unread = {"factory"} | ({"rope_theta"} if model.positions == "learned" else set())
    return {key: value for key, value in keys.items() if key not in unread}


def _differing(model: Model) -> str:
    mine = {key: getattr(model, key) for key in ("norm", "feed", "bias", "positions", "qk_norm")}
    return ", ".join(f"{key} = {value!r}" for key, value in mine.items())


def _their_gpt2(model: Model) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": model.layers,
        "n_embd": model.width,
        "n_head": model.heads,
        "n_positions": model.context,
        "n_inner": model.features_within,
        "vocab_size": model.vocab,
        "activation_function": "gelu_new" if model.feed == "gelu-tanh" else model.feed,
        "layer_norm_epsilon": model.norm_eps or 1e-5,
        "tie_word_embeddings": model.tied,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
    }


def _their_llama(model: Model) -> dict[str, Any]:
    kind, name = "llama", "Llama"
    if model.qk_norm:
        kind, name = "qwen3", "Qwen3"
    elif model.bias == "qkv":
        kind, name = "qwen2", "Qwen2"
    return {
        "model_type": kind,
        "architectures": [f"{name}ForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.width,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads or model.heads,
        "head_dim": model.features_of_a_head,
        "intermediate_size": model.features_within,
        "max_position_embeddings": model.context,
        "vocab_size": model.vocab,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps or _FLOAT32_EPS,
        "tie_word_embeddings": model.tied,
        **dict(_their_rope(model)),
    }


def _their_rope(model: Model) -> Iterator[tuple[str, Any]]:
    """Both as new versions of transformers read it, and as old ones do."""
    of = RopeScaling.parse(model.rope_scaling)
    scaling: dict[str, Any] = {"rope_type": of.kind if of else "default"}
    if of:
        scaling["factor"] = of.factor
    if of and of.kind == "llama3":
        scaling |= {
            "low_freq_factor": of.low,
            "high_freq_factor": of.high,
            "original_max_position_embeddings": of.original,
        }
    yield "rope_parameters", {"rope_theta": model.rope_theta, **scaling}
    yield "rope_theta", model.rope_theta
    if model.rope_scaling:
        yield "rope_scaling", scaling
