"""Stages that a team holds, on members in one process: against plain torch."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.checkpoint.layers import Live
from axrt.checkpoint.snapshot import Snapshot
from axrt.errors import ConfigError, ModelError
from axrt.models.registry import model_of
from axrt.observe.observer import Observer
from axrt.scheduler.linger import Linger
from axrt.scheduler.message import Meaning
from axrt.scheduler.rank_state import RankState
from axrt.scheduler.rules import Queue
from axrt.transport.local import LocalTransport, LocalWorld

from ..sweeps import fewer, swept
from ..sweeps import first as first_of
from .conftest import QUEUE
from .reference import (
    POLICIES,
    Item,
    Outcome,
    adamw,
    configured,
    made_once,
    momentum,
    plain_torch,
    train_in_plain_torch,
    train_on_a_rank,
)

T = TypeVar("T")
WIDTH, TOKENS, VOCAB, MICROBATCHES = 16, 8, 23, 4


class Normed(nn.Module):
    """Each member has its tokens; the next piece gets all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, value: Tensor) -> Any:
        return value, axrt.Gathered(self.norm(value))


class Inner(nn.Module):
    """Each member has some of the inner features of all tokens."""

    def __init__(self, inner: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.sizes = (inner, inner)  # nobody reads it

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        before, given = value
        return before, axrt.Sum(self.down(torch.relu(self.up(given))))


class Added(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, value: tuple[Tensor, Tensor]) -> Tensor:
        before, made = value
        out: Tensor = before + self.dropout(made)
        return out


class Mlp(axrt.InPieces):
    """A layer with two joints, as people write it."""

    def __init__(self, inner: int = 4 * WIDTH, dropout: float = 0.0) -> None:
        super().__init__([Normed(), Inner(inner), Added(dropout)])


class Mixed(nn.Module):
    """A layer that nobody has cut: tokens see those before them, and dropout draws."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, value: Tensor) -> Tensor:
        before = value.cumsum(-2) / torch.ones_like(value).cumsum(-2)
        out: Tensor = value + self.dropout(self.linear(before))
        return out


CUTS = {"*.up": "column", "*.down": "row"}


def mlps() -> axrt.PipelineModule:
    """Features, and a loss of each token by itself."""
    return axrt.PipelineModule(
        [axrt.LayerSpec(Mlp) for _ in range(4)],
        loss_fn=nn.functional.mse_loss,
        tensor={**CUTS, "loss": "token"},
    )


def features(step: int) -> list[Item]:
    made = torch.Generator().manual_seed(step)
    shape = (TOKENS, WIDTH)
    return [
        (torch.randn(shape, generator=made), torch.randn(shape, generator=made))
        for _ in range(MICROBATCHES)
    ]


def of_predicted(logits: Tensor, targets: Tensor) -> Tensor:
    """A mean over tokens that count, of which members have different numbers."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def summed(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same as a sum and its weight, which may be of some tokens alone."""
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"
    )
    return loss, (targets != 0).sum().float()


def head(layer: nn.Module, value: Tensor) -> Tensor:
    assert isinstance(layer, nn.Embedding)
    return nn.functional.linear(value, layer.weight)


def language(loss_fn: Callable[[Any, Any], Any] = of_predicted, **more: str) -> axrt.PipelineModule:
    """Tied layers, layers in pieces, one of tokens, and whole ones."""
    return axrt.PipelineModule(
        [
            axrt.TiedLayerSpec("words", nn.Embedding, VOCAB, WIDTH),
            axrt.LayerSpec(Mlp),
            axrt.LayerSpec(Mixed),
            axrt.LayerSpec(Mlp, 2 * WIDTH),
            axrt.LayerSpec(nn.LayerNorm, WIDTH),
            axrt.TiedLayerSpec("words", nn.Embedding, VOCAB, WIDTH, forward_fn=head),
        ],
        loss_fn=loss_fn,
        tensor={**CUTS, "4": "token", **more},
    )


def by_tokens() -> axrt.PipelineModule:
    return language(summed, loss="token")


