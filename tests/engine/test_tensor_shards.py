"""Virtual members (`parallel.tensor_shards`): bits depend on their number alone, whoever computes
them."""

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.errors import ConfigError, ModelError
from axrt.transport.local import LocalWorld

from ..sweeps import first, some, swept
from . import test_pausing, test_vocabulary
from .reference import Item, Outcome, adamw, configured, plain_torch, train_on_a_rank
from .test_tensor import (
    CUTS,
    MICROBATCHES,
    TOKENS,
    VOCAB,
    WIDTH,
    Added,
    Inner,
    Mixed,
    Mlp,
    Normed,
    Sent,
    assert_close,
    built_in,
    few_sentences,
    head,
    language,
    put_together,
    saved,
    sentences,
    summed,
    trained,
)

VIRTUAL = 4
Model = Callable[[], axrt.PipelineModule]


def drawing() -> axrt.PipelineModule:
    """Tied layers, layers in pieces, one of tokens, and whole ones; numbers are drawn in all."""
    return axrt.PipelineModule(
        [
            axrt.TiedLayerSpec("words", nn.Embedding, VOCAB, WIDTH),
            axrt.LayerSpec(Mlp, dropout=0.2),
            axrt.LayerSpec(Mixed),
            axrt.LayerSpec(Mlp, 2 * WIDTH, 0.1),
            axrt.LayerSpec(nn.LayerNorm, WIDTH),
            axrt.LayerSpec(nn.Dropout, 0.1),
            axrt.TiedLayerSpec("words", nn.Embedding, VOCAB, WIDTH, forward_fn=head),
        ],
        loss_fn=summed,
        tensor={**CUTS, "4": "token", "5": "token", "loss": "token"},
    )


class Norms(nn.Module):
    """A layer whose buffers forwards change, over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.norm(value.flatten(0, -2)).view_as(value)
        return out


def with_statistics() -> axrt.PipelineModule:
    torch.manual_seed(3)  # of the module that is given as it is
    words, given = axrt.LayerSpec(nn.Embedding, VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
    norms, mlp = axrt.LayerSpec(Norms), axrt.LayerSpec(Mlp)
    return axrt.PipelineModule([words, norms, mlp, given], summed, tensor=CUTS)


def on(
    model: Model,
    tensor: int,
    pipe: int = 1,
    data: int = 1,
    join: Callable[[str, dict[int, Tensor]], Tensor] = put_together,
    **sections: Any,
) -> Outcome:
    """What a job makes whose stages are cut into four shares, which so many members have."""
    batches = sentences if data == 2 else few_sentences
    parallel = {"tensor_shards": VIRTUAL, **sections.pop("parallel", {})}
    sections = {"optimizer": {"clip": 0.5}, **sections}
    return trained(*(model, batches, pipe, tensor, data), join=join, parallel=parallel, **sections)


CASES: dict[str, partial[Outcome]] = {
    "zb-v": partial(on, drawing, pipe=2, schedule={"policy": "zb-v"}),
    "fills": partial(on, drawing, pipe=2, schedule={"policy": "zb-h2", "fill": "always"}),
    "replicas": partial(on, drawing, data=2),
    "large activations by a library": partial(
        on, drawing, pipe=2, parallel={"activations": "library"}
    ),
    "zero": partial(on, drawing, data=2, memory={"zero": 2, "reductions": 2}),
    "some run again": partial(on, drawing, pipe=2, memory={"recompute": 1}),
    "as they are": partial(
        on, test_pausing.model_of, join=test_pausing.together, schedule={"policy": "zb-h1"}
    ),
    "1f1b": partial(on, drawing, pipe=2, schedule={"policy": "1f1b"}),
    "breadth-first": partial(on, drawing, pipe=2, schedule={"policy": "breadth-first"}),
    "runs again": partial(on, drawing, memory={"recompute": "full"}),
    "autocast": partial(on, drawing, precision={"compute": "bfloat16"}),
    "narrow": partial(on, drawing, pipe=2, precision={"weights": "bfloat16"}),
    "steps on the host": partial(on, drawing, memory={"offload": "cpu"}),
    "state in scratch": partial(on, drawing, memory={"offload": "stream", "scratch": "host"}),
    "a scale of losses": partial(on, drawing, precision={"weights": "float16", "loss_scale": 64}),
    "an empty stage": partial(on, drawing, pipe=2, parallel={"partition": [0, 0, 7]}),
    "vocabulary": partial(on, test_vocabulary.means, join=test_vocabulary.joined),
    "statistics": partial(on, with_statistics),
}


@pytest.mark.parametrize("case", first(list(CASES), quick=7))
def test_bits_depend_on_the_number_of_virtual_members(case: str) -> None:
    # Of two members each has two virtual ones; the built-in models have four members below.
    first, *others = (CASES[case](members) for members in some((1, 2, 4), (1, 2)))
    assert all(other == first for other in others)


def join_gpt(name: str, of_members: dict[int, Tensor]) -> Tensor:
    """Queries, keys and values are three blocks of one matrix, each of which is cut."""
    parts = [of_members[member] for member in sorted(of_members)]
    if ".attention.project_in." in name:
        queries = 16 // len(parts)
        rest = (len(parts[0]) - queries) // 2
        blocks = zip(*(torch.split(part, [queries, rest, rest]) for part in parts), strict=True)
        return torch.cat([torch.cat(of_block) for of_block in blocks])
    if name.endswith("attention.project_out.weight"):
        return torch.cat(parts, 1)
    return put_together(name, of_members)


# A Llama with two heads of keys has as many virtual members.
@pytest.mark.parametrize(("kind", "size"), [("gpt-2", 4), ("llama", 2)])
def test_the_built_in_models_have_the_same_bits(kind: str, size: int) -> None:
    of_one, *others = (
        on(lambda: built_in(kind), tensor, join=join_gpt, parallel={"tensor_shards": size})
        for tensor in (1, 2, 4)
        if tensor <= size
    )
    assert all(one == of_one for one in others)


@swept(
    ("tensor, data", [(1, 1), (2, 2)]),
    ("policy", ["1f1b", "zb-h1"]),
)
def test_virtual_members_train_as_plain_torch(policy: str, tensor: int, data: int) -> None:
    found = on(language, tensor, data=data, schedule={"policy": policy})
    batches = sentences if data == 2 else few_sentences
    assert_close(found, plain_torch(language, batches, 2, clip=0.5))


def test_bits_depend_on_no_order_of_messages() -> None:
    first, second = (on(drawing, 2, 2, schedule={"policy": "zb-h2"}, seed=seed) for seed in (1, 2))
    assert first == second


@pytest.mark.parametrize("shares", [2, 4, 8])
def test_as_many_numbers_are_sent_whatever_the_number_of_virtual_members(shares: int) -> None:
    """A member's own addends are added up before they leave."""
    parallel = {"tensor": 2, "tensor_shards": shares}
    config = configured(MICROBATCHES, parallel=parallel)

    def model() -> axrt.PipelineModule:
        return axrt.PipelineModule(
            [axrt.LayerSpec(Mlp)], nn.functional.mse_loss, tensor={**CUTS, "loss": "token"}
        )

    def batches(step: int) -> list[Item]:
        return [(torch.ones(TOKENS, WIDTH), torch.zeros(TOKENS, WIDTH))] * MICROBATCHES

    def main(transport: Any) -> int:
        sent = SentNested()
        train_on_a_rank(*(transport, model(), batches, 1, config), observers=(sent,))
        return sent.elements

    of_a_joint = TOKENS * WIDTH // 2  # a slice of half of the tokens
    assert LocalWorld(2, 2).run(main) == [4 * of_a_joint * MICROBATCHES] * 2


