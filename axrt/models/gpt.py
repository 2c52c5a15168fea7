"""A GPT as a list of layers: embedding, blocks, head. The keys of `[model]` make it GPT-2, a Llama,
or what lies between.

Blocks are pre-norm residual ones (Xiong et al. 2020). Residual branches start at zero, so that the
model begins as embedding and head and every block grows from there.

Between layers goes one value: features, shape (batch, length, width). Where documents are kept
apart it is (features, documents), and documents are the number of each token's, shape (batch,
length), int64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from axrt.config import Config, Model
from axrt.model import Gathered, LayerSpec, PipelineModule, Sum, TiedLayerSpec
from axrt.model.in_pieces import Jointed
from axrt.model.vocabulary import cross_entropy, masked_cross_entropy

from .attention import Attention, Remembers
from .feed_forward import FeedForward
from .norm import norm_of

_TIE = "tokens"


class Embedding(Remembers):
    """Maps tokens, shape (batch, length), int64, to the value of the first block.

    Args:
        model: section `[model]`.
        document_end: token that ends a document; -1: documents are not told apart. Where calls go
            on behind each other they are not, either.
    """

    def __init__(self, model: Model, document_end: int = -1) -> None:
        super().__init__()
        self.document_end = document_end
        self.tokens = nn.Embedding(model.vocab, model.width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.positions, self.dropout = None, None
        if model.positions == "learned":
            self.positions = nn.Embedding(model.context, model.width)
            nn.init.normal_(self.positions.weight, std=0.02)
            self.dropout = nn.Dropout(model.dropout)

    def forward(self, tokens: Tensor) -> Any:
        features: Tensor = self.tokens(tokens)
        before, length = self.past.length if self.past else 0, tokens.shape[1]
        if self.past is not None:
            self.past.length += length
        if self.positions is not None and self.dropout is not None:
            places = torch.arange(before, before + length, device=tokens.device)
            features = self.dropout(features + self.positions(places))
        if self.document_end < 0 or self.past is not None:
            return features
        ends = (tokens == self.document_end).long()
        return features, ends.cumsum(1) - ends  # an end belongs to the document before


class Block(Jointed):
    """Attention and a feed-forward network, each around a residual; the value keeps its form.

    Args:
        model: section `[model]`.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = norm_of(model), norm_of(model)
        self.attention, self.feed = Attention(model), FeedForward(model)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, value: Any) -> Any:
        features, documents = value if isinstance(value, tuple) else (value, None)
        mixed = self.attention(self.attention_norm(features), documents)
        features = features + self.dropout(mixed)
        features = features + self.dropout(self.feed(self.feed_norm(features)))
        return features if documents is None else (features, documents)

    # In a team each member has its tokens, and within attention and the feed-forward network all
    # tokens with its heads and its features.

    @property
    def team_pieces(self) -> Sequence[Callable[[Any], Any]]:
        return self._before_attention, self._attended, self._before_feed, self._fed, self._after

    def _before_attention(self, value: Any) -> Any:
        features, documents = value if isinstance(value, tuple) else (value, None)
        everywhere = None if documents is None else Gathered(documents)
        return features, documents, Gathered(self.attention_norm(features)), everywhere

    def _attended(self, value: Any) -> Any:
        features, documents, normed, everywhere = value
        return features, documents, Sum(self.attention(normed, everywhere))

    def _before_feed(self, value: Any) -> Any:
        features, documents, mixed = value
        features = features + self.dropout(mixed)
        return features, documents, Gathered(self.feed_norm(features))

    def _fed(self, value: Any) -> Any:
        features, documents, normed = value
        return features, documents, Sum(self.feed(normed))

    def _after(self, value: Any) -> Any:
        features, documents, fed = value
        features = features + self.dropout(fed)
        return features if documents is None else (features, documents)


class Head(nn.Module):
    """Maps the value of the last block to logits, shape (batch, length, vocab).

    Args:
        model: section `[model]`.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.norm = norm_of(model)
        self.logits = nn.Linear(model.width, model.vocab, bias=False)
        nn.init.normal_(self.logits.weight, std=0.1 * model.width**-0.5)

    def forward(self, value: Any) -> Tensor:
        features = value[0] if isinstance(value, tuple) else value
        logits: Tensor = self.logits(self.norm(features))
        return logits


# The built-in GPT is cut by what a rank multiplies, and not by parameters: an embedding is looked
# up. Over the stages of a rank, since on a vee one rank has both ends. With one block a rank and a
# small vocabulary those ends are nothing, so `zb-h1` is the default there.
def gpt(config: Config) -> PipelineModule:
    """The GPT that `[model]` describes."""
    model, data = config.model, config.data
    first, last = (Embedding, model, data.document_end), (Head, model)
    layers: list[LayerSpec] = [LayerSpec(Block, model) for _ in range(model.layers)]
    if model.tied:
        layers.insert(0, TiedLayerSpec(_TIE, *first, tied_weight_attr="tokens.weight"))
        layers.append(TiedLayerSpec(_TIE, *last, tied_weight_attr="logits.weight"))
    else:
        layers.insert(0, LayerSpec(*first))
        layers.append(LayerSpec(*last))
    loss = masked_cross_entropy if data.masks else cross_entropy
    return PipelineModule(
        layers, loss_fn=loss, partition_method="operations", tensor=_tensor_plan(config)
    )


def _tensor_plan(config: Config) -> dict[str, str]:
    """How members of a team share the model out. The embedding is looked up by all, and counts
    documents over all tokens. A head that is tied to it, or of a vocabulary that cannot be shared
    out evenly, is whole and sees a member's tokens."""
    model = config.model
    heads, shared = model.heads, model.kv_heads or model.heads
    sizes = [of * model.features_of_a_head for of in (heads, shared, shared)]
    plan = {
        "*.attention.project_in": f"column:{','.join(map(str, sizes))}",
        "*.attention.project_out": "row",
        "*.attention.heads": "divide",
        "*.attention.shared": "divide",
        "*.attention.sizes": "divide",
        "*.feed.up": "column",
        "*.feed.down": "row",
    }
    if model.feed == "swiglu":
        plan["*.feed.gate"] = "column"
    head = str(model.layers + 1)
    if model.tied or model.vocab % config.parallel.virtual_members:
        return {**plan, head: "token", "loss": "token"}
    return {**plan, f"{head}.logits": "vocabulary"}