def sentences(step: int) -> list[Item]:
    """Two sequences a microbatch; the first half of them has few targets that count."""
    made = torch.Generator().manual_seed(step)
    found = []
    for _ in range(2 * MICROBATCHES):
        tokens = torch.randint(1, VOCAB, (2, TOKENS + 1), generator=made)
        targets = tokens[:, 1:].clone()
        targets[:, 1 : TOKENS // 2] = 0
        found.append((tokens[:, :-1], targets))
    return found


GPTS: dict[str, dict[str, Any]] = {
    "gpt-2": {"tied": True, "bias": "all"},
    "llama": {
        "positions": "rotary",
        "feed": "swiglu",
        "norm": "rms",
        "kv_heads": 2,
        "qk_norm": True,
        "bias": "qkv",
    },
}


def built_in(kind: str, document_end: int = -1) -> axrt.PipelineModule:
    model = {"vocab": VOCAB, "width": 16, "heads": 4, "layers": 2, "context": TOKENS}
    data = {"document_end": document_end}
    sections = {"model": {**model, **GPTS[kind]}, "data": data, "parallel": {"tensor": 2}}
    return model_of(axrt.Config.read(sections))


def few_sentences(step: int) -> list[Item]:
    return sentences(step)[:MICROBATCHES]


def trained(
    model: Callable[[], axrt.PipelineModule],
    batches: Callable[[int], Sequence[Item]],
    pipe: int,
    tensor: int,
    data: int = 1,
    *,
    seed: int = 1,
    steps: int = 2,
    factory: Any = adamw,
    join: Callable[[str, dict[int, Tensor]], Tensor] | None = None,
    **sections: dict[str, Any],
) -> Outcome:
    """What a job makes, cut weights put together; whole ones are the same on all members."""
    layout = {"tensor": tensor, "pipe": pipe, "data": data}
    # By "auto" each rank would simulate the schedule, and the bits of both ways are the same.
    fill = {"fill": ("always", "never")[(pipe + seed + len(sections)) % 2]}
    sections = {
        **sections,
        "parallel": {**layout, **sections.get("parallel", {})},
        "schedule": {**fill, **sections.get("schedule", {})},
    }
    config = configured(MICROBATCHES, **sections)

    def main(transport: Any) -> tuple[int, Outcome]:
        return transport.rank % tensor, train_on_a_rank(
            transport, model(), batches, steps, config, factory
        )

    ranks = LocalWorld(pipe * tensor * data, seed).run(main)
    whole: dict[str, dict[int, Tensor]] = {}
    for member, outcome in ranks:
        assert outcome.losses == ranks[0][1].losses
        for name, value in outcome.parameters.items():
            before = whole.setdefault(name, {}).setdefault(member, value)
            assert torch.equal(before, value), f"replicas differ in {name}"
    return Outcome(
        ranks[0][1].losses,
        ranks[0][1].norms,
        {name: (join or put_together)(name, of) for name, of in whole.items()},
    )


trained_once = made_once(trained)  # what other runs are held beside


def put_together(name: str, of_members: dict[int, Tensor]) -> Tensor:
    parts = [of_members[member] for member in sorted(of_members)]
    if ".up." in name or ".gate." in name:
        return torch.cat(parts)
    if name.endswith("down.weight"):  # by inputs
        return torch.cat(parts, 1)
    if name.endswith(("down.bias", "project_out.bias")) or ".attention.project_" in name:
        return parts[0]  # the first member's alone, or in blocks
    assert all(torch.equal(parts[0], part) for part in parts)
    return parts[0]


def assert_close(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("policy", first_of(POLICIES, quick=5))
def test_a_team_trains_as_plain_torch_under_any_policy(policy: str) -> None:
    found = trained(mlps, features, 2, 2, schedule={"policy": policy}, factory=momentum)
    assert_close(found, plain_torch(mlps, features, 2, momentum))


@swept(
    ("pipe, tensor, data", [(1, 2, 1), (2, 2, 1), (1, 4, 1), (2, 2, 2)]),
    ("model", [language, by_tokens]),
    ("policy", ["1f1b", "zb-h1"]),
)
def test_any_layer_is_right_in_a_team(
    policy: str, model: Callable[[], axrt.PipelineModule], pipe: int, tensor: int, data: int
) -> None:
    batches = sentences if data == 2 else few_sentences
    clip = {"clip": 0.5}
    found = trained(model, batches, pipe, tensor, data, schedule={"policy": policy}, optimizer=clip)
    assert_close(found, plain_torch(model, batches, 2, clip=0.5))


@swept(
    ("document_end", [-1, 3]),
    ("kind", GPTS),
)
def test_the_built_in_models_are_cut(kind: str, document_end: int) -> None:
    def model() -> axrt.PipelineModule:
        return built_in(kind, document_end)

    expected = train_in_plain_torch(model(), few_sentences, 2)
    found = trained(model, few_sentences, 2, 2, schedule={"policy": "zb-h1"})
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)


@swept(
    ("policy", ["1f1b", "zb-v"]),
    (
        "memory",
        [{"offload": "stream", "scratch": "host"}, {"offload": "cpu"}, {"offload_activations": 5}],
    ),
)
def test_a_team_offloads(memory: dict[str, Any], policy: str) -> None:
    keys: dict[str, Any] = {"schedule": {"policy": policy}, "optimizer": {"clip": 0.5}}
    found = trained(language, few_sentences, 2, 2, memory=memory, **keys)
    assert found == trained_once(language, few_sentences, 2, 2, **keys)


@swept(
    ("policy", ["1f1b", "zb-v"]),
    ("recompute", ["full", 1, 2]),
)
def test_layers_of_a_team_run_again(recompute: str | int, policy: str) -> None:
    """Nothing is sent twice, so the bits are those of layers that keep all."""
    keys: dict[str, Any] = {"schedule": {"policy": policy}, "optimizer": {"clip": 0.5}}
    found = trained(language, few_sentences, 2, 2, memory={"recompute": recompute}, **keys)
    assert found == trained_once(language, few_sentences, 2, 2, **keys)


class Sent(Observer):
    """Counts elements of slices that a rank sends."""

    def __init__(self) -> None:
        self.elements = 0

    def sent(self, rank: int, message: Any, payload: Any) -> None:
        if getattr(message, "meaning", None) in (Meaning.SLICE, Meaning.SLICE_BACK):
            self.elements += sum(tensor.numel() for tensor in payload)


def assert_a_block_sends(slices: int, tensor: int, **sections: dict[str, Any]) -> None:
    """Each member of a team sends so many times (t - 1) / t of a block's features."""
    parallel = {"tensor": tensor, **sections.pop("parallel", {})}
    config = configured(MICROBATCHES, parallel=parallel, **sections)

    def main(transport: Any) -> int:
        sent = Sent()
        train_on_a_rank(
            *(transport, built_in("gpt-2"), few_sentences, 1, config), observers=(sent,)
        )
        return sent.elements

    features_of_a_microbatch = 2 * TOKENS * 16
    blocks = 2 * MICROBATCHES
    expected = slices * (tensor - 1) * features_of_a_microbatch // tensor * blocks
    assert LocalWorld(tensor, 2).run(main) == [expected] * tensor


@swept(
    ("recompute", ["none", "full"]),
    ("tensor", [2, 4]),
)
def test_a_block_sends_eight_slices_each_way_round(tensor: int, recompute: str) -> None:
    """At each of four joints, forward and backward."""
    assert_a_block_sends(8, tensor, memory={"recompute": recompute})


def test_replicas_of_teams_share_microbatches() -> None:
    found = trained(language, sentences, 1, 2, 2, schedule={"policy": "1f1b", "share": True})
    assert_close(found, plain_torch(language, sentences, 2))


def test_shared_microbatches_have_one_sum_whoever_computes_them() -> None:
    keys: dict[str, Any] = {"schedule": {"share": True}, "run": {"deterministic": True}}
    first, *others = [
        trained(language, sentences, 1, 2, 2, seed=seed, **keys) for seed in range(fewer(4, 2))
    ]
    assert all(other == first for other in others)
    assert_close(first, plain_torch(language, sentences, 2))


@pytest.mark.parametrize("policy", first_of(["zb-h1", "1f1b"]))
def test_a_library_adds_replicas_of_a_team_up(policy: str) -> None:
    """Of weights that are cut the same member of each replica, of others all ranks of a stage."""
    parallel = {"collectives": "library", "activations": "library"}
    found = trained(
        *(language, sentences, 2, 2, 2),
        parallel=parallel,
        schedule={"policy": policy},
        optimizer={"clip": 0.5},
    )
    assert_close(found, plain_torch(language, sentences, 2, clip=0.5))


def test_bits_depend_on_no_order_of_messages() -> None:
    first, *others = [
        trained(language, few_sentences, 2, 2, seed=seed, schedule={"policy": "zb-h2"})
        for seed in range(fewer(4, 2))
    ]
    assert all(other == first for other in others)


@pytest.mark.parametrize("data", first_of([2, 1]))
def test_members_have_the_same_buckets_of_whole_weights(data: int) -> None:
    """Biases that the first member alone has move no other weight to another bucket."""
    batches = sentences if data == 2 else few_sentences
    for bucket_mb in (0.0, 0.002):
        found = trained(
            *(language, batches, 2, 2, data),
            memory={"bucket_mb": bucket_mb},
            schedule={"policy": "1f1b"},
            optimizer={"clip": 0.5},
        )
        assert_close(found, plain_torch(language, batches, 2, clip=0.5))


def test_narrow_types_in_a_team() -> None:
    bf16 = {"compute": "bfloat16"}
    found = trained(language, few_sentences, 2, 2, precision=bf16)
    expected = plain_torch(language, few_sentences, 2, compute=torch.bfloat16)
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)


