"""A vocabulary that the members of a team share out: against plain torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.errors import ConfigError, ModelError
from axrt.model.joints import Team
from axrt.model.vocabulary import CutLogits, numbers_of
from axrt.models.registry import model_of
from axrt.transport.local import LocalWorld

from ..sweeps import swept
from .reference import (
    Item,
    adamw,
    configured,
    plain_torch,
    train_in_plain_torch,
    train_on_a_rank,
)
from .test_tensor import (
    CUTS,
    GPTS,
    MICROBATCHES,
    TOKENS,
    WIDTH,
    Mixed,
    Mlp,
    Sent,
    assert_close,
    put_together,
    saved,
    sentences,
    trained,
)

VOCAB = 4 * WIDTH
LAYERS = [
    axrt.LayerSpec(nn.Embedding, VOCAB, WIDTH),
    axrt.LayerSpec(Mlp),
    axrt.LayerSpec(Mixed),
    axrt.LayerSpec(nn.Linear, WIDTH, VOCAB),
]


PLAN = {**CUTS, "0": "vocabulary", "3": "vocabulary"}


def means(**tensor: str) -> axrt.PipelineModule:
    """Layers as they are, the first and the last one with a vocabulary that is cut."""
    return axrt.PipelineModule(LAYERS, axrt.cross_entropy, tensor={**PLAN, **tensor})


def sums() -> axrt.PipelineModule:
    return axrt.PipelineModule(LAYERS, axrt.masked_cross_entropy, tensor=PLAN)


def masked(step: int) -> list[Item]:
    """Sequences of which some targets do not count, other numbers on each member."""
    return [
        (tokens, torch.where(targets == 0, -100, targets))
        for tokens, targets in sentences(step)[:MICROBATCHES]
    ]


def joined(name: str, of_members: dict[int, Tensor]) -> Tensor:
    if name.startswith(("0.", "3.")):
        return torch.cat([of_members[member] for member in sorted(of_members)])
    return put_together(name, of_members)


@swept(
    ("pipe, tensor", [(1, 2), (2, 2), (1, 4)]),
    ("model", [means, sums]),
    ("policy", ["1f1b", "zb-v"]),
)
def test_a_team_trains_as_plain_torch(
    policy: str, model: Callable[[], axrt.PipelineModule], pipe: int, tensor: int
) -> None:
    keys: Any = {"schedule": {"policy": policy}, "optimizer": {"clip": 0.5}, "join": joined}
    found = trained(model, masked, pipe, tensor, **keys)
    assert_close(found, plain_torch(model, masked, 2, clip=0.5))
    again = trained(model, masked, pipe, tensor, **keys, memory={"recompute": "full"}, seed=2)
    assert found == again


@pytest.mark.parametrize("precision", [{"weights": "bfloat16"}, {"compute": "bfloat16"}])
def test_logits_in_a_narrow_type(precision: dict[str, str]) -> None:
    found = trained(means, masked, 2, 2, join=joined, precision=precision)
    assert found.losses == pytest.approx(plain_torch(means, masked, 2).losses, rel=0.02)


def test_the_built_in_head_is_cut_where_its_vocabulary_can_be() -> None:
    def config(tensor: int, vocab: int = 24, tied: bool = False) -> axrt.Config:
        model = {"vocab": vocab, "width": 16, "heads": 4, "layers": 2, "context": TOKENS}
        model = {**model, **GPTS["llama"], "tied": tied}
        return axrt.Config.read({"model": model, "parallel": {"tensor": tensor}})

    plans = [model_of(config(2, *of)).tensor for of in ((24,), (23,), (24, True))]
    assert [plan.get("3.logits") for plan in plans] == ["vocabulary", None, None]
    assert [plan.get("loss") for plan in plans] == [None, "token", "token"]
    expected = train_in_plain_torch(model_of(config(1)), sentences, 2)
    found = trained(lambda: model_of(config(2)), sentences, 2, 2, data=2, join=joined)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-4)


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_loss_sends_two_numbers_a_token(tensor: int) -> None:
    config = configured(MICROBATCHES, parallel={"tensor": tensor})
    model = axrt.PipelineModule(
        LAYERS[:1] + LAYERS[-1:], axrt.cross_entropy, tensor={"1": "vocabulary"}
    )

    def main(transport: Any) -> int:
        sent = Sent()
        train_on_a_rank(transport, model, masked, 1, config, observers=(sent,))
        return sent.elements

    tokens = 2 * TOKENS * MICROBATCHES
    # Features are put together before the head, and their gradients added up.
    slices = 2 * (tensor - 1) * tokens * WIDTH // tensor
    assert LocalWorld(tensor, 2).run(main) == [slices + 2 * tokens * (tensor - 1)] * tensor


def test_an_evaluation_gives_whole_logits() -> None:
    whole = means().sequential(7).eval()
    with torch.no_grad():
        expected = [whole(inputs) for inputs, _ in masked(0)]
    config = configured(MICROBATCHES, parallel={"tensor": 2})

    def main(transport: Any) -> tuple[float, list[Tensor]]:
        with axrt.initialize(means(), adamw, config=config, transport=transport) as engine:
            found = engine.eval_batch(iter(masked(0)) if engine.reads else None, outputs=True)
            return found.loss, found.outputs

    (loss, outputs), *others = LocalWorld(4, 3).run(main)
    torch.testing.assert_close(outputs, expected, rtol=1e-4, atol=1e-5)
    plain = [
        axrt.cross_entropy(made, of) for made, (_, of) in zip(expected, masked(0), strict=True)
    ]
    assert loss == pytest.approx(float(sum(plain)) / MICROBATCHES, rel=1e-5)
    assert all(other == (loss, []) for other in others)


@pytest.mark.parametrize("members", [1, 2, 4])
def test_the_loss_of_logits_in_parts_is_that_of_whole_ones(members: int) -> None:
    """Also of logits that are large, or minus infinity, as a mask makes them."""
    made = torch.Generator().manual_seed(1)
    whole = (20 * torch.randn(3, 5, VOCAB, generator=made)).requires_grad_()
    targets = torch.randint(VOCAB, (3, 5), generator=made)
    targets[0, 1:3] = -100
    with torch.no_grad():
        whole[1, 1, : VOCAB // max(members, 2)] = -torch.inf
        targets[1, 1] = VOCAB - 1
        whole[2] += 100
    (expected,) = torch.autograd.grad(axrt.cross_entropy(whole, targets), whole)
    parts = [part.detach().requires_grad_() for part in whole.chunk(members, -1)]
    teams = [Team(member, members) for member in range(members)]
    sent = [numbers_of(part, targets, team) for part, team in zip(parts, teams, strict=True)]
    numbers = torch.cat(sent, -2)
    for part, team, of in zip(parts, teams, expected.chunk(members, -1), strict=True):
        loss = axrt.cross_entropy(CutLogits(part, numbers, targets, team), targets)
        torch.testing.assert_close(loss, axrt.cross_entropy(whole, targets))
        (found,) = torch.autograd.grad(loss, part)
        torch.testing.assert_close(found / members, of)


class Ends(nn.Module):
    """A last layer that does something behind its matrix."""

    def __init__(self, behind: Callable[[Tensor], Tensor], vocab: int = VOCAB) -> None:
        super().__init__()
        self.out, self._behind = nn.Linear(WIDTH, vocab), behind

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self._behind(self.out(value))
        return made


class Gated(Ends):
    """It makes logits with another matrix."""

    def __init__(self) -> None:
        super().__init__(torch.sigmoid)
        self.logits = nn.Linear(WIDTH, VOCAB)

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.logits(value) * super().forward(value).mean(-1, keepdim=True)
        return made


class Counts(Ends):
    """It notes what logits it has made."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.register_buffer("mean", torch.zeros(()))
        self.mean: Tensor

    def forward(self, value: Tensor) -> Tensor:
        made = super().forward(value)
        self.mean.mul_(0.9).add_(made.detach().mean())
        return made


