"""The weights of a bucket in two types (mixed precision): float32 *masters*, which the optimizer
steps, and narrow copies of them, which layers compute with."""

# A parameter of a module becomes the narrow copy and stays the same object, with its hooks. Its
# master is a parameter of its own. A parameter that is not narrow is its own master.
#
# Where state is sharded there are masters of the pieces in this rank's shard alone, and pieces of a
# parameter that is not narrow are views of it.
#
# Where weights are whole for residencies alone (`scheduler/residencies.py`), what layers compute
# with has memory for a residency. The shard's weights, or all where there are no shards, have
# memory of their own, or are in scratch. Then parameters that are not narrow have masters as well,
# of their own type, which are those weights.
#
# Masters are in flat float32 memory of the same layout: after a step one copy a bucket gives layers
# the new values. `Gradient` knows two lists, the parameters that backwards add to and those that
# are stepped.
#
# What backwards add to, and where the total of all microbatches and copies is:
#
# - float32 weights: the parameter; the total is where they have added up.
# - Narrow weights, gradients in float32: the master, by a hook on the parameter (`accumulator.py`);
#   the total is where they have added up.
# - Narrow weights and narrow gradients: the narrow parameter; the total has float32 memory, made
#   when it is needed.

from collections.abc import Iterator, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from axrt.device.device import CPU
from axrt.errors import ModelError

from .flat import FlatBuffer, Layout, adopt, are_nan, by_key, fingerprint, hollow
from .master_group import MasterGroup, master_group, shards_of
from .shards import Cut, Piece
from .whole_weights import WRITTEN_TO, WholeWeights, share_memory