@pytest.mark.skipif(QUEUE in os.environ, reason="on a thread other work is started beside a piece")
def test_a_rank_fills_the_time_at_joints_or_waits_and_bits_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, picks = [0], Linger.pick

    def watched(linger: Linger, state: RankState, queue: Queue, *rest: Any) -> Any:
        task = picks(linger, state, queue, *rest)
        if task is None and state.is_at_joint(queue) and state.pick(queue) is not None:
            waits[0] += 1
        return task

    monkeypatch.setattr(LocalTransport, "takes_time", True)
    monkeypatch.setattr(Linger, "pick", watched)
    outcomes = {}
    for fill in ("always", "never", "auto"):
        waits[0] = 0
        schedule = {"policy": "eager-1f1b", "fill": fill}
        outcomes[fill] = trained(mlps, features, 2, 2, schedule=schedule), waits[0]
    (always, filled), (never, waited), (auto, of_auto) = outcomes.values()
    assert always == never == auto
    # So few microbatches are faster in their own order, and auto waits.
    assert filled == 0
    assert min(waited, of_auto) > 0


def test_members_draw_for_themselves_in_pieces_and_alike_in_whole_layers() -> None:
    found: dict[tuple[str, int], Tensor] = {}

    class Notes(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.linear = name, nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Tensor) -> Tensor:
            found[self.name, torch.initial_seed()] = torch.rand(4)
            out: Tensor = self.linear(value)
            return out

    def model() -> axrt.PipelineModule:
        layers = [axrt.LayerSpec(Notes, name) for name in ("tokens", "whole")]
        return axrt.PipelineModule(
            [*layers, axrt.LayerSpec(Mlp)], nn.functional.mse_loss, tensor={**CUTS, "0": "token"}
        )

    trained(model, features, 1, 2, steps=1)
    kinds = [name for name, _ in found]
    assert kinds.count("tokens") == 2 * MICROBATCHES
    assert kinds.count("whole") == MICROBATCHES