class SentNested(Sent):
    """Counts what virtual members send, too."""

    def sent(self, rank: int, message: Any, payload: Any) -> None:
        parts = payload if isinstance(payload, tuple) else ()
        for of_one in parts if parts and isinstance(parts[0], tuple) else (parts,):
            super().sent(rank, message, of_one)


@swept(
    ("tensor", [1, 2]),
    ("model", [drawing, test_vocabulary.means]),
)
def test_an_evaluation_has_the_same_bits(model: Model, tensor: int) -> None:
    def evaluated(members: int) -> tuple[float, list[Tensor]]:
        parallel = {"tensor": members, "pipe": 2, "tensor_shards": VIRTUAL}
        config = configured(MICROBATCHES, parallel=parallel)

        def main(transport: Any) -> tuple[float, list[Tensor]]:
            with axrt.initialize(model(), adamw, config=config, transport=transport) as engine:
                engine.train_batch(iter(few_sentences(0)) if engine.reads else None)
                batches = iter(few_sentences(1)) if engine.reads else None
                found = engine.eval_batch(batches, outputs=True)
                engine.train_batch(iter(few_sentences(2)) if engine.reads else None)
                return found.loss, found.outputs

        return LocalWorld(2 * members, 3).run(main)[0]

    loss, outputs = evaluated(tensor)
    expected, of_four = evaluated(VIRTUAL)
    assert loss == expected
    assert all(map(torch.equal, outputs, of_four))


