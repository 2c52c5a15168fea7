"""Where randomness comes from: a seed for each layer of each microbatch, whatever rank runs it and
when.

Torch's generator belongs to the user. While our tasks run it is borrowed: its state is put aside,
set anew before every layer, and put back before any code of the user's runs between our calls.
"""

import hashlib
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")
_INITIALISATION = -1  # takes the place of the step


def seed_of(seed: int, step: int, microbatch: int, layer: int) -> int:
    """The seed of torch's generator before `layer` runs the forward of `microbatch` in `step`.

    Args:
        seed: of the run, `[run] seed`.
        step: counted from 0.
        microbatch: within the step, counted over all replicas: replica * microbatches + k.
        layer: its place in the model.
    Returns:
        63 bits, the same on every machine.
    """
    digest = hashlib.blake2b(
        struct.pack("<4q", seed, step, microbatch, layer), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> 1


def initial_seed_of(seed: int, layer: int) -> int:
    """The seed of torch's generator while `layer` is built."""
    return seed_of(seed, _INITIALISATION, 0, layer)


class BorrowedGenerator:
    """Torch's own generators, ours while tasks run and the user's otherwise: the CPU's, and that of
    the GPU where there is one.

    Args:
        seed: of the run.
        device: where tasks run.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self.device = device
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._users: list[torch.Tensor] | None = None

    def before_layer(self, step: int, microbatch: int, layer: int) -> None:
        """Make what `layer` draws depend on these numbers alone."""
        # Through the generator itself: torch.manual_seed visits every device, at a hundred times
        # the cost.
        for generator in self._generators:
            generator.manual_seed(seed_of(self._seed, step, microbatch, layer))

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """While tasks run: afterwards the user's state is back."""
        self._users = self._states()
        try:
            yield
        finally:
            self._set(self._users)
            self._users = None

    def lent_back(self, draw: Callable[[], T]) -> T:
        """What code of the user's, run between tasks, returns; what it draws is drawn from the
        user's own state."""
        if self._users is None:
            return draw()
        self._set(self._users)
        try:
            return draw()
        finally:
            self._users = self._states()

    def _states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