@swept(
    ("policy", ["1f1b", "zb-v", "chimera"]),
    ("model", [language, by_tokens]),
)
def test_an_evaluation_in_a_team_is_that_of_plain_torch(
    model: Callable[[], axrt.PipelineModule], policy: str
) -> None:
    whole = model().sequential(7).eval()
    with torch.no_grad():
        expected = [whole(inputs) for inputs, _ in few_sentences(0)]
        targets = [of_one for _, of_one in few_sentences(0)]
        means = list(map(of_predicted, expected, targets))
        sums, weights = zip(*map(summed, expected, targets), strict=True)
    config = configured(MICROBATCHES, parallel={"tensor": 2}, schedule={"policy": policy})

    def main(transport: Any) -> tuple[float, int, list[Tensor]]:
        with axrt.initialize(model(), adamw, config=config, transport=transport) as engine:
            batches = iter(few_sentences(0)) if engine.reads else None
            found = engine.eval_batch(batches, outputs=True)
            return found.loss, found.microbatches, found.outputs

    main_rank, *others = LocalWorld(4, 3).run(main)
    for loss, microbatches, _ in (main_rank, *others):
        assert microbatches == MICROBATCHES
        plain = sum(means) / len(means) if model is language else sum(sums) / sum(weights)
        assert loss == pytest.approx(float(plain), rel=1e-5)
    torch.testing.assert_close(main_rank[2], expected, rtol=1e-4, atol=1e-5)
    assert not any(outputs for *_, outputs in others)


