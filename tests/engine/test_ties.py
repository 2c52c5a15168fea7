"""Tied weights: one value wherever it is held, one gradient summed in the order of layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from ..sweeps import swept
from .models import Block
from .reference import (
    Outcome,
    configured,
    copies,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

VOCAB, WIDTH, MICROBATCHES = 11, 16, 4


def as_head(embedding: nn.Embedding, value: Tensor) -> Tensor:
    return functional.linear(value, embedding.weight)


class FrozenEmbedding(nn.Embedding):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weight.requires_grad_(False)


class Head(nn.Module):
    """Shares a weight that has another name, deeper down."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, value: Tensor) -> Tensor:
        logits: Tensor = self.out(self.norm(value))
        return logits


def tied(embedding: type[nn.Module] = nn.Embedding) -> axrt.PipelineModule:
    first = axrt.TiedLayerSpec("tokens", embedding, VOCAB, WIDTH)
    last = axrt.TiedLayerSpec("tokens", embedding, VOCAB, WIDTH, forward_fn=as_head)
    return axrt.PipelineModule(
        [first, axrt.LayerSpec(Block, WIDTH), axrt.LayerSpec(Block, WIDTH), last],
        functional.cross_entropy,
    )


def three_times() -> axrt.PipelineModule:
    """Once as it is, once in the middle, once as part of another module."""
    return axrt.PipelineModule(
        [
            axrt.TiedLayerSpec("tokens", nn.Embedding, VOCAB, WIDTH),
            axrt.LayerSpec(Block, WIDTH),
            axrt.TiedLayerSpec("tokens", nn.Linear, WIDTH, VOCAB, bias=False),
            axrt.LayerSpec(nn.Linear, VOCAB, WIDTH),
            axrt.TiedLayerSpec("tokens", Head, tied_weight_attr="out.weight"),
        ],
        functional.cross_entropy,
    )


def batches(replicas: int = 1) -> Any:
    def of_step(step: int) -> list[tuple[Tensor, ...]]:
        tokens = torch.randint(
            VOCAB, (MICROBATCHES * replicas, 2, 8), generator=torch.Generator().manual_seed(step)
        )
        return [tuple(pair) for pair in tokens]

    return of_step


def on_ranks(
    pipe: int,
    data: int,
    model: axrt.PipelineModule,
    steps: int = 4,
    factory: Any = None,
    **sections: Any,
) -> Outcome:
    config = configured(
        MICROBATCHES, parallel={"data": data, **sections.pop("parallel", {})}, **sections
    )
    factory = factory or (lambda named: torch.optim.AdamW(named, lr=1e-2))
    outcomes = LocalWorld(pipe * data).run(
        lambda t: train_on_a_rank(t, model, batches(data), steps, config, factory)
    )
    return together(outcomes, data)


def gradient(before: nn.Sequential, after: dict[str, Tensor]) -> Tensor:
    """What a step of SGD with rate one has taken away, of the parameters of plain torch."""
    return torch.cat(
        [
            (p.detach().double() - after[name].double()).flatten()
            for name, p in before.named_parameters()
        ]
    )


@swept(("pipe, data", [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3)]), ("make", [tied, three_times]))
def test_the_gradient_is_that_of_plain_torch(pipe: int, data: int, make: Any) -> None:
    rate_one = lambda named: torch.optim.SGD(named, lr=1.0)  # noqa: E731
    expected = gradient(
        make().sequential(7), train_in_plain_torch(make(), batches(data), 1, rate_one).parameters
    )
    found = gradient(make().sequential(7), on_ranks(pipe, data, make(), 1, rate_one).parameters)
    assert float((found - expected).norm() / expected.norm()) < 1e-6


@swept(("data", [1, 2]), ("clip", [0.0, 0.3]))
def test_bits_are_the_same_on_one_rank_on_two_and_for_any_partition(data: int, clip: float) -> None:
    for model in (tied(), three_times()):
        expected = on_ranks(1, data, model, optimizer={"clip": clip})
        for pipe, partition in (
            (2, ""),
            (2, [0, 1, len(model.layers)]),
            (2, [0, 0, len(model.layers)]),
            (4, ""),
        ):
            assert (
                on_ranks(
                    pipe, data, model, optimizer={"clip": clip}, parallel={"partition": partition}
                )
                == expected
            )