def test_any_number_of_virtual_members_goes_on_from_any_other(tmp_path: Path) -> None:
    """Files know nothing of them."""

    def run(tensor: int, shares: int, act: Callable[[axrt.Engine], float]) -> list[float]:
        parallel = {"tensor": tensor, "tensor_shards": shares}
        config = configured(MICROBATCHES, parallel=parallel, optimizer={"clip": 0.5})

        def main(transport: Any) -> float:
            model = with_statistics()
            with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
                return act(engine)

        return LocalWorld(tensor, 5).run(main)

    def begin(engine: axrt.Engine) -> float:
        loss = engine.train_batch(iter(few_sentences(0)) if engine.reads else None).loss
        engine.save_checkpoint(tmp_path / "one")
        return loss

    def go_on(name: str, engine: axrt.Engine) -> float:
        engine.load_checkpoint(tmp_path / "one")
        engine.save_checkpoint(tmp_path / name)
        return engine.train_batch(iter(few_sentences(1)) if engine.reads else None).loss

    run(2, 4, begin)
    losses = []
    for tensor, shares in ((1, 0), (1, 4), (4, 4), (2, 2)):
        losses += run(tensor, shares, partial(go_on, f"{tensor}-{shares}"))[:1]
        assert saved(tmp_path / f"{tensor}-{shares}") == saved(tmp_path / "one")
    # Bits are those of four, whoever has them; others are as close as sums in another order.
    assert losses[1] == losses[2]
    assert losses == pytest.approx(losses[:1] * 4, rel=1e-5)


def test_what_the_user_writes_to_weights_is_taken() -> None:
    def losses(tensor: int) -> list[float]:
        parallel = {"tensor": tensor, "tensor_shards": VIRTUAL}
        config = configured(MICROBATCHES, parallel=parallel)

        def main(transport: Any) -> list[float]:
            with axrt.initialize(language(), adamw, config=config, transport=transport) as engine:
                found = []
                for step in range(2):
                    batches = iter(few_sentences(step)) if engine.reads else None
                    found.append(engine.train_batch(batches).loss)
                    with torch.no_grad():
                        for _, parameter in engine.named_parameters():
                            parameter *= 0.5
                    batches = iter(few_sentences(step)) if engine.reads else None
                    found.append(engine.eval_batch(batches).loss)
                return found

        return LocalWorld(tensor, 5).run(main)[0]

    assert losses(1) == losses(2) == losses(4)


# What an attack and a reader have found.


class Counts(nn.Module):
    """A given module, whose buffer has two names and counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        seen = torch.zeros(1)
        self.register_buffer("seen", seen)
        self.register_buffer("again", seen)
        self.factor = 1.0

    def forward(self, value: Tensor) -> Tensor:
        assert isinstance(self.seen, Tensor)
        self.seen += 1
        made = self.dropout(self.linear(value)) / self.get_buffer("again").clone()
        out: Tensor = value + self.factor * made
        return out


Acts = Callable[[Counts], Any]


def with_given(*, twice: bool = False, before: Acts | None = None) -> axrt.PipelineModule:
    torch.manual_seed(7)  # of the modules that are given as they are
    given, words = Counts(), axrt.LayerSpec(nn.Embedding, VOCAB, WIDTH)
    if before is not None:
        before(given)
    layers: list[Any] = [words, given, axrt.LayerSpec(Mlp), *[given] * twice]
    return axrt.PipelineModule([*layers, nn.Linear(WIDTH, VOCAB)], summed, tensor=CUTS)


def losses_with(act: Acts, tensor: int, **keys: Any) -> list[float]:
    """The losses and norms of steps, before each of which something is done to a module."""
    parallel = {"tensor": tensor, "tensor_shards": VIRTUAL}
    config = configured(MICROBATCHES, parallel=parallel, optimizer={"clip": 0.5})

    def main(transport: Any) -> list[float]:
        model, found = with_given(**keys), []
        given = model.layers[1]
        assert isinstance(given, Counts)
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            for step in range(2):
                act(given)
                result = engine.train_batch(iter(few_sentences(step)) if engine.reads else None)
                found += [result.loss, result.grad_norm or 0.0]
        return found

    return LocalWorld(tensor, 5).run(main)[0]


def nothing(given: Counts) -> None:
    return None


def halved(gradient: Tensor) -> Tensor:
    return 0.5 * gradient


def hooked(given: Counts) -> Any:
    return given.linear.weight.register_hook(halved)  # type: ignore[no-untyped-call]


def freeze(given: Counts) -> Any:
    return given.linear.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("act", "keys"),
    [
        (nothing, {"twice": True}),
        (nothing, {"before": hooked}),
        (Counts.eval, {}),
        (lambda given: setattr(given, "factor", given.factor / 2), {}),
        (lambda given: given.seen.mul_(2), {}),
    ],
    ids=["one module twice", "hooks on weights", "modes", "numbers", "buffers"],
)
def test_what_a_user_does_to_given_modules_counts(act: Acts, keys: dict[str, Any]) -> None:
    of_one, *others = (losses_with(act, tensor, **keys) for tensor in some((1, 2, 4), (1, 2)))
    assert all(other == of_one for other in others)
    if act is not nothing or "before" in keys:
        assert of_one != losses_with(nothing, 1)


def test_hooks_that_come_after_the_start_are_refused() -> None:
    with pytest.raises(ModelError, match="hooks were put on weights or modules after the start"):
        losses_with(hooked, 1)


def test_a_given_module_that_cannot_be_copied_is_refused() -> None:
    def with_lock(given: Counts) -> None:
        given.lock = threading.Lock()  # type: ignore[assignment]

    with pytest.raises(ConfigError, match="a Counts that is given as it is, cannot be copied"):
        losses_with(nothing, 1, before=with_lock)


def test_weights_that_are_narrow_by_themselves_are_refused() -> None:
    def narrow(given: Counts) -> None:
        given.bfloat16()

    with pytest.raises(ConfigError, match=r"is torch.bfloat16, and a rank has several virtual"):
        losses_with(nothing, 1, before=narrow)


class DropsItself(Mlp):
    """Its weights have hooks that let gradients go."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.pieces[0].parameters():
            parameter.register_post_accumulate_grad_hook(_let_go)  # type: ignore[no-untyped-call]


