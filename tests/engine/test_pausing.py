"""Layers as they are in a team: their forward pauses behind matrices that are cut by rows."""

import importlib
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import axrt
from axrt.errors import ConfigError, ModelError
from axrt.model.deferral import Deferral
from axrt.model.pausing import pausing_behind, pieces_of
from axrt.transport.local import LocalWorld

from ..sweeps import first, swept
from .reference import configured, momentum, plain_torch, train_in_plain_torch, train_on_a_rank
from .test_tensor import (
    MICROBATCHES,
    TOKENS,
    VOCAB,
    WIDTH,
    Mlp,
    Sent,
    assert_close,
    few_sentences,
    of_predicted,
    sentences,
    trained,
)

CUTS = {
    "*.qkv": "column:3",
    "*.out": "rowwise",
    "*.heads": "divide",
    "*.up": "colwise",
    "*.down": "row",
}


FEED = ("*.up", "*.down")


class Block(nn.Module):
    """As anybody writes it: what it has made before a sum is used behind it, also twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.heads = 4

    def attend(self, value: Tensor) -> Tensor:
        batch, tokens, _ = value.shape
        query, key, given = (
            one.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for one in self.qkv(value).chunk(3, -1)
        )
        made = nn.functional.scaled_dot_product_attention(query, key, given, is_causal=True)
        out: Tensor = self.out(made.transpose(1, 2).reshape(batch, tokens, -1))
        return out

    def forward(self, value: Tensor) -> Tensor:
        normed = self.norm(value)
        attended = self.attend(normed)
        if float(attended.detach().sum()) > 1e9:  # what no tracer takes
            return value
        value = value + attended
        fed: Tensor = self.down(torch.relu(self.up(self.norm_2(value))))
        gated: Tensor = value + fed * torch.sigmoid(self.gate(normed))
        out: Tensor = torch.cat([gated], -1) + 0.1 * normed
        return out


def model_of(block: Callable[..., nn.Module] = Block, *given: Any, **cuts: Any) -> Any:
    return axrt.PipelineModule(
        [
            axrt.LayerSpec(nn.Embedding, VOCAB, WIDTH),
            *[axrt.LayerSpec(block, *given) for _ in range(2)],  # type: ignore[arg-type]
            axrt.LayerSpec(nn.Linear, WIDTH, VOCAB),
        ],
        of_predicted,
        tensor=cuts.get("tensor", CUTS),
    )


def together(name: str, of_members: dict[int, Tensor]) -> Tensor:
    parts = [of_members[member] for member in sorted(of_members)]
    module, _, kind = name.rpartition(".")
    match module.rpartition(".")[2]:
        case "qkv":
            return torch.cat(
                [torch.cat(one) for one in zip(*(p.chunk(3) for p in parts), strict=True)]
            )
        case "up" | "q_proj" | "k_proj" | "v_proj" | "gate_proj" | "up_proj":
            return torch.cat(parts)
        case "down" | "out" | "down_proj" | "o_proj":
            return torch.cat(parts, 1) if kind == "weight" else parts[0]
    assert all(torch.equal(parts[0], part) for part in parts), name
    return parts[0]


@swept(
    ("pipe, tensor, data", [(1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 2, 2)]),
    ("policy", ["1f1b", "zb-h1"]),
)
def test_any_layer_is_cut_as_it_is(policy: str, pipe: int, tensor: int, data: int) -> None:
    batches = sentences if data == 2 else few_sentences
    layout = model_of, batches, pipe, tensor, data
    clip = {"clip": 0.5}
    found = trained(
        *layout, schedule={"policy": policy}, optimizer=clip, factory=momentum, join=together
    )
    assert_close(found, plain_torch(model_of, batches, 2, momentum, clip=0.5))


@swept(
    ("policy", ["1f1b", "zb-v"]),
    (
        "memory",
        [
            {"recompute": "full"},
            {"recompute": 1},
            {"offload": "stream", "scratch": "host"},
            {"offload_activations": 6},
        ],
    ),
)
def test_it_runs_again_and_offloads(memory: dict[str, Any], policy: str) -> None:
    found = trained(
        *(model_of, few_sentences, 2, 2),
        schedule={"policy": policy},
        memory=memory,
        factory=momentum,
        join=together,
    )
    assert_close(found, plain_torch(model_of, few_sentences, 2, momentum))


def test_what_is_gathered_may_be_let_go_and_bits_stay() -> None:
    keys: dict[str, Any] = {"schedule": {"policy": "zb-h1"}, "join": together}
    found = trained(model_of, few_sentences, 2, 2, parallel={"gather_again": True}, **keys)
    assert found == trained(model_of, few_sentences, 2, 2, **keys)


def test_bits_depend_on_no_order_of_messages() -> None:
    first, *others = [
        trained(
            *(model_of, few_sentences, 2, 2),
            seed=seed,
            schedule={"policy": "zb-h2"},
            join=together,
        )
        for seed in range(3)
    ]
    assert all(other == first for other in others)


def test_products_of_such_layers_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of five matrices in each of two layers and of the head, for each microbatch and
    member."""
    noted, note = [0], Deferral.note

    def counted(deferral: Deferral, *given: Any) -> None:
        noted[0] += 1
        note(deferral, *given)

    monkeypatch.setattr(Deferral, "note", counted)
    trained(model_of, few_sentences, 1, 2, schedule={"policy": "zb-h1"}, steps=1, join=together)
    assert noted[0] == 2 * MICROBATCHES * (2 * 5 + 1)


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_block_sends_ten_slices(tensor: int) -> None:
    """In each direction one before it, and two behind each of two matrices that are cut by rows;
    for the head before it and for logits before the loss."""
    config = configured(MICROBATCHES, parallel={"tensor": tensor})

    def main(transport: Any) -> int:
        sent = Sent()
        train_on_a_rank(transport, model_of(), few_sentences, 1, config, observers=(sent,))
        return sent.elements

    rows = 2 * TOKENS * MICROBATCHES
    features = (2 * 10 + 2) * WIDTH + 2 * VOCAB
    assert LocalWorld(tensor, 2).run(main) == [rows * features * (tensor - 1) // tensor] * tensor


def test_an_evaluation_pauses_too() -> None:
    def main(tensor: int) -> Callable[[Any], float]:
        def of_rank(transport: Any) -> float:
            config = configured(MICROBATCHES, parallel={"tensor": tensor})
            with axrt.initialize(model_of(), config=config, transport=transport) as engine:
                batches = iter(few_sentences(0)) if engine.reads else None
                return engine.eval_batch(batches).loss

        return of_rank

    (alone,) = LocalWorld(1, 0).run(main(1))
    assert LocalWorld(2, 0).run(main(2)) == pytest.approx([alone] * 2, rel=1e-6)


def test_a_layer_that_is_given_back_pauses_no_more() -> None:
    def main(transport: Any) -> int:
        config = configured(MICROBATCHES, parallel={"tensor": 2})
        with axrt.initialize(model_of(), config=config, transport=transport) as engine:
            layers = list(next(iter(engine._model.stages.values())).layers.values())
        return sum(len(one._forward_hooks) for layer in layers for one in layer.modules())

    # On the second member those by which rows want the gradient of biases that the first one has.
    assert LocalWorld(2, 0).run(main) == [0, 4]


class Notes(Block):
    """Leaves on itself what it needs behind the pause."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: dict[str, Tensor] = {}

    def forward(self, value: Tensor) -> Tensor:
        self.kept = (value.detach() > 0).float()
        self.noted["below"] = (value.detach() < 0).float()
        value = value + self.attend(self.norm(value))
        fed: Tensor = self.down(torch.relu(self.up(value)))
        return value + self.kept * fed - self.noted["below"]


class Reads(Block):
    """Has hooks on older tensors, their views, and named tuples of them."""

    def forward(self, value: Tensor) -> Tensor:
        normed = self.norm(value)
        value = value + self.attend(normed)
        normed.register_hook(lambda gradient: gradient * 0.5)
        largest = torch.stack(normed.sort(-1)[:1]).sum(0)
        out: Tensor = self.down(torch.relu(self.up(value))) + normed.mT.mT + largest
        return out


@swept(
    ("recompute", ["none", "full"]),
    ("block", [Notes, Reads]),
)
def test_what_a_layer_keeps_and_says_elsewhere_is_its_own(
    block: type[nn.Module], recompute: str
) -> None:
    def model() -> axrt.PipelineModule:
        made: axrt.PipelineModule = model_of(block)
        return made

    found = trained(
        *(model, few_sentences, 2, 2),
        schedule={"policy": "zb-h2"},
        memory={"recompute": recompute},
        factory=momentum,
        join=together,
    )
    assert_close(found, train_in_plain_torch(model(), few_sentences, 2, momentum))


def test_a_layer_sees_the_variables_of_its_caller() -> None:
    factor = ContextVar("factor", default=1.0)
    factor.set(3.0)
    piece = next(pieces_of(lambda value: value * factor.get()))
    assert piece(2.0) == 6.0


def test_functions_of_torch_run_on_the_stack_of_the_loop() -> None:
    """An error of theirs walks down the stack of C, and on a greenlet's it once met frames of
    another moment: a segmentation fault."""
    getcurrent = importlib.import_module("greenlet").getcurrent
    where, main = list[bool](), getcurrent()

    class Sees(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            where.append(getcurrent() is main)
            return func(*args, **(kwargs or {}))

    def layer(value: Tensor) -> Tensor:
        made: Tensor = rows(value)
        assert getcurrent() is not main
        try:
            return made + torch.zeros(5)
        except RuntimeError:
            return made + 1

    rows = nn.Linear(3, 3)
    hook = pausing_behind(rows)
    with Sees():
        pieces = pieces_of(layer)
        next(pieces)(torch.zeros(2, 3))
        next(pieces)(torch.ones(2, 3))
        assert torch.equal(next(pieces)(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    hook.remove()
    assert len(where) >= 3
    assert all(where)


class OnlyBiases(Block):
    """Nothing before a row wants a gradient, and its bias is trained."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in ("out.bias", "down.bias"))


class OnlyBiasesInPieces(Mlp):
    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("down.bias"))