# What an attack has found.


class Doubled(nn.Module):
    """Gives what it makes on twice, once for all members."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Any:
        made = self.linear(value)
        return made, axrt.Gathered(made)


class InPlace(Inner):
    """Writes to what it is given while its slices may be on their way."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        before, given = value
        hidden = self.up(given.clone())
        before.add_(1.0)
        return before, axrt.Sum(self.down(hidden.sin()))


class Writing(axrt.InPieces):
    def __init__(self) -> None:
        super().__init__([Doubled(), InPlace(), Added()])


class Marked(Mlp):
    """Marks weights for the factory of optimizers."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.pieces[1].parameters():
            setattr(parameter, "no_decay", True)  # noqa: B010


def by_marks(named: Any) -> torch.optim.Optimizer:
    pairs = [(getattr(p, "no_decay", False), p) for _, p in named]
    groups = [
        {"params": [p for is_marked, p in pairs if is_marked is of], "weight_decay": decay}
        for of, decay in ((True, 0.0), (False, 2.0))
    ]
    return torch.optim.SGD(groups, lr=0.1)


def of_layers(*layers: type[nn.Module], **more: str) -> Callable[[], axrt.PipelineModule]:
    specs = [axrt.LayerSpec(layer) for layer in layers]
    return lambda: axrt.PipelineModule(specs, nn.functional.mse_loss, tensor={**CUTS, **more})


@pytest.mark.parametrize(
    ("model", "factory"),
    [(of_layers(Writing, Writing), momentum), (of_layers(Marked, Mixed), by_marks)],
    ids=["in-place", "marks"],
)
def test_a_team_is_as_one_rank(model: Callable[[], axrt.PipelineModule], factory: Any) -> None:
    alone = trained(model, features, 1, 1, factory=factory)
    for seed in range(3):
        assert_close(trained(model, features, 1, 2, seed=seed, factory=factory), alone)
    again: dict[str, Any] = {"memory": {"recompute": "full"}}
    assert_close(trained(model, features, 1, 2, factory=factory, **again), alone)


def test_layers_in_pieces_that_nobody_cuts_are_whole() -> None:
    def model() -> axrt.PipelineModule:
        layers = [axrt.LayerSpec(Mlp), axrt.LayerSpec(Mlp), axrt.TiedLayerSpec("mlp", Mlp)]
        cuts = {"0.*.up": "column", "0.*.down": "row"}
        return axrt.PipelineModule(layers, nn.functional.mse_loss, tensor=cuts)

    found = trained(model, features, 1, 2, factory=momentum)
    assert found.losses == pytest.approx(
        train_in_plain_torch(model(), features, 2, momentum).losses, rel=1e-5
    )


class Twice(axrt.InPieces):
    """Joints within a piece, which nobody would see."""

    def __init__(self) -> None:
        super().__init__([Mlp(), Mlp()])


class Counting(nn.Module):
    """A buffer that each member would have for itself."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Any:
        with torch.no_grad():
            self.mean.lerp_(value.flatten(0, -2).mean(0), 0.1)
        return self.linear(value - self.mean)