def _let_go(parameter: Tensor) -> None:
    parameter.grad = None


def test_gradients_that_a_hook_drops_are_dropped_everywhere() -> None:
    def model() -> axrt.PipelineModule:
        words = axrt.LayerSpec(nn.Embedding, VOCAB, WIDTH)
        ends = axrt.LayerSpec(nn.Linear, WIDTH, VOCAB)
        return axrt.PipelineModule([words, axrt.LayerSpec(DropsItself), ends], summed, tensor=CUTS)

    of_one, of_two, of_four = (on(model, members) for members in (1, 2, 4))
    assert of_one == of_two == of_four


class Depends(Inner):
    """What it says to exchange hangs on the share: the first one has the bias."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        before, given = value
        made = self.down(torch.relu(self.up(given)))
        return before, axrt.Sum(made) if self.down.bias is not None else made


class Odd(axrt.InPieces):
    def __init__(self) -> None:
        super().__init__([Normed(), Depends(), Added()])


def test_virtual_members_that_come_to_different_joints_are_refused() -> None:
    def model() -> axrt.PipelineModule:
        return axrt.PipelineModule([axrt.LayerSpec(Odd)], nn.functional.mse_loss, tensor=CUTS)

    def batches(step: int) -> list[Item]:
        return [(torch.ones(TOKENS, WIDTH), torch.zeros(TOKENS, WIDTH))] * MICROBATCHES

    with pytest.raises(ModelError, match="come to different joints"):
        trained(model, batches, 1, 1, parallel={"tensor_shards": 2})


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"parallel": {"tensor_shards": 3}}, "a power of two"),
        ({"parallel": {"tensor": 4, "tensor_shards": 2}}, "expected one of 4, 8, 16"),
        ({"parallel": {"tensor": 3, "tensor_shards": 4}}, "expected 0"),
        (
            {"parallel": {"tensor_shards": 2}, "memory": {"zero": 3}},
            r"with parallel\.tensor_shards = 2",
        ),
        (
            {"parallel": {"tensor": 2, "tensor_shards": 4, "gather_again": True}},
            r"expected parallel\.gather_again = False, or parallel\.tensor_shards = 2",
        ),
        *(
            ({"parallel": {"tensor_shards": 2}, section: {key: found}}, rf"{section}\.{key} = ")
            for section, key, found in (
                ("memory", "offload_activations", 1),
                ("run", "deterministic", True),
            )
        ),
        (
            {
                "parallel": {"tensor_shards": 2},
                "memory": {"offload_parameters": True, "offload": "stream"},
            },
            r"memory\.offload_parameters = True with",
        ),
        ({"parallel": {"tensor_shards": 2, "collectives": "library"}}, r"parallel\.collectives = "),
        (
            {
                "parallel": {"tensor_shards": 2},
                "precision": {"weights": "bfloat16", "gradients": "weights"},
            },
            r"precision\.gradients = 'weights' with",
        ),
    ],
)
def test_what_does_not_go_with_virtual_members_is_refused(
    sections: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        axrt.Config.read(sections)


def test_a_width_that_virtual_members_do_not_divide_is_refused() -> None:
    specs = [axrt.LayerSpec(Mlp, 6)]
    model = axrt.PipelineModule(specs, nn.functional.mse_loss, tensor=CUTS)
    config = configured(MICROBATCHES, parallel={"tensor_shards": 4})
    alone = LocalWorld(1).alone()
    with pytest.raises(ConfigError, match=r"parallel\.tensor_shards = 4; expected a width"):
        axrt.initialize(model, adamw, config=config, transport=alone)