@swept(
    ("policy", ["1f1b", "zb-h1"]),
    ("block", [OnlyBiases, OnlyBiasesInPieces]),
)
def test_biases_of_rows_are_trained_alone(block: type[nn.Module], policy: str) -> None:
    def model() -> axrt.PipelineModule:
        made: axrt.PipelineModule = model_of(block)
        cuts = {key: way for key, way in CUTS.items() if block is OnlyBiases or key in FEED}
        embedding = axrt.LayerSpec(Frozen, VOCAB, WIDTH)
        return axrt.PipelineModule([embedding, *made.layers[1:]], of_predicted, tensor=cuts)

    found = trained(
        *(model, few_sentences, 1, 2),
        schedule={"policy": policy},
        factory=momentum,
        join=together,
    )
    assert_close(found, train_in_plain_torch(model(), few_sentences, 2, momentum))


class Frozen(nn.Embedding):
    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.weight.requires_grad_(False)


# Models that nobody here wrote.
LIKE_THEIRS = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
}


class Theirs(nn.Module):
    """A decoder layer of transformers'."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        transformers = importlib.import_module("transformers")
        config = getattr(transformers, f"{kind}Config")(**LIKE_THEIRS)
        config._attn_implementation = "eager"
        name = f"transformers.models.{kind.lower()}.modeling_{kind.lower()}"
        modeling = importlib.import_module(name)
        self.layer = getattr(modeling, f"{kind}DecoderLayer")(config, 0)
        self.rotary = getattr(modeling, f"{kind}RotaryEmbedding")(config)

    def forward(self, value: Tensor) -> Tensor:
        tokens = value.shape[1]
        mask = torch.full((tokens, tokens), float("-inf")).triu(1).expand(len(value), 1, -1, -1)
        places = self.rotary(value, torch.arange(tokens).unsqueeze(0))
        made = self.layer(value, position_embeddings=places, attention_mask=mask)
        out: Tensor = made[0] if isinstance(made, tuple) else made
        return out


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("kind", first(["Gemma2", "Qwen3", "Llama"], quick=2))
def test_layers_of_transformers_are_cut_by_their_own_plan(kind: str) -> None:
    pytest.importorskip("transformers")

    def model() -> axrt.PipelineModule:
        made: axrt.PipelineModule = model_of(Theirs, kind, tensor="auto")
        return made

    found = trained(
        *(model, few_sentences, 2, 2),
        schedule={"policy": "zb-h1"},
        factory=momentum,
        join=together,
    )
    assert_close(found, train_in_plain_torch(model(), few_sentences, 2, momentum))


class Twice(Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(super().forward(value))


class Skips(Block):
    def forward(self, value: Tensor) -> Tensor:
        return value + self.attend(value)


class InPlace(Block):
    def forward(self, value: Tensor) -> Tensor:
        value = self.norm(value)
        value += self.attend(value)
        fed: Tensor = self.down(torch.relu(self.up(value)))
        return fed


class Replaced(Block):
    def forward(self, value: Tensor) -> Tensor:
        normed = self.norm(value)
        attended = self.attend(normed)
        normed.data = attended.data
        fed: Tensor = self.down(torch.relu(self.up(normed)))
        return fed


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Hidden(Block):
    def forward(self, value: Tensor) -> Tensor:
        normed = self.norm(value)
        made = super().forward(value)
        return made + Own.apply(normed)  # type: ignore[no-any-return, no-untyped-call]


class Checkpointed(Block):
    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = torch.utils.checkpoint.checkpoint(
            super().forward, value, use_reentrant=False
        )
        return made


class WithoutGradient(Block):
    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            attended = self.attend(value)
        fed: Tensor = self.down(torch.relu(self.up(value + attended)))
        return fed


class InFloat32(Block):
    def forward(self, value: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = value + self.attend(value)
        fed: Tensor = self.down(torch.relu(self.up(value)))
        return fed


class Counts(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, value: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(value)


@swept(
    (
        "block, text",
        [
            (Twice, "has run at least 3 matrices that are cut by 'row'; expected each of the 2"),
            (Skips, "has run 1 matrices that are cut by 'row'; expected each of the 2"),
            (InPlace, "changes a tensor in place that the layer has made before"),
            (Replaced, "changes a tensor in place that the layer has made before"),
            (Hidden, "do not see, such as an autograd.Function"),
            (WithoutGradient, "within a context of the layer's own, such as torch.no_grad"),
            (InFloat32, "within a context of the layer's own"),
            (Checkpointed, "within a context of the layer's own"),
            (Counts, "changes buffers"),
        ],
    ),
    ("recompute", ["none", 2]),
)
def test_what_would_be_wrong_is_refused(
    recompute: str | int, block: type[nn.Module], text: str
) -> None:
    memory = {"recompute": recompute}
    with pytest.raises(ModelError, match=text):
        trained(lambda: model_of(block), few_sentences, 1, 2, join=together, memory=memory)


def test_a_row_that_is_called_from_elsewhere_is_refused() -> None:
    """Also in a program that has greenlets of its own."""
    from greenlet import greenlet

    row = nn.Linear(4, 4)
    pausing_behind(row)
    for call in (row, greenlet(row).switch):
        with pytest.raises(ModelError, match="ran outside the forward of its layer"):
            call(torch.ones(2, 4))


def test_plans_of_two_models_that_differ_are_refused() -> None:
    class Of(nn.Module):
        def __init__(self, way: str) -> None:
            super().__init__()
            plan = {"layers.*.up": way, "layers.*.experts": "moe_tp_experts"}
            self.config = SimpleNamespace(base_model_tp_plan=plan)
            self.up = nn.Linear(2, 2)

    def model(*ways: str) -> axrt.PipelineModule:
        specs = [axrt.LayerSpec(Of, way) for way in ways]
        return axrt.PipelineModule(specs, of_predicted, tensor="auto")

    assert model("packed_colwise", "packed_colwise").tensor == {"*.up": "column:2"}
    with pytest.raises(ConfigError, match=r"\*\.up is 'colwise' in the plan of one layer"):
        model("colwise", "rowwise")


@pytest.mark.parametrize(
    ("cuts", "text"),
    [
        ({"*.up": "column"}, "cut by columns, and none by 'row'"),
        ({"*.down": "row"}, "cut by rows, and none by 'column'"),
        ("auto", "no layer is of a transformers model"),
        ("autos", "tensor = 'autos'; expected a dict of words"),
        ({"*.up": "colwise_rep"}, "says nothing of how its matrices are shared"),
    ],
)
def test_what_nobody_can_cut_is_refused(cuts: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        trained(lambda: model_of(tensor=cuts), few_sentences, 1, 2)


def test_without_greenlet_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    with pytest.raises(ConfigError, match=r"pip install 'axrt\[tensor\]'"):
        trained(model_of, few_sentences, 1, 2)