def ending(layer: axrt.LayerSpec) -> Callable[[], axrt.PipelineModule]:
    plan = {"0": "vocabulary", "1.out": "vocabulary"}
    return lambda: axrt.PipelineModule([LAYERS[0], layer], axrt.cross_entropy, tensor=plan)


def masked_first(logits: Tensor) -> Tensor:
    return torch.cat([torch.full_like(logits[..., :1], -1e4), logits[..., 1:]], -1)


@pytest.mark.parametrize(
    "layer",
    [
        axrt.LayerSpec(Ends, lambda made: made.log_softmax(-1)),
        axrt.LayerSpec(Ends, lambda made: made - made.amax(-1, keepdim=True)),
        axrt.LayerSpec(Ends, lambda made: made[..., : VOCAB - 5]),
        axrt.LayerSpec(Ends, lambda made: made - made.mean(-1, keepdim=True), 2**15),
        axrt.LayerSpec(Ends, lambda made: nn.functional.normalize(made, dim=-1), 2**15),
        axrt.LayerSpec(Ends, lambda made: nn.functional.layer_norm(made, made.shape[-1:]), 2**15),
        axrt.LayerSpec(Ends, masked_first),
        axrt.LayerSpec(Gated),
    ],
)
def test_a_layer_that_looks_at_all_logits_is_refused(layer: axrt.LayerSpec) -> None:
    with pytest.raises(ModelError, match="function of each of them by itself"):
        trained(ending(layer), masked, 1, 2, steps=1)


