"""What may be in a payload."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from axrt.transport.payload import copied, detached, on


@pytest.mark.parametrize(
    "through",
    [copied, detached, lambda payload: on(torch.device("cpu"), payload)],
    ids=["copied", "detached", "on"],
)
def test_a_sparse_tensor_is_refused_wherever_payloads_go(through: Callable[[Any], Any]) -> None:
    with pytest.raises(
        TypeError, match="Tensor cannot travel between stages; expected dense tensors"
    ):
        through(torch.eye(2).to_sparse())
