"""SOAP, beside Adam where both are one, and beside the rule written down once more in numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from axrt.store.soap import SoapAndAdamW

OPTIONS = {"lr": 0.1, "weight_decay": 0.03, "betas": (0.8, 0.9), "eps": 1e-8}
TIMES = {"refresh": 3, "lag": 2, "offset": 1}


def soap(weight: nn.Parameter, **options: Any) -> SoapAndAdamW:
    group = {"params": [weight], "blocks": (len(weight),), **OPTIONS, **TIMES, **options}
    return SoapAndAdamW([group])


def stepped(weight: torch.Tensor, gradients: list[torch.Tensor], **options: Any) -> torch.Tensor:
    parameter = nn.Parameter(weight.clone())
    optimizer = soap(parameter, **options)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def test_in_bases_that_are_the_axes_it_is_adam() -> None:
    """Gradients that are diagonal have the axes as eigenvectors, in any order and with any sign."""
    torch.manual_seed(1)
    begin, gradients = random(5, 5), [torch.diag(random(5)) for _ in range(14)]
    adam = nn.Parameter(begin.clone())
    optimizer = torch.optim.AdamW([adam], **OPTIONS)  # type: ignore[arg-type]
    for gradient in gradients:
        adam.grad = gradient.clone()
        optimizer.step()
    found = stepped(begin, gradients)
    torch.testing.assert_close(found, adam.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("times", [TIMES, {"refresh": 1, "lag": 1, "offset": 0}])
def test_it_turns_with_the_matrix(times: dict[str, int]) -> None:
    torch.manual_seed(2)
    begin, gradients = random(4, 4), [random(4, 4) for _ in range(12)]
    left, right = torch.linalg.qr(random(4, 4))[0], torch.linalg.qr(random(4, 4))[0]
    turned = stepped(left @ begin @ right, [left @ one @ right for one in gradients], **times)
    torch.testing.assert_close(turned, left @ stepped(begin, gradients, **times) @ right)


def by_numpy(weight: Any, gradients: list[Any], refresh: int, lag: int, offset: int) -> Any:
    """The rule once more, for square matrices, whose first factors have one basis of
    eigenvectors: those, then one power iteration at a refresh, which is
    used later."""
    (first, second), lr = OPTIONS["betas"], OPTIONS["lr"]  # type: ignore[misc]
    weight = weight.copy()
    average, squares = np.zeros_like(weight), np.zeros_like(weight)
    factors = [np.zeros((side, side)) for side in weight.shape]
    waiting: dict[int, list[Any]] = {}
    for step, gradient in enumerate(gradients):
        for factor, product in zip(
            factors, (gradient @ gradient.T, gradient.T @ gradient), strict=True
        ):
            factor += (1 - second) * (product - factor)  # type: ignore[has-type]
        if step == 0:
            bases = [np.linalg.eigh(factor)[1][:, ::-1] for factor in factors]
        bases = waiting.pop(step, bases)
        squares = second * squares + (1 - second) * (bases[0].T @ gradient @ bases[1]) ** 2  # type: ignore[has-type]
        average = first * average + (1 - first) * gradient  # type: ignore[has-type]
        root = np.sqrt(squares / (1 - second ** (step + 1))) + 1e-8  # type: ignore[has-type]
        change = bases[0] @ ((bases[0].T @ average @ bases[1]) / root) @ bases[1].T
        weight = weight * (1 - lr * 0.03) - lr * change / (1 - first ** (step + 1))  # type: ignore[has-type, operator]
        if step >= offset + refresh and (step - offset) % refresh == 0:
            for side in range(2):
                values = np.diag(bases[side].T @ factors[side] @ bases[side])
                order = np.argsort(-values, kind="stable")
                bases[side] = bases[side][:, order]
                squares = squares[order] if side == 0 else squares[:, order]
            waiting[step + lag] = [
                np.linalg.qr(f @ b)[0] for f, b in zip(factors, bases, strict=True)
            ]
    return weight


@pytest.mark.parametrize(("refresh", "lag", "offset"), [(3, 2, 1), (2, 1, 0), (1, 1, 0), (4, 3, 3)])
def test_it_is_the_rule_written_down_once_more(refresh: int, lag: int, offset: int) -> None:
    torch.manual_seed(3)
    begin, gradients = random(4, 4), [random(4, 4) for _ in range(13)]
    times = {"refresh": refresh, "lag": lag, "offset": offset}
    found = stepped(begin, gradients, **times)
    expected = by_numpy(begin.numpy(), [one.numpy() for one in gradients], **times)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6)


def test_bits_do_not_hang_on_when_a_refresh_was_computed() -> None:
    torch.manual_seed(4)
    begin, gradients = torch.randn(5, 3), [torch.randn(5, 3) for _ in range(11)]
    found = []
    for when in ("within steps", "at once", "one step later"):
        parameter = nn.Parameter(begin.clone())
        optimizer = soap(parameter)
        for number, gradient in enumerate(gradients):
            parameter.grad = gradient.clone()
            optimizer.step()
            if when == "at once" or (when == "one step later" and number % 2):
                optimizer.refresh()
        found.append(parameter.detach())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_matrices_that_are_fused_have_factors_of_their_own() -> None:
    torch.manual_seed(5)
    begin, gradients = random(5, 3), [random(5, 3) for _ in range(9)]
    found = stepped(begin, gradients, blocks=(3, 2))
    parts = [stepped(begin[of], [one[of] for one in gradients]) for of in (slice(3), slice(3, 5))]
    torch.testing.assert_close(found, torch.cat(parts), rtol=0, atol=1e-14)


def test_a_run_goes_on_that_refreshed_at_other_times() -> None:
    """What was computed for other settings is used at no wrong time."""
    torch.manual_seed(6)
    weight = nn.Parameter(random(4, 4))
    optimizer = soap(weight, refresh=4, lag=3, offset=0)
    for number in range(12):
        weight.grad = random(4, 4)
        optimizer.step()
        optimizer.refresh()
        if number == 5:
            optimizer.param_groups[0] |= {"refresh": 2, "lag": 1}
        state = optimizer.state[weight]
        assert not (number > 5 and number % 2 and any(key.endswith(".new") for key in state))
        for side in ("left", "right"):
            basis = state[f"{side}.0.basis"]
            torch.testing.assert_close(basis.T @ basis, torch.eye(4, dtype=torch.float64))