# The module's parameter is the narrow one, and the master is new. The other way round, hooks of the
# user's and weight gradients that wait would hang on what no backward reaches.
class Masters:
    """The parameters that the optimizer steps, and the memory of both types.

    Args:
        narrow: type that each is to have on the device; None: it stays as it is.
        cut: shards of the bucket; None: this rank steps all of it.
        narrowest: narrowest type of any copy's parameters, by which all cut alike; None: that of
            these.
        apart: True if steps are on the host and `device` is an accelerator: then masters are on the
            host, and parameters that are not narrow have some as well, of their own type.
        in_scratch: True if weights are in scratch, and whole for residencies alone.
    Attributes:
        parameters: what the optimizer steps: a parameter for each of them, or for each piece.
        pieces: for each of `parameters` what it is of those that are given.
        whole: a parameter of the shape of each of those that are given, on their device and in the
            type that is stepped. It is what is stepped where that is all of it, but for parameters
            in their own type that are whole for residencies alone. Else it is the parameter itself,
            or hollow where weights are narrow; so it is where masters are on the host.
        on_device: for each of `parameters` what has its gradient on the device: itself, or where
            masters are on the host `whole`, or one without memory for each piece.
        shown: what an optimizer's factory is given for each: what is stepped where that is all of
            it, else the same as `whole`.
        groups: indices of the parameters that share flat memory.
        has_residencies: weights are whole for residencies alone.
        whole_weights: their memory from one residency to the next.
        apart, in_scratch: see above.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        narrow: Sequence[torch.dtype | None],
        device: torch.device,
        cut: Cut | None = None,
        narrowest: torch.dtype | None = None,
        apart: bool = False,
        in_scratch: bool = False,
    ) -> None:
        self.apart, self.in_scratch = apart, in_scratch
        self._given, self.whole = list(parameters), list(parameters)
        self._narrow: list[MasterGroup] = []
        self._cut, self._narrowest, self._device = cut, narrowest, device
        self.has_residencies = in_scratch or (cut is not None and cut.has_residencies)
        self._shards: list[list[Tensor]] = []  # of the weights, in each group's memory
        # memory of parameters that are stepped in place, where there are shards
        self._in_place: list[tuple[list[nn.Parameter], FlatBuffer] | None] = []
        both = zip(parameters, narrow, strict=True)
        self.groups = by_key([(parameter.dtype, to) for parameter, to in both])
        stepped: list[tuple[Piece, nn.Parameter]] = []
        for group in self.groups:
            of_type, to = [parameters[place] for place in group], narrow[group[0]]
            stepped += [
                (piece._replace(place=group[piece.place]), parameter)
                for piece, parameter in self._take(of_type, to, cut and cut.of_type(group))
            ]
            for place, master in zip(group, self._whole_of(of_type, to), strict=True):
                self.whole[place] = master
        stepped.sort(key=lambda one: one[0].place)
        self.shown = list(self.whole)
        for piece, parameter in stepped:
            if piece.is_whole:
                self.shown[piece.place] = parameter
            has_own = self.has_residencies and narrow[piece.place] is None
            if piece.is_whole and not has_own and not apart:
                self.whole[piece.place] = parameter
        self.pieces = [piece for piece, _ in stepped]
        self.parameters = [parameter for _, parameter in stepped]
        self.on_device = self._on_device()
        self._published, self._untouched = self._versions(), self._narrow_versions()
        self.whole_weights = WholeWeights(
            self._narrow, self._shards, device, in_scratch, self.has_residencies
        )
        self._masters = {id(master) for group in self._narrow for master in group.masters}
        self._have_moved = False
        # fingerprints of the weights that the user has been given, by group; () where he was not
        self._given_out: list[Tensor] = []

    # Masters on the host are parameters of their own. One parameter whose memory moves from the
    # device to the host and back was tried: torch refuses that for devices of other backends.
    def _on_device(self) -> list[nn.Parameter]:
        if not self.apart:
            return self.parameters
        if self._cut is None:
            return self.whole
        hollows = [hollow(one.detach(), device=self._device) for one in self.parameters]
        return [nn.Parameter(one) for one in hollows]

    def _take(
        self, parameters: list[nn.Parameter], to: torch.dtype | None, cut: Cut | None
    ) -> Iterator[tuple[Piece, nn.Parameter]]:
        """Put parameters of one type into flat memory, and give what is stepped of each."""
        device, narrowest = self._device, self._narrowest
        pieces = cut.pieces(Layout(parameters, narrowest=narrowest)) if cut else _all(parameters)
        if to is not None or self.has_residencies or self.apart:
            of_masters = CPU if self.apart else device
            made = master_group(parameters, to, device, of_masters, cut, pieces, narrowest)
            if self.has_residencies:
                made.away = [hollow(parameter.data) for parameter in parameters]
                assert made.mine is not None
                own = made.wide if to is None and not self.apart else None
                made.mine = own.flat if own else made.mine.clone()
            self._narrow.append(made)
            self._shards.append(shards_of(made.narrow, cut))
            self._in_place.append(None)
            yield from zip(pieces, made.masters, strict=True)
        elif cut is None:
            adopt(parameters, device)
            yield from zip(pieces, parameters, strict=True)
        else:
            memory = FlatBuffer(parameters, device, narrowest=narrowest)
            memory.adopt(parameters)
            self._shards.append(shards_of(memory, cut))
            self._in_place.append((parameters, memory))
            for piece in pieces:
                yield piece, _stepped_in_place(parameters[piece.place], piece)

    def _whole_of(
        self, parameters: list[nn.Parameter], to: torch.dtype | None
    ) -> list[nn.Parameter]:
        if to is None:
            return parameters
        is_elsewhere = self._cut is not None or self.apart
        if is_elsewhere:
            return [_hollow_master(one) for one in parameters]
        return self._narrow[-1].masters

    def weights(self, shard: int) -> tuple[Tensor, ...]:
        """The weights of a shard as layers have them, one stretch for each type of parameters."""
        return tuple([shards[shard] for shards in self._shards])

    @property
    def _own(self) -> int:
        """The index of the own shard."""
        return self._cut.mine if self._cut else 0

    # A copy of float32 weights is sent where state is sharded. Lending them was tried: what the
    # user wrote to them after a step was applied twice on some ranks.
    def weights_to_send(self) -> tuple[Tensor, ...]:
        """The weights of the own shard; copies of those that the user or a layer may write to, or
        that a residency may let go, while they are sent."""
        if self.in_scratch:
            return tuple([own.clone() for own in self.weights(self._own)])
        if self.has_residencies:
            return tuple([group.mine for group in self._narrow if group.mine is not None])
        return tuple(
            [
                own if in_place is None else own.clone()
                for own, in_place in zip(self.weights(self._own), self._in_place, strict=True)
            ]
        )

    def keep_memory(self) -> None:
        """Let parameters of which pieces are stepped be in their flat memory again, with the values
        that they have, where the user has given them other memory (`p.data = ...`).

        Raises:
            ModelError: somebody has written to a narrow parameter, or to one that is whole for
                residencies alone.
        """
        self._check_narrow()
        was, self._given_out = self._given_out, []
        now = [fingerprint(group.narrow.flat) for group in self._narrow[: len(was)]]
        if any(bool(one.ne(other).any()) for one, other in zip(now, was, strict=True)):
            self._refuse_written()
        for group in self._narrow if self.has_residencies else ():
            of_both = zip(group.parameters, group.away, strict=True)
            given = [one for one, away in of_both if not share_memory(one, away)]
            if given or not are_nan(group.away):
                shapes = [tuple(one.shape) for one in given or group.parameters]
                raise ModelError(
                    f"a parameter was given other values between two calls, while its weights were "
                    f"elsewhere, one of shape {' or '.join(map(str, shapes))}; expected a "
                    "checkpoint with those values, or memory.zero = 2 instead of 3 and no "
                    "memory.offload_parameters"
                )
        for in_place in self._in_place:
            for parameter, view in zip(*_pairs(in_place), strict=True):
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter.detach())
                    parameter.data = view

    @property
    def layouts(self) -> list[Layout]:
        """The layout of the memory of the masters, one for each type of parameters."""
        return [group.layout for group in self._narrow]

    def is_master(self, parameter: nn.Parameter) -> bool:
        """The parameter is the master of a narrow one."""
        return id(parameter) in self._masters

    def move_to(self, buffers: Sequence[FlatBuffer], weights: Sequence[Tensor] = ()) -> None:
        """Let masters be what is in other memory of their layouts; masters that are here move
        there with their values.

        Args:
            buffers: memory of the masters, one stretch for each type of parameters.
            weights: memory of the own shard's weights for each type of which they are not the
                masters, where they are in scratch.
        """
        given = iter(weights)
        for group, buffer in zip(self._narrow, buffers, strict=True):
            self._have_moved = True
            if group.wide is not None:
                buffer.flat.copy_(group.wide.flat)
            if self.in_scratch:
                before, group.mine = group.mine, next(given) if group.is_narrow else buffer.flat
                if before is not None and group.is_narrow:
                    group.mine.copy_(before)
            group.wide = buffer
            for master, view in zip(group.masters, buffer.views, strict=True):
                master.data = view

    def has_masters_of(self, place: int) -> bool:
        """A given parameter has a master of its own, or one for each piece."""
        mine = self._given[place]
        return any(mine is one for group in self._narrow for one in group.parameters)

    def views_in(self, buffers: Sequence[FlatBuffer]) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each master with its view of other memory of their layouts, a stretch for each type of
        parameters."""
        for group, buffer in zip(self._narrow, buffers, strict=True):
            yield from zip(group.masters, buffer.views, strict=True)

    def leave(self) -> None:
        """Let masters be hollow: their values are elsewhere."""
        for group in self._narrow:
            for master in group.masters if group.wide is not None else ():
                master.data = hollow(master)
            group.wide = None
            if self.in_scratch:
                group.mine = None

    @property
    def layouts_of_weights(self) -> list[Layout | None]:
        """The layout of the own shard's weights in scratch, one for each type of parameters; None
        where they are the masters."""
        return [
            Layout([shards[self._own].to("meta")]) if group.is_narrow else None
            for group, shards in zip(self._narrow, self._shards, strict=True)
        ]

    def publish(self, launches: bool = False) -> None:
        """Give layers the weights that the masters have, which are here.

        Args:
            launches: True to launch copies from the host to an accelerator alone, where somebody
                hears of their end.
        Raises:
            ModelError: somebody has written to a narrow parameter, which would be undone.
        """
        self._check_narrow()
        for group in self._narrow:
            assert group.wide is not None, "masters are published while they are elsewhere"
            for master, view in zip(group.masters, group.wide.views, strict=True):
                if master.data_ptr() != view.data_ptr():  # somebody has put another tensor there
                    view.copy_(master.detach())
                    master.data = view
            if group.mine is not None and group.mine is not group.wide.flat:
                group.mine.copy_(group.wide.flat, non_blocking=launches)
        self._published = self._versions()

    def take_whole(self, place: int, value: Tensor) -> None:
        """Let a parameter have a value, and the master of its piece here, if there is one.

        Args:
            place: index of the parameter.
        """
        given = self._given[place]
        if not self.has_residencies:
            given.data.copy_(value)  # `.data`: it is no change by a layer or by the user
        for piece, stepped in zip(self.pieces, self.parameters, strict=True):
            if piece.place == place and stepped is not given and self.is_master(stepped):
                stepped.detach().copy_(piece.of(value))

    def _check_narrow(self) -> None:
        if self._narrow_versions() != self._untouched:
            self._refuse_written()

    def _refuse_written(self) -> NoReturn:
        if self.has_residencies:
            raise ModelError(WRITTEN_TO)
        instead = (
            "no changes of them with memory.zero"
            if self._cut
            else "changes of engine.named_parameters() alone"
        )
        is_narrow = any(group.is_narrow for group in self._narrow)
        other = "precision.weights = 'float32'" if is_narrow else "memory.offload = 'stream'"
        raise ModelError(
            "a weight that layers compute with was changed beside the optimizer, by a layer or by "
            f"the user, and its master was not; expected {instead}, or {other}"
        )

    def have_changed(self) -> bool:
        """A master was written to since `publish`, by somebody who has not published it; what is
        written through `.data` is not seen."""
        return self._versions() != self._published

    def note_given_out(self) -> None:
        """The user has been given the weights of layers, whose masters are elsewhere. What he then
        writes through `.data` changes no version, and is looked for at the next call."""
        if self._cut and not self.has_residencies:
            self._given_out = [fingerprint(group.narrow.flat) for group in self._narrow]

    def give_back(self) -> None:
        """Give the modules' parameters the type that they had, with the weights of the masters, or
        with their own where masters are elsewhere. Masters are the same tensors then, or copies on
        the host."""
        for group in self._narrow:
            if (
                self.has_residencies and self._cut
            ):  # whoever wants values has them from the other ranks
                for parameter in group.parameters:
                    parameter.grad, parameter.data = None, hollow(parameter.data, group.before)
                continue
            # Where there are shards, whoever wants all masters has them from the other ranks.
            are_here = group.wide is not None and self._cut is None
            found = group.masters if are_here else group.parameters
            for parameter, weights in zip(group.parameters, found, strict=True):
                parameter.grad = None  # of the narrow type
                # A copy where the memory of masters is a slot, which others use.
                parameter.data = weights.detach().to(
                    self._device, group.before, copy=self._have_moved
                )
            if self._cut is None:
                for parameter, master in zip(group.parameters, group.masters, strict=True):
                    master.data = parameter.data.to(master.device)
        # The flat memory goes now, so a rank never has all weights in both types.
        self._forget()

    def give_nothing_back(self) -> None:
        """Let the modules' parameters have no values, where nobody else has the modules."""
        for group in self._narrow:
            for parameter in group.parameters:
                parameter.grad, parameter.data = None, hollow(parameter.data, group.before)
        self._forget()

    def _forget(self) -> None:
        self._narrow.clear()
        self._shards.clear()
        self._published, self._untouched = [], []

    def _narrow_versions(self) -> list[int]:
        return [parameter._version for group in self._narrow for parameter in group.parameters]

    def _versions(self) -> list[int]:
        return [master._version for group in self._narrow for master in group.masters]


def _all(parameters: Sequence[nn.Parameter]) -> list[Piece]:
    return [Piece(place, 0, one.numel(), True) for place, one in enumerate(parameters)]


def _pairs(
    in_place: tuple[list[nn.Parameter], FlatBuffer] | None,
) -> tuple[Sequence[nn.Parameter], Sequence[Tensor]]:
    return (in_place[0], in_place[1].views) if in_place else ((), ())


def _stepped_in_place(parameter: nn.Parameter, piece: Piece) -> nn.Parameter:
    if piece.is_whole:
        return parameter
    made = nn.Parameter(piece.of(parameter.detach()))
    made.__dict__.update(parameter.__dict__)
    return made


def _hollow_master(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(hollow(parameter.detach(), torch.float32))
    made.__dict__.update(parameter.__dict__)
    return made