def test_losses_and_norms_follow_plain_torch_and_the_weight_counts_once() -> None:
    reference = train_in_plain_torch(tied(), batches(), 8, clip=0.3)
    outcome = on_ranks(2, 1, tied(), 8, optimizer={"clip": 0.3})
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-5)
    assert outcome.norms == pytest.approx(reference.norms, rel=1e-5)


@pytest.mark.parametrize(("pipe", "data"), [(1, 1), (2, 1), (3, 2)])
def test_every_copy_stays_the_same(pipe: int, data: int) -> None:
    copies = on_ranks(pipe, data, tied()).parameters
    assert torch.equal(copies["0.weight"], copies["3.weight"])
    assert not torch.equal(copies["0.weight"], tied().sequential(7).get_parameter("0.weight"))


@pytest.mark.parametrize(("pipe", "data"), [(1, 1), (2, 2)])
def test_a_frozen_tied_weight_stays_and_the_rest_trains(pipe: int, data: int) -> None:
    reference = train_in_plain_torch(tied(FrozenEmbedding), batches(data), 3)
    outcome = on_ranks(pipe, data, tied(FrozenEmbedding), 3)
    assert outcome.parameters.keys() == reference.parameters.keys()
    assert outcome.losses == pytest.approx(reference.losses, rel=1e-6)


def test_the_whole_model_in_one_process_shares_one_parameter() -> None:
    whole = three_times().sequential(7)
    weights = [whole.get_parameter(name) for name in ("0.weight", "2.weight", "4.out.weight")]
    assert weights[0] is weights[1] is weights[2]
    assert sum(parameter is weights[0] for parameter in whole.parameters()) == 1


@pytest.mark.parametrize(("pipe", "data"), [(1, 1), (2, 1), (3, 2)])
def test_an_engine_lists_a_tied_weight_once_by_the_name_that_plain_torch_shows(
    pipe: int, data: int
) -> None:
    def rank_main(transport: Transport) -> list[tuple[str, tuple[int, ...]]]:
        config = configured(MICROBATCHES, parallel={"data": data})
        with axrt.initialize(three_times(), config=config, transport=transport) as engine:
            return [(name, tuple(parameter.shape)) for name, parameter in engine.named_parameters()]

    expected = {
        name: tuple(parameter.shape)
        for name, parameter in three_times().sequential(7).named_parameters()
    }
    of_ranks = LocalWorld(pipe * data).run(rank_main)
    assert all(len(dict(listed)) == len(listed) for listed in of_ranks)
    assert {name: shape for listed in of_ranks for name, shape in listed} == expected
    if pipe == 1:
        assert list(dict(of_ranks[0])) == list(expected)


def scaled(module: nn.Module, value: Tensor) -> Tensor:
    twice: Tensor = module(value) * 2 + module.forward(value)
    return twice


