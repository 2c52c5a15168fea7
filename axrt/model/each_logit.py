"""Checks that the last layer of a model takes each logit by itself, where its vocabulary is cut."""

# A softmax, a norm or a cut over the vocabulary would be over a member's part of it, and no shape
# would tell. So a few tokens are run once more, with as many logits as the whole vocabulary has in
# place of a part: moved by one, and with all of them changed but the first.

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from axrt.errors import ModelError
from axrt.transport.payload import flatten, unflatten

from .joints import Team, token_dim

_TOKENS = 2


@torch.no_grad()
def check_each_logit(logits: nn.Linear, team: Team, run: Callable[[Any], Any], inputs: Any) -> None:
    """Check that a layer returns the logits of one of its matrices, or a function of each of them
    alone.

    Args:
        run: function that runs the layer on inputs, with the same random numbers each time.
        inputs: payload that it is given, with some tokens at least.
    Raises:
        ModelError: it does not.
    """

    def whole(made: Tensor) -> Tensor:
        return torch.cat([made] * team.size, -1)

    def moved(made: Tensor) -> Tensor:
        return whole(made).roll(1, -1)

    def others(made: Tensor) -> Tensor:
        made = whole(made)
        made[..., 1:] = 3 * made[..., 1:] + 10
        return made

    plain, rolled, changed = (
        _ran_with(logits, change, lambda: run(_few_tokens(inputs)))
        for change in (whole, moved, others)
    )
    width = team.size * logits.out_features
    if not (
        isinstance(plain, Tensor)
        and plain.shape[-1:] == (width,)
        and _are_close(rolled, plain.roll(1, -1))
        and _are_close(changed[..., :1], plain[..., :1])
    ):
        raise ModelError(
            f"a matrix that is cut by 'vocabulary' makes {width} logits, and its layer returns no "
            "function of each of them by itself, such as a scale or a tanh; expected that, without "
            "a softmax, a norm or a cut over the vocabulary"
        )


def _few_tokens(inputs: Any) -> Any:
    skeleton, tensors = flatten(inputs)
    few = [
        one.narrow(token_dim(one), 0, min(_TOKENS, one.shape[token_dim(one)])).clone()
        for one in tensors
    ]
    return unflatten(skeleton, few)


def _are_close(found: Tensor, expected: Tensor) -> bool:
    """Equal but for what other kernels round: a function may take several elements at once."""
    found, expected = found.cpu(), expected.cpu()
    return torch.allclose(found, expected, rtol=1e-2, atol=1e-3, equal_nan=True)


def _ran_with(logits: nn.Linear, change: Callable[[Tensor], Tensor], run: Callable[[], Any]) -> Any:
    """What a layer returns where its logits are changed."""
    hook = logits.register_forward_hook(lambda _, given, made: change(made))
    try:
        return run()
    finally:
        hook.remove()
