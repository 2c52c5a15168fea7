"""Cross entropy and embeddings, also of a vocabulary that members of a team share out."""

# A member has the logits of its part of the vocabulary, for all tokens. What it takes to know the
# loss of a token is the logarithm of the sum of exponentials of each part, and the logit of the
# target from the member that has it: two float32 numbers a token and member, which are put together
# at a joint. Their gradients need no exchange, since that of a logit is its probability, less 1 for
# the target.

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from axrt.errors import ModelError
from axrt.runtime.losses import IGNORED

from .joints import Team


@dataclass(frozen=True, slots=True)
class CutLogits:
    """The logits of a microbatch as one member of a team has them; `cross_entropy` takes them in
    place of whole ones.

    Attributes:
        logits: of this member's part of the vocabulary, shape (..., tokens, part).
        numbers: what `numbers_of` has made on all members, one after the other, shape (..., members
            x tokens, 2).
        targets: tokens that the numbers are of.
        team: this member, and how many there are.
    """

    logits: Tensor
    numbers: Tensor
    targets: Tensor
    team: Team

    def losses(self, targets: Tensor) -> Tensor:
        """The loss of each token, float32, shape (..., tokens); 0 where the target is `IGNORED`.

        Args:
            targets: tokens, shape (..., tokens), int64.
        Raises:
            ModelError: they are not those of the microbatch.
        """
        self._check(targets)
        of_all = torch.stack(self.numbers.chunk(self.team.size, -2))
        sums, hit = _log_of_sum(of_all[..., 0], 0), of_all[..., 1].sum(0)
        counts = targets != IGNORED
        place, is_here = _places(self.logits.shape[-1], torch.where(counts, targets, 0), self.team)
        found = _Losses.apply(self.logits, sums - hit, sums, place, is_here, self.team.size)  # type: ignore[no-untyped-call]
        return torch.where(counts, found, 0.0)

    def _check(self, targets: Tensor) -> None:
        if targets is self.targets:
            return
        same = targets.shape == self.targets.shape
        if not same or not bool(((targets == self.targets) | (targets == IGNORED)).all()):
            raise ModelError(
                "the loss gives axrt.cross_entropy other targets than those of the microbatch, "
                "while members of a team share out the vocabulary; expected those that it is "
                f"given, or {IGNORED} in place of some"
            )


@torch.no_grad()
def numbers_of(logits: Tensor, targets: Tensor, team: Team) -> Tensor:
    """What other members need of this one's logits: the logarithm of their sum of exponentials, and
    the target's, or 0 where another member has that. Float32, shape (..., tokens, 2).

    Args:
        logits: of this member's part of the vocabulary, shape (..., tokens, part).
        targets: tokens, shape (..., tokens), int64.
    Raises:
        ModelError: a target is no token of the vocabulary; an accelerator asserts it.
    """
    known = torch.where(targets != IGNORED, targets, 0)
    place, is_here = _places(logits.shape[-1], known, team)
    wide = logits.float()
    hit = wide.gather(-1, place.unsqueeze(-1)).squeeze(-1)
    return torch.stack([_log_of_sum(wide, -1), torch.where(is_here, hit, 0.0)], -1)


# `torch.logsumexp` resizes what it writes to, which not every accelerator can.
def _log_of_sum(values: Tensor, dim: int) -> Tensor:
    """The logarithm of the sum of exponentials along a dimension."""
    most = values.amax(dim, keepdim=True).clamp_min(torch.finfo(values.dtype).min)
    return (values - most).exp().sum(dim).log() + most.squeeze(dim)


def looked_up(embedding: nn.Embedding, team: Team, tokens: Tensor) -> Tensor:
    """What a member's rows of an embedding make of tokens: features, and zeros for tokens whose
    rows another member has. The sum over members is what whole ones make.

    Raises:
        ModelError: one is no token of the vocabulary; an accelerator asserts it.
    """
    place, is_here = _places(embedding.num_embeddings, tokens, team)
    found = embedding(place)
    return torch.where(is_here.unsqueeze(-1), found, torch.zeros_like(found))


def _places(part: int, tokens: Tensor, team: Team) -> tuple[Tensor, Tensor]:
    """The place of each token in this member's part, 0 where it is not there; and whether it is
    there."""
    tokens, size = tokens.long(), part * team.size
    try:  # looked up in nothing, which refuses what is no token as torch does
        torch.zeros((), device=tokens.device).expand(size).gather(0, tokens.flatten())
    except RuntimeError as error:
        raise ModelError(
            f"tokens or targets from {int(tokens.min())} to {int(tokens.max())}; expected 0 to "
            f"{size - 1}, which the vocabulary has, and {IGNORED} for a target that does not count"
        ) from error
    place = tokens - team.member * part
    is_here = (place >= 0) & (place < part)
    return torch.where(is_here, place, 0), is_here


class _Losses(torch.autograd.Function):
    """Losses that are known, and their gradient. Each member has all of the loss, which counts as
    that of one of `members`, and its logits are in no other one: hence the factor."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        losses: Tensor,
        sums: Tensor,
        place: Tensor,
        is_here: Tensor,
        members: int,
    ) -> Tensor:
        ctx.save_for_backward(logits, sums, place, is_here)
        ctx.members = members
        return losses.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, sums, place, is_here = ctx.saved_tensors
        found = (logits.float() - sums.unsqueeze(-1)).exp_()
        hit = is_here.to(found.dtype).neg().unsqueeze(-1)
        found.scatter_add_(-1, place.unsqueeze(-1), hit)
        found *= (gradients * ctx.members).unsqueeze(-1)
        return found.to(logits.dtype), None, None, None, None, None


def cross_entropy(logits: Tensor | CutLogits, targets: Tensor) -> Tensor:
    """The mean loss over tokens, in nats a token, shape ().

    Args:
        logits: scores, shape (..., tokens, vocabulary).
        targets: tokens, shape (..., tokens), int64; -100 does not count.
    """
    if isinstance(logits, CutLogits):
        loss, number = masked_cross_entropy(logits, targets)
        return loss / number
    return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def masked_cross_entropy(logits: Tensor | CutLogits, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses of the targets that count, in nats, shape (), and their number.

    Args:
        logits: scores, shape (..., tokens, vocabulary).
        targets: tokens, shape (..., tokens), int64; -100 does not count.
    """
    number = (targets != IGNORED).sum()
    if isinstance(logits, CutLogits):
        return logits.losses(targets).sum(), number
    loss = functional.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return loss, number