class Scaled(nn.Module):
    """A head whose module runs within; its own linear defers."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, VOCAB, bias=False)
        self.runs = 0

    def forward(self, value: Tensor) -> Tensor:
        self.runs += 1
        logits: Tensor = self.out(value)
        return logits


def with_module_within() -> axrt.PipelineModule:
    return axrt.PipelineModule(
        [
            axrt.TiedLayerSpec("tokens", nn.Embedding, VOCAB, WIDTH, forward_fn=scaled),
            axrt.LayerSpec(Block, WIDTH),
            axrt.TiedLayerSpec("tokens", Scaled, forward_fn=scaled, tied_weight_attr="out.weight"),
        ],
        functional.cross_entropy,
    )


@pytest.mark.parametrize("policy", ["1f1b", "zb-h1"])
def test_a_forward_function_may_run_the_module_that_it_is_given(policy: str) -> None:
    reference = train_in_plain_torch(with_module_within(), batches(), 4)
    for pipe in (1, 3):
        outcome = on_ranks(pipe, 1, with_module_within(), schedule={"policy": policy})
        assert outcome.losses == pytest.approx(reference.losses, rel=1e-5)
        assert reference.parameters.keys() < outcome.parameters.keys()


def test_the_module_within_is_the_layer_and_its_hooks_run_once() -> None:
    whole = with_module_within().sequential(7)
    layer: Any = whole[2]
    value, seen = torch.randn(2, WIDTH), list[int]()
    layer.register_forward_pre_hook(lambda module, given: seen.append(module.runs))
    out = layer(value)
    assert torch.equal(
        out,
        functional.linear(value, layer.out.weight) * 2 + functional.linear(value, layer.out.weight),
    )
    assert (seen, layer.runs) == ([0], 2)
    assert isinstance(layer, Scaled)
    assert [name for name, _ in layer.named_parameters()] == ["out.weight"]
    assert type(whole[0]).__name__ == "Embedding"


def test_compiled_a_forward_function_may_run_the_module_too() -> None:
    layer, value = with_module_within().sequential(7)[2], torch.randn(2, WIDTH)
    assert torch.equal(torch.compile(layer, backend="eager")(value), layer(value))


@pytest.mark.parametrize("pipe", [1, 2])
def test_a_factory_knows_every_copy_by_the_name_that_plain_torch_shows(pipe: int) -> None:
    seen: set[str] = set()

    def by_name(named: Any) -> torch.optim.Optimizer:
        pairs = list(named)
        seen.update(name for name, _ in pairs)
        return torch.optim.SGD(
            [{"params": [p], "lr": 0.1 if name.startswith("0.") else 0.01} for name, p in pairs],
            lr=0.1,
        )

    copies = on_ranks(pipe, 1, three_times(), factory=by_name).parameters
    assert torch.equal(copies["0.weight"], copies["2.weight"])
    assert torch.equal(copies["0.weight"], copies["4.out.weight"])
    assert seen == {name for name, _ in three_times().sequential(7).named_parameters()}


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        (
            ("weight", "wait"),
            r"layer 1: tied_weight_attr = 'wait' is no parameter of Linear; expected one of "
            r"weight, bias",
        ),
        (
            ("weight", ["weight", "bias"]),
            r"but tied_weight_attr names \['weight'\] and \['weight', 'bias'\]; expected as many "
            r"names",
        ),
    ],
)
def test_attributes_that_cannot_be_tied_are_refused(attributes: tuple[Any, Any], text: str) -> None:
    first, last = (
        axrt.TiedLayerSpec("w", nn.Linear, 4, 4, tied_weight_attr=attribute)
        for attribute in attributes
    )
    with pytest.raises(axrt.ConfigError, match=text):
        axrt.PipelineModule([first, last], functional.cross_entropy).sequential(0)


def test_shapes_that_differ_are_refused() -> None:
    model = axrt.PipelineModule(
        [axrt.TiedLayerSpec("w", nn.Linear, 3, 4), axrt.TiedLayerSpec("w", nn.Linear, 4, 3)],
        functional.cross_entropy,
    )
    with pytest.raises(
        axrt.ConfigError,
        match=r"layers 0 and 1 are tied by key 'w', but weight of the one has shape \(4, 3\)",
    ):
        model.sequential(0)


def test_a_job_with_tied_weights_evaluates_and_ends_early() -> None:
    def rank_main(transport: Transport) -> float:
        with axrt.initialize(
            tied(), config=configured(MICROBATCHES), transport=transport
        ) as engine:
            engine.train_batch(iter(batches()(0)))
            with pytest.raises(StopIteration):
                engine.train_batch(iter(batches()(1)[:2]))
            engine.train_batch(iter(batches()(1)))
            return engine.eval_batch(iter(batches()(2))).loss

    assert len(set(LocalWorld(3).run(rank_main))) == 1


NARROW = {"weights": "bfloat16"}
# [memory], [precision], replicas
LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({}, {}, 1),
    ({}, {}, 2),
    ({"zero": 1}, {}, 2),
    ({"zero": 2, "bucket_mb": 0.0005}, {}, 2),
    ({}, NARROW, 1),
    ({"offload": "stream"}, {}, 1),
    ({"offload": "stream"}, NARROW, 1),
    ({"offload": "stream", "offload_parameters": True}, {}, 1),
]
WAYS = ("data", "in place", "new values")


def write(weight: Tensor, way: str) -> None:
    """What users do to a weight between steps."""
    if way == "data":
        weight.data.copy_(weight.detach() * 0.5 + 0.25)
        return
    with torch.no_grad():
        if way == "in place":
            weight.mul_(0.5).add_(0.25)
        else:
            nn.init.normal_(weight, generator=torch.Generator().manual_seed(3))


def written_between_steps(
    pipe: int, data: int, way: str, **sections: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of steps and of an evaluation, and every copy at the end."""

    def rank_main(transport: Transport) -> tuple[list[float], dict[str, Tensor]]:
        config = configured(MICROBATCHES, parallel={"data": data}, **sections)
        factory: Any = lambda named: torch.optim.AdamW(named, lr=1e-2)  # noqa: E731
        with axrt.initialize(tied(), factory, config=config, transport=transport) as engine:
            of = slice(engine.data_rank * MICROBATCHES, (engine.data_rank + 1) * MICROBATCHES)
            losses = []
            for step in range(3):
                if step:
                    for name, weight in engine.named_parameters():
                        if name == "0.weight":
                            write(weight, way)
                losses.append(engine.train_batch(iter(batches(data)(step)[of])).loss)
            losses.append(engine.eval_batch(iter(batches(data)(9)[of])).loss)
            every = frozenset(range(4))
            object.__setattr__(engine._model, "given", every)
        return losses, {n: p.detach().clone() for n, p in copies(engine)}

    found = LocalWorld(pipe * data).run(rank_main)
    return found[0][0], {name: p for _, of_rank in found for name, p in of_rank.items()}