class Scored(nn.Module):
    """A number a token beside its features."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Any:
        return self.linear(value), value.mean(-1)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = torch.fft.fft(self.linear(value), dim=0)
        return out


class Hooking(Mlp):
    def __init__(self) -> None:
        super().__init__()
        for parameter in self.pieces[1].parameters():
            parameter.register_hook(lambda gradient: gradient * 0.1)  # type: ignore[no-untyped-call]


class FedAlone(axrt.InPieces):
    """A sum of what is whole on each member."""

    def __init__(self) -> None:
        super().__init__([Normed(), Inner(), Added(), Normed(), Whole(), Added()])


class Whole(Inner):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.first, self.second = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        before, given = value
        return before, axrt.Sum(self.second(self.first(given)))


class UpOfOwn(nn.Module):
    """Has some of the features of a member's own tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, value: Tensor) -> Any:
        return value, axrt.Gathered(torch.relu(self.up(value)))


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        before, given = value
        return before, axrt.Sum(self.down(given[..., : self.down.in_features]))


class Swapped(axrt.InPieces):
    """Gathers tokens that have different features."""

    def __init__(self) -> None:
        super().__init__([UpOfOwn(), Down(), Added()])


def by_shapes(named: Any) -> torch.optim.Optimizer:
    groups = [{"params": [p], "lr": 1.0 / p.shape[0]} for _, p in named]
    return torch.optim.SGD(groups, lr=0.1)


@pytest.mark.parametrize(
    ("model", "factory", "text"),
    [
        (of_layers(Twice), momentum, "has a layer in pieces within it"),
        (of_layers(Mlp, Counting, **{"1": "token"}), momentum, "changes buffers"),
        (of_layers(Mlp, Scored, Mlp, **{"1": "token"}), momentum, "behind layer 1"),
        (of_layers(Mlp, Scored, Mlp), momentum, "before layer 2"),
        (of_layers(Mlp, Spectral, Mixed), momentum, "complex64 comes to a joint"),
        (of_layers(Swapped), momentum, "is cut, and was given 8 tokens; expected the 16"),
        (of_layers(Hooking), momentum, "has hooks, weights or modules of its own"),
        (of_layers(FedAlone), momentum, "has 2 axrt.Sum in its pieces and 1 matrices"),
        (of_layers(Mlp), by_shapes, "other options than the whole"),
    ],
)
def test_what_would_be_wrong_in_a_team_is_refused(
    model: Callable[[], axrt.PipelineModule], factory: Any, text: str
) -> None:
    with pytest.raises((ConfigError, ModelError), match=text):
        trained(model, sequences, 1, 2, factory=factory)


def sequences(step: int) -> list[Item]:
    made = torch.Generator().manual_seed(step)
    shape = (2, TOKENS, WIDTH)
    return [
        (torch.randn(shape, generator=made), torch.randn(shape, generator=made))
        for _ in range(MICROBATCHES)
    ]


def test_one_attribute_is_divided_once() -> None:
    plan = {**CUTS, "*.pieces.1.sizes": "divide", "1.*.sizes": "divide"}
    with pytest.raises(ConfigError, match=r"name 1.pieces.1.sizes; expected one"):
        trained(lambda: language_of(plan), features, 1, 2)


REFUSED = [
    (lambda: language_of({}), "says nothing of how its matrices"),
    (lambda: language_of({"*.upp": "column"}), "'*.upp' matches nothing.*nearest is"),
    (lambda: language_of({"*.norm": "token"}), "matches nothing; expected the index of a layer"),
    (lambda: language_of({"*.norm": "row"}), "is a LayerNorm; expected an nn.Linear"),
    (
        lambda: language_of({"2.linear": "row"}),
        "layer 2, a Mixed, has matrices that are cut by rows",
    ),
    (lambda: language_of({**CUTS, "1*.up": "column"}), "both '.*' and '.*' name 1.pieces.1.up"),
    (lambda: language_of(CUTS, inner=9), "has 9 outputs, and parallel.tensor = 2"),
]


