"""`[model]`: the built-in GPT, or a model of the user's own."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from axrt.models.rope_scaling import RopeScaling

from .section import Section, key

_WIDEST = 1 << 24  # features, with which no weight has more bytes than can be counted


@dataclass(frozen=True, slots=True)
class Model(Section):
    """The model to train: a GPT of these sizes, or a model of the user's own."""

    factory: str = key(
        "",
        "'package.module:function' that takes the Config and returns a PipelineModule; '' = the "
        "built-in model",
    )
    layers: int = key(4, "transformer blocks", least=1, most=100_000)
    width: int = key(128, "features of a token", least=1, most=_WIDEST)
    heads: int = key(4, "attention heads", least=1, most=_WIDEST)
    kv_heads: int = key(
        0,
        "heads of keys and values, each shared by heads / kv_heads queries (grouped-query "
        "attention); 0 = as many as heads",
        least=0,
        most=_WIDEST,
    )
    head_width: int = key(0, "features of a head, even; 0 = width / heads", least=0, most=_WIDEST)
    context: int = key(128, "tokens in a sequence", least=1, most=2**31 - 1)
    vocab: int = key(256, "different tokens", least=1, most=2**31 - 1)
    dropout: float = key(0.0, "probability; 0 = off", least=0, most=0.999)
    norm: str = key("rms", "RMSNorm, or LayerNorm with a bias", choices=("rms", "layer"))
    norm_eps: float = key(
        0.0, "what norms add to the variance; 0 = torch's default for each", least=0
    )
    qk_norm: bool = key(False, "RMSNorm on queries and keys, each head by itself")
    feed: str = key(
        "relu2",
        "function of the feed-forward network: squared ReLU, ReLU, GELU, its approximation by "
        "tanh, SiLU, or SwiGLU",
        choices=("relu2", "relu", "gelu", "gelu-tanh", "silu", "swiglu"),
    )
    feed_width: int = key(
        0,
        "features within the feed-forward network; 0 = 4 x width, for swiglu 8/3 x width, up to a "
        "multiple of 8",
        least=0,
        most=_WIDEST,
    )
    bias: str = key(
        "none",
        "which linear layers have one: none, those of queries, keys and values, or all but the "
        "head",
        choices=("none", "qkv", "all"),
    )
    tied: bool = key(False, "embedding and head share their weight")
    positions: str = key("rotary", "how tokens know where they are", choices=("rotary", "learned"))
    rope_theta: float = key(10000.0, "base of rotary frequencies", least=1)
    rope_scaling: str = key(
        "",
        "rotary frequencies for a longer context: 'linear:FACTOR' = all divided by that; "
        "'llama3:FACTOR,LOW,HIGH,ORIGINAL' = the slow ones, by how often they turn in ORIGINAL "
        "tokens; '' = as they are",
    )

    @property
    def features_of_a_head(self) -> int:
        """Width of a head."""
        return self.head_width or self.width // self.heads

    @property
    def features_within(self) -> int:
        """Width of the feed-forward network."""
        if self.feed_width:
            return self.feed_width
        return 8 * ceil(self.width / 3) if self.feed == "swiglu" else 4 * self.width

    def misfits(self) -> Iterator[str]:
        """What does not go together in the built-in model, one text each."""
        least = 2 * self.heads
        if not self.head_width and self.width % least:
            fits = self.width // least * least + least
            yield (
                f"model.width = {self.width} is no multiple of 2 x model.heads = {least}; set it "
                f"to {fits}, or change model.heads, or set model.head_width"
            )
        if self.head_width % 2:
            yield f"model.head_width = {self.head_width}; expected an even number"
        if self.kv_heads and self.heads % self.kv_heads:
            yield (
                f"model.heads = {self.heads} is no multiple of model.kv_heads = {self.kv_heads}; "
                "expected one, such as heads itself"
            )
        if self.rope_scaling and self.positions != "rotary":
            yield (
                f"model.rope_scaling = {self.rope_scaling!r} with model.positions = "
                f"{self.positions!r}; expected positions = 'rotary'"
            )
        try:
            RopeScaling.parse(self.rope_scaling)
        except ValueError as error:
            yield f"model.rope_scaling = {self.rope_scaling!r}; {error}"
