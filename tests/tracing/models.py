"""Modules that nobody wrote as a list of layers, with a microbatch of each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCAB, WIDTH, TOKENS = 24, 16, 8
Item = tuple[Any, Any]


class UNet(nn.Module):
    """Skips from each depth of one side to the same of the other, batch norms, and activations that
    work in place."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_convolutions(1, width), _convolutions(width, 2 * width)],
        )
        self.middle = _convolutions(2 * width, 4 * width)
        self.up = nn.ModuleList([_convolutions(6 * width, 2 * width), _convolutions(3 * width, 4)])
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            image = block(image)
            skips.append(image)
            image = functional.max_pool2d(image, 2)
        image = self.middle(image)
        for block, skip in zip(self.up, reversed(skips), strict=True):
            image = functional.interpolate(image, scale_factor=2.0)
            image = block(torch.cat([image, skip], 1))
        logits: Tensor = self.head(image)
        return logits


def _convolutions(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


class Encoder(nn.Module):
    """torch's own, between an embedding and a head."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.tokens(tokens)))
        return logits


class Translator(nn.Module):
    """torch's encoder and decoder; what the encoder returns is read by every layer of the
    decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 32, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(
            self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True
        )
        logits: Tensor = self.head(hidden)
        return logits


def of_transformers(name: str, **keys: Any) -> nn.Module:
    """A small model of `transformers`, whose attention is plain operations: its other kinds are
    given a mask where they are exported, and `is_causal` where they are not."""
    import transformers

    config = getattr(transformers, f"{name}Config")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2} | {
        "intermediate_size": 32,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 32,
    }
    own = {
        "GPT2": {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 32}
        | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        "Bert": sizes | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
        "T5": {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        | {"dropout_rate": 0.0},
    }.get(name, sizes)
    made = {"vocab_size": VOCAB, "use_cache": False, "attn_implementation": "eager", **own, **keys}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    heads = {"Bert": "ForMaskedLM", "T5": "ForConditionalGeneration", "GPT2": "LMHeadModel"}
    model = getattr(transformers, name + heads.get(name, "ForCausalLM"))
    found: nn.Module = model(config(**{**ends, **made}))
    return found


EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "unet": UNet,
    "encoder": Encoder,
    "translator": Translator,
    "gpt2": lambda: of_transformers("GPT2"),
    "llama": lambda: of_transformers("Llama"),
    "qwen3": lambda: of_transformers("Qwen3"),
    "gemma2": lambda: of_transformers("Gemma2", sliding_window=4),
    "bert": lambda: of_transformers("Bert"),
    "t5": lambda: of_transformers("T5"),
    "mixtral": lambda: of_transformers("Mixtral", num_local_experts=4),
    "qwen3-moe": lambda: of_transformers("Qwen3Moe", **EXPERTS),
}
PAIRS = {"translator": tuple, "t5": dict}  # how they are given two sequences


def made(name: str) -> nn.Module:
    """The module, with the same weights each time."""
    torch.manual_seed(5)
    return MODELS[name]()


def microbatches(name: str, number: int, step: int) -> list[Item]:
    """What a step trains on."""
    torch.manual_seed(100 + step)
    if name == "unet":
        return [(torch.randn(2, 1, 8, 8), torch.randint(3, (2, 8, 8))) for _ in range(number)]
    tokens = [torch.randint(1, VOCAB, (3, 2, TOKENS)) for _ in range(number)]
    if name == "translator":
        return [((source, target), after) for source, target, after in tokens]
    if name == "t5":
        return [
            ({"input_ids": source, "decoder_input_ids": target}, after)
            for source, target, after in tokens
        ]
    return [(source, after) for source, _, after in tokens]


def loss_fn(outputs: Any, targets: Tensor) -> Tensor:
    """Cross-entropy of what the model returns, pixel by pixel or token by token."""
    logits = getattr(outputs, "logits", outputs)
    if logits.dim() == 4:
        return functional.cross_entropy(logits, targets)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