def test_a_layer_that_notes_its_logits_is_refused() -> None:
    with pytest.raises(ModelError, match="changes buffers"):
        trained(ending(axrt.LayerSpec(Counts)), masked, 1, 2, steps=1)


def test_a_layer_may_change_each_logit_by_itself() -> None:
    def capped() -> axrt.PipelineModule:
        return ending(axrt.LayerSpec(Ends, lambda made: 3 * torch.tanh(made / 3)))()

    def together(name: str, of_members: dict[int, Tensor]) -> Tensor:
        return torch.cat([of_members[member] for member in sorted(of_members)])

    found = trained(capped, masked, 2, 2, join=together)
    assert_close(found, plain_torch(capped, masked, 2))


def outside(step: int) -> list[Item]:
    return [(tokens, targets + VOCAB) for tokens, targets in masked(step)]


def unknown(step: int) -> list[Item]:
    return [(torch.full_like(tokens, -100), targets) for tokens, targets in masked(step)]


def of_options() -> axrt.PipelineModule:
    odd = axrt.LayerSpec(nn.Embedding, VOCAB, WIDTH, padding_idx=0, max_norm=2.0, sparse=True)
    return axrt.PipelineModule([odd, *LAYERS[1:]], axrt.cross_entropy, tensor=PLAN)


def features(step: int) -> list[Item]:
    return [(tokens, tokens.float()) for tokens, _ in masked(step)]


def shifted(logits: Any, targets: Tensor) -> Tensor:
    return axrt.cross_entropy(logits, targets.roll(1, -1))


class Weighted(nn.Module):
    """A loss with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Any, targets: Tensor) -> Tensor:
        return self.scale * axrt.cross_entropy(logits, targets)


def with_loss(loss_fn: Any) -> Callable[[], axrt.PipelineModule]:
    return lambda: axrt.PipelineModule(LAYERS, loss_fn, tensor={"3": "vocabulary"})


@pytest.mark.parametrize(
    ("model", "batches", "error", "text"),
    [
        (means, outside, ModelError, "from -36 to .*; expected 0 to 63"),
        (means, features, ModelError, "expected logits of shape .* whole numbers"),
        (
            with_loss(nn.functional.cross_entropy),
            masked,
            ModelError,
            r"expected axrt\.cross_entropy",
        ),
        (with_loss(shifted), masked, ModelError, "other targets than those of the microbatch"),
        (with_loss(Weighted()), masked, ConfigError, "the loss has weights"),
        (lambda: means(**{"2": "token", "2.linear": "vocabulary"}), masked, ConfigError, "'token'"),
        (lambda: means(loss="token"), masked, ConfigError, "which is not named"),
        (lambda: means(**{"2.linear": "vocabulary"}), masked, ConfigError, "of the last layer"),
        (lambda: means(**{"1.*.down": "vocabulary"}), masked, ConfigError, "both"),
        (lambda: means(**{"2.dropout": "vocabulary"}), masked, ConfigError, "or an nn.Embedding"),
        (of_options, masked, ConfigError, "with padding_idx, max_norm, sparse"),
        (means, unknown, ModelError, "from -100 to -100; expected 0 to 63"),
    ],
)
def test_what_would_be_wrong_is_refused(
    model: Callable[[], axrt.PipelineModule], batches: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        trained(model, batches, 1, 2, steps=1)


@pytest.mark.parametrize("then", [1, 4])
def test_any_degree_goes_on_from_any_other(then: int, tmp_path: Path) -> None:
    """Files do not know of teams: what is loaded and saved again is the same to the byte."""

    def run(members: int, begins: bool) -> list[float]:
        config = configured(MICROBATCHES, parallel={"tensor": members})

        def main(transport: Any) -> float:
            with axrt.initialize(means(), adamw, config=config, transport=transport) as engine:
                if begins:
                    engine.train_batch(iter(masked(0)) if engine.reads else None)
                    engine.save_checkpoint(tmp_path / "one")
                else:
                    engine.load_checkpoint(tmp_path / "one")
                    engine.save_checkpoint(tmp_path / "two")
                return engine.train_batch(iter(masked(1)) if engine.reads else None).loss

        return LocalWorld(members, 5).run(main)

    expected = run(2, begins=True)
    assert run(then, begins=False) == pytest.approx([expected[0]] * then, rel=1e-5)
    assert saved(tmp_path / "one") == saved(tmp_path / "two")