def test_statistics_over_tokens_are_those_of_all() -> None:
    def model() -> axrt.PipelineModule:
        layers = [axrt.LayerSpec(Mlp), axrt.LayerSpec(nn.BatchNorm1d, WIDTH)]
        return axrt.PipelineModule(layers, nn.functional.mse_loss, tensor={**CUTS, **named})

    named: dict[str, str] = {}
    found = trained(model, features, 1, 2, factory=momentum)
    assert_close(found, train_in_plain_torch(model(), features, 2, momentum))
    named = {"1": "token"}
    with pytest.raises(ConfigError, match="1 is a BatchNorm1d, whose statistics"):
        trained(model, features, 1, 2)


def language_of(cuts: dict[str, str], inner: int = 8) -> axrt.PipelineModule:
    return axrt.PipelineModule(
        [
            axrt.LayerSpec(nn.Linear, WIDTH, WIDTH),
            axrt.LayerSpec(Mlp, inner),
            axrt.LayerSpec(Mixed),
        ],
        nn.functional.mse_loss,
        tensor=cuts,
    )


@pytest.mark.parametrize(("model", "text"), REFUSED)
def test_what_members_cannot_share_out_is_refused(
    model: Callable[[], axrt.PipelineModule], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        trained(model, features, 1, 2)


def test_a_module_given_as_it_is_is_not_cut() -> None:
    with pytest.raises(ConfigError, match=r"expected layer 0 as an axrt\.LayerSpec"):
        trained(
            lambda: axrt.PipelineModule([Mlp()], nn.functional.mse_loss, tensor=CUTS),
            *(features, 1, 2),
        )


def test_words_of_a_plan_are_checked() -> None:
    with pytest.raises(ConfigError, match="expected a dict of words"):
        language_of({"*.up": 2})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="expected one of 'column', 'row', 'vocabulary'"):
        language_of({"*.up": "columns"})
    with pytest.raises(ConfigError, match="'loss' is 'row'; expected one of 'token'"):
        language_of({"loss": "row"})


