"""The optimizer's state of a bucket, as checkpoints save and load it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .flat import flat_like
from .masters import Masters
from .matrix_optimizer import MatrixOptimizer, is_factor
from .routes import OnDevice
from .saved_piece import SavedPiece, copied_now, cut_state
from .state import ParameterState, kind_of, restore_state, saved_state


class BucketState:
    """The state of what is stepped here, by the names that parameters have in the whole model.

    Args:
        optimizer: optimizer that has the state; None: there is nothing to step.
        initial_groups: its parameter groups as they were made.
        named: the bucket's parameters, with their names.
        route: where the state lives; an attribute, too.
        has_shard: a shard of the bucket is stepped here, not all of it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        initial_groups: Sequence[dict[str, Any]],
        named: Sequence[tuple[str, nn.Parameter]],
        masters: Masters,
        route: OnDevice,
        device: torch.device,
        has_shard: bool,
    ) -> None:
        self._optimizer, self._initial_groups = optimizer, initial_groups
        self._named, self._masters, self.route = named, masters, route
        self._device, self._has_shard = device, has_shard
        names = [named[piece.place][0] for piece in masters.pieces]
        self._name_of = dict(zip(masters.parameters, names, strict=True))

    @property
    def stepped_by_name(self) -> dict[str, nn.Parameter]:
        """What the optimizer steps here, by the name of the parameter; a shard has one piece of
        each at most."""
        return {name: one for one, name in self._name_of.items()}

    @property
    def kinds(self) -> dict[str, str]:
        """How each parameter that is stepped here is stepped, by name, see `kind_of`."""
        return {
            self._name_of[parameter]: kind_of(self._optimizer, group)
            for group in getattr(self._optimizer, "param_groups", ())
            for parameter in group["params"]
        }

    def refresh(self) -> None:
        """Compute what is due for a later step, see `MatrixOptimizer.refresh`."""
        if isinstance(self._optimizer, MatrixOptimizer):
            self._optimizer.refresh()

    def saved(self) -> Iterator[tuple[str, ParameterState]]:
        """The name and the optimizer's state of each parameter: the live tensors, whose values
        count while the bucket is present.

        Raises:
            DataError: some of the state is neither a tensor nor a plain value.
        """
        self.refresh()  # or what is saved would depend on when that was done
        if self._optimizer is not None:
            yield from saved_state(self._optimizer, self._initial_groups, self._name_of)

    def pieces_of(
        self,
        layer: nn.Module,
        with_state: bool = True,
        copied: Callable[[Tensor], Tensor] = copied_now,
    ) -> list[SavedPiece]:
        """What this rank keeps of a layer's parameters, on the CPU.

        Args:
            with_state: False to leave the optimizer's state out.
            copied: function that gives the copy of a tensor, whose values count while the bucket
                is present.
        Raises:
            DataError: some of the state is neither a tensor nor a plain value.
        """
        wanted = set(layer.parameters())
        states = dict(self.saved()) if with_state else {}
        nothing = {name: ParameterState(kind) for name, kind in self.kinds.items()}
        return [
            SavedPiece.of(
                name,
                piece,
                one,
                self._masters.is_master(one),
                states.get(name) or nothing[name],
                copied,
            )
            for piece, (one, name) in zip(self._masters.pieces, self._name_of.items(), strict=True)
            if self._named[piece.place][1] in wanted
        ]

    def tensors_for(self, states: Mapping[str, ParameterState]) -> dict[str, ParameterState]:
        """States to be filled for `restore`. Where the optimizer has its state on the device and
        whole, moments are the flat memory in which it will have them.

        Args:
            states: states whose tensors have no values, by the name of the parameter.
        """
        found = {name: of.empty() for name, of in states.items()}
        if self.route.is_offloaded or self._has_shard:
            return found
        moments: dict[str, dict[str, Tensor]] = {}  # parameters by name, by key of a moment of each
        for parameter, name in self._name_of.items():
            for key, value in found[name].tensors.items() if name in found else ():
                if value.shape == parameter.shape and not is_factor(key):
                    moments.setdefault(key, {})[name] = parameter
        for key, of in moments.items():
            types = [found[name].tensors[key].dtype for name in of]
            for name, view in zip(of, flat_like([*of.values()], types, self._device), strict=True):
                found[name].tensors[key] = view
        return found

    def restore(self, states: Mapping[str, ParameterState]) -> None:
        """Make saved states the optimizer's own, while the bucket is present.

        Args:
            states: states, by the name of the parameter; a parameter without one begins anew.
        """
        pieces = zip(self._name_of.values(), self._masters.pieces, strict=True)
        self.restore_own(
            {
                name: cut_state(states[name], piece, self._masters.whole[piece.place].shape)
                for name, piece in pieces
                if name in states
            }
        )

    def restore_own(self, states: Mapping[str, ParameterState]) -> None:
        """Make states of what is stepped here, of pieces where there are shards, the optimizer's
        own.

        Args:
            states: states, by the name of the parameter; one without begins anew.
        """
        if self._optimizer is not None:
            with self.route.present(changes=True):
                restore_state(self._optimizer, self._initial_groups, self._name_of, states)
            self.route.make_moments_flat(anew=True)