def plainly_written(way: str, data: int) -> list[float]:
    held: dict[str, nn.Parameter] = {}

    def factory(named: Any) -> torch.optim.Optimizer:
        held.update(named)
        return torch.optim.AdamW(held.items(), lr=1e-2)

    def with_writes(step: int) -> Any:
        if step:
            write(held["0.weight"], way)
        return batches(data)(step)

    return train_in_plain_torch(tied(), with_writes, 3, factory).losses


@swept(("memory, precision, data", LAYOUTS), ("way", WAYS))
def test_what_is_written_to_a_tied_weight_reaches_every_layer_wherever_they_are(
    memory: dict[str, Any], precision: dict[str, Any], data: int, way: str
) -> None:
    """Two layers on one rank once had a copy each, of which the user's writes reached one."""
    sections = {"memory": memory, "precision": precision}
    apart = written_between_steps(4, data, way, **sections, schedule={"policy": "1f1b"})
    if not precision:
        assert apart[0][:3] == pytest.approx(plainly_written(way, data), rel=1e-5)
    for pipe, policy in ((1, "1f1b"), (2, "zb-v")):
        losses, weights = written_between_steps(
            pipe, data, way, **sections, schedule={"policy": policy}
        )
        assert losses == apart[0]
        assert all(torch.equal(weights[name], value) for name, value in apart[1].items())
        assert torch.equal(weights["0.weight"], weights["3.weight"])


WRITTEN: list[dict[str, Any]] = [
    {"memory": memory, "precision": precision}
    for memory in ({}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 1, "offload": "stream"})
    for precision in ({}, NARROW)
]


@pytest.mark.parametrize("sections", WRITTEN, ids=str)
def test_a_write_through_data_counts_or_is_refused_like_one_in_place(
    sections: dict[str, Any],
) -> None:
    """Where layers compute with copies, what changed no version was once undone by the step."""

    def outcome(way: str) -> Any:
        try:
            return written_between_steps(1, 2, way, **sections)[0]
        except (axrt.ModelError, RuntimeError) as error:
            return type(error)

    through, in_place = outcome("data"), outcome("in place")
    if isinstance(in_place, list):
        assert through == in_place
    else:
        assert through in (axrt.ModelError, in_place)