class NoSum(Inner):
    """Forgets to add up."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        before, given = value
        return before, self.down(torch.relu(self.up(given)))


class OpenEnd(Inner):
    """Ends in a joint."""

    def forward(self, value: tuple[Tensor, Tensor]) -> Any:
        _, given = value
        return axrt.Sum(self.down(self.up(given)))


class Forgetful(axrt.InPieces):
    def __init__(self) -> None:
        super().__init__([Normed(), NoSum(), Added()])


class Open(axrt.InPieces):
    def __init__(self) -> None:
        super().__init__([Normed(), OpenEnd()])


class Hooked(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Forgetful, "must match the size"),
        (Open, "the last piece returned Sum"),
        (Hooked, "has hooks or a forward of its own"),
    ],
)
def test_pieces_that_do_not_add_up_are_refused(layer: type[nn.Module], text: str) -> None:
    def model() -> axrt.PipelineModule:
        return axrt.PipelineModule([axrt.LayerSpec(layer)], nn.functional.mse_loss, tensor=CUTS)

    with pytest.raises((ModelError, RuntimeError), match=text):
        trained(model, features, 1, 2)


def test_what_a_team_does_not_take_yet_is_refused() -> None:
    for key in ("tensor", "tensor_shards"):
        with pytest.raises(ConfigError, match=rf"run.compile = .* with parallel.{key} = 2"):
            axrt.Config.read({"parallel": {key: 2}, "run": {"compile": "inductor"}})
    for key, value in (("policy", "auto"), ("costs", "costs.json")):
        several = {"parallel": {"tensor": 2, "tensor_shards": 4}, "schedule": {key: value}}
        with pytest.raises(ConfigError, match=rf"schedule.{key} = .* with parallel.tensor_sh"):
            axrt.Config.read(several)


# Checkpoints.


def saved(folder: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.suffix == ".safetensors"}


@swept(
    (
        "first, then, offload",
        [
            ((1, 1), (1, 2), "none"),
            ((2, 2), (1, 1), "stream"),
            ((1, 4), (2, 2), "none"),
            ((1, 2), (1, 4), "cpu"),
        ],
    ),
    ("wait", [True, False]),
)
def test_any_degree_goes_on_from_any_other(
    first: tuple[int, int], then: tuple[int, int], offload: str, wait: bool, tmp_path: Path
) -> None:
    """Files do not know of teams: what is loaded and saved again is the same to the byte."""

    def run(layout: tuple[int, int], act: Callable[[axrt.Engine], T]) -> list[T]:
        pipe, tensor = layout
        config = configured(
            MICROBATCHES,
            parallel={"pipe": pipe, "tensor": tensor},
            optimizer={"clip": 0.5},
            precision={"weights": "bfloat16"} if wait else {},
            memory={"offload": offload, "scratch": "host"},
        )

        def main(transport: Any) -> T:
            with axrt.initialize(language(), adamw, config=config, transport=transport) as engine:
                return act(engine)

        return LocalWorld(pipe * tensor, 5).run(main)

    def begin(engine: axrt.Engine) -> None:
        engine.train_batch(iter(few_sentences(0)) if engine.reads else None)
        engine.save_checkpoint(tmp_path / "one", {"of": "one"}, wait=wait)
        engine.train_batch(iter(few_sentences(1)) if engine.reads else None)  # beside the save
        engine.finish_saving()

    def go_on(engine: axrt.Engine) -> float:
        assert engine.load_checkpoint(tmp_path / "one") == {"of": "one"}
        assert engine.step == 1
        engine.save_checkpoint(tmp_path / "two")
        return engine.train_batch(iter(few_sentences(1)) if engine.reads else None).loss

    run(first, begin)
    losses = run(then, go_on)
    assert saved(tmp_path / "one") == saved(tmp_path / "two")
    again = run(first, lambda engine: (engine.load_checkpoint(tmp_path / "two"), _next(engine))[1])
    assert losses == pytest.approx([again[0]] * len(losses), rel=1e-2 if wait else 1e-5)


def _next(engine: axrt.Engine) -> float:
    return engine.train_batch(iter(few_sentences(1)) if engine.reads else None).loss


class Normalized(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(WIDTH)


def test_buffers_that_forwards_change_are_copied_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot is told which they are; others are copied while training goes on."""
    config = configured(MICROBATCHES, parallel={"pipe": 1, "tensor": 2})
    taken: list[tuple[bool, torch.Size]] = []
    take = Snapshot.take

    def noting(snapshot: Snapshot, live: Live) -> Tensor:
        taken.append((live.changes, live.value.shape))
        return take(snapshot, live)

    monkeypatch.setattr(Snapshot, "take", noting)

    def main(transport: Any) -> None:
        model = of_layers(Mlp, Normalized)()
        with axrt.initialize(model, adamw, config=config, transport=transport) as engine:
            engine.train_batch(iter(features(0)) if engine.reads else None)
            engine.save_checkpoint(tmp_path / "one", wait=False)
            engine.train_batch(iter(features(1)) if engine.reads else None)
            engine.finish_saving()

    LocalWorld(2, 1).run(main)
    of_buffers = [shape for changes, shape in taken if changes]
    # Of each member: the running mean and variance, and how often.
    assert sorted(of_buffers) == sorted([torch.Size([WIDTH])] * 4 + [torch.Size([])] * 2)


def test_an_optimizer_that_looks_at_whole_weights_is_refused_where_they_are_cut() -> None:
    factory = lambda named: torch.optim.Adafactor([p for _, p in named])  # noqa: E731
    with pytest.raises(ConfigError, match=r"share 0\..* out .* step each element by itself"):
        trained(mlps, features, 1, 2, factory=factory)
