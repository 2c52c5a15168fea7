"""Sources of randomness: a seed for each layer of each microbatch, whatever rank runs it and
when."""

# Torch's generator belongs to the user. While our tasks run it is borrowed: its state is put aside,
# set anew before every layer, and put back before any code of the user's runs between our calls.

import hashlib
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from axrt.device.device import generators

T = TypeVar("T")
_INITIALISATION = -1  # takes the place of the step


def seed_of(seed: int, step: int, microbatch: int, layer: int, member: int | None = None) -> int:
    """The seed of torch's generator before `layer` runs the forward of `microbatch` in `step`.

    Args:
        seed: run seed, `[run] seed`, 0 <= seed < 2**63.
        step: number of the step, from 0.
        microbatch: index of the microbatch within the step, over all replicas: replica *
            microbatches + k.
        layer: index of the layer in the model, from 0.
        member: index of the member of a team that draws for itself; None: there is no team, or all
            members draw the same.
    Returns:
        A seed of 63 bits, the same on every machine.
    """
    numbers = (
        struct.pack("<4q", seed, step, microbatch, layer)
        if member is None
        else struct.pack("<5q", seed, step, microbatch, layer, member)
    )
    digest = hashlib.blake2b(numbers, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def initial_seed_of(seed: int, layer: int) -> int:
    """The seed of torch's generator while `layer` is built."""
    return seed_of(seed, _INITIALISATION, 0, layer)


class BorrowedGenerator:
    """Torch's own generators, ours while tasks run and the user's otherwise: the CPU's, and that of
    the accelerator where there is one.

    Args:
        seed: run seed from which the seeds of layers are derived, 0 <= seed < 2**63.
        device: device that tasks run on.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self.device = device
        self._generators = generators(device)
        self._users: list[torch.Tensor] | None = None

    # A seed is set before every layer. To leave it out for layers that drew nothing in the first
    # step was thought of: a layer that begins to draw later would then repeat another layer's
    # numbers.
    def before_layer(
        self, step: int, microbatch: int, layer: int, member: int | None = None
    ) -> None:
        """Seed the generators so that a layer's random numbers depend on these numbers alone.

        Args:
            step: number of the step, from 0.
            microbatch: index of the microbatch within the step, over all replicas.
            layer: index of the layer in the model.
            member: see `seed_of`.
        """
        # Through the generator itself: torch.manual_seed visits every device, at a hundred times
        # the cost.
        for generator in self._generators:
            generator.manual_seed(seed_of(self._seed, step, microbatch, layer, member))

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Context in which tasks run; afterwards the user's state is back."""
        self._users = self.states()
        try:
            yield
        finally:
            self.go_on_from(self._users)
            self._users = None

    def lent_back(self, draw: Callable[[], T]) -> T:
        """Run the user's code between tasks, with the user's own random state.

        Args:
            draw: function that runs the code.
        Returns:
            The result of `draw`.
        """
        if self._users is None:
            return draw()
        self.go_on_from(self._users)
        try:
            return draw()
        finally:
            self._users = self.states()

    def states(self) -> list[torch.Tensor]:
        """How far the generators have come, for `go_on_from`."""
        return [generator.get_state() for generator in self._generators]

    def go_on_from(self, states: list[torch.Tensor]) -> None:
        """Let the generators draw what they would have drawn then."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
