"""The state of a bucket that lives in scratch and comes to the device for its step: masters where
weights are narrow, and the optimizer's moments."""

#   fetch     scratch is copied to a slot
#   attach    masters and moments are views of the slot
#   let go    what the step has made is in the slot; masters and moments are hollow
#   store     the slot is copied to scratch
#   leave     the slot is free
#
# Where weights are in scratch as well, a step makes them in the slot, and they are stored with the
# state. From there they are brought to the device for residencies.
#
# State that steps on the host is attached where it lives, and copied nowhere.
#
# A *hollow* tensor has its shape and type and no memory: all of its elements are one nan, so who
# reads it by mistake sees that.
#
# Parameters and state stay the same tensor objects: `.data` is a view of the slot while the bucket
# steps, and hollow otherwise. So no step allocates, an optimizer needs not to know, and who reads
# too early sees nan. A small step on tiny parameters tells what an optimizer keeps (`probe.py`).
# State of other shapes stays on the device. Where gradients accumulate in a narrow type, the
# float32 gradient is made in the slot, and norms are taken of one parameter at a time before that.
#
# Copies are tasks of the brain on two queues, one a direction. On a device they are streams. A
# disk, or a bandwidth that is bound, holds up who calls, so there they are threads, and what a
# thread has launched on a device has run when its moment passes. `train_batch` ends with the last
# step, and the last stores go on beside the user's code, but where weights are in scratch. Whatever
# else looks at the state settles it first: evaluations, checkpoints, dropped steps, `close`.
# `present` of a route brings it for these, one bucket at a time.

from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from axrt.device.device import CPU
from axrt.errors import ModelError
from axrt.offload.arena import PAGE_BYTES, Stretch
from axrt.offload.memory import aligned
from axrt.offload.tier import HostTier
from axrt.scheduler.plural import plural

from .flat import FlatBuffer, Layout, by_key, hollow
from .masters import Masters
from .probe import Moments
from .scratch import named_faults
from .slots import Slots


class _Section(NamedTuple):
    """Flat memory of a slot that is copied as one."""

    layouts: Sequence[Layout]  # stretches in it, each of one type
    start: int  # offset from the slot's first byte
    stretch: Stretch | None  # where it lives in scratch; None where it has no bytes

    @property
    def num_bytes(self) -> int:
        """Size in scratch, and in a slot."""
        return self.stretch.num_bytes if self.stretch else 0

    @property
    def end(self) -> int:
        """Offset of what comes behind it in a slot."""
        return self.start + self.num_bytes

    def buffers(self, slot: Tensor) -> list[FlatBuffer]:
        """The stretches, in a slot."""
        return buffers_within(self.layouts, slot[self.start :])


class _SlotLayout(NamedTuple):
    """Where the state is in scratch."""

    masters: tuple[_Section, ...]  # masters, one section for each type of parameters
    moments: _Section  # moments
    # weights that layers compute with, where they are in scratch: a section for each type of
    # parameters, None where they are the masters
    weights: tuple[_Section | None, ...]

    @property
    def made_weights(self) -> list[_Section]:
        """The sections of weights that are not masters."""
        return [section for section in self.weights if section]

    @property
    def end(self) -> int:
        """Offset of what comes behind it in a slot."""
        return (*(self.moments, *self.made_weights),)[-1].end


class OffloadedState:
    """Masters and moments of a bucket, in scratch.

    Args:
        moments: type of each moment of a parameter, by key; None: the optimizer's state is not
            known before, and stays on the device.
        home: the tier of `slots`, if it is memory in which the optimizer steps; None: state comes
            to a slot for that.
    Attributes:
        foreseen: moments are known before the first step, so that they leave the device.
    """

    def __init__(
        self,
        slots: Slots,
        parameters: Sequence[nn.Parameter],
        masters: Masters,
        moments: Sequence[Moments] | None,
        gradient: Sequence[Layout],
        home: HostTier | None = None,
        names: Sequence[str] = (),
    ) -> None:
        of = (
            f"{plural(len(names), 'parameter')} from {names[0]} to {names[-1]}"
            if names
            else "parameters"
        )
        self._what = f"masters and optimizer state of {of}"
        self._home, self._at_home = home, False
        self._slots, self._parameters, self._masters = slots, list(parameters), masters
        self._keys = _by_type(moments or ())
        self.foreseen = moments is not None
        layouts = [
            Layout([parameters[place] for place in places], dtype)
            for (_, dtype), places in self._keys.items()
        ]
        self._layout = self._cut(masters, layouts)
        self._has_moments = False  # before the first step there are none
        self._has_weights = False  # in the slot
        self._gradient = gradient
        if home is None:
            slots.reserve(self._layout.end + pages_of(gradient))
        self._slot: Tensor | None = None

    def _cut(self, masters: Masters, moments: Sequence[Layout]) -> _SlotLayout:
        end, sections = 0, []
        of_weights = masters.layouts_of_weights if masters.in_scratch else ()
        for purpose, layouts in (
            *(("masters", [layout]) for layout in masters.layouts),
            ("moments", moments),
            *(("weights", [layout]) for layout in of_weights if layout),
        ):
            sections.append(self._section(layouts, end, purpose))
            end = sections[-1].end
        given, types = iter(sections), len(masters.layouts)
        of_masters, of_moments = tuple(islice(given, types)), next(given)
        return _SlotLayout(
            of_masters, of_moments, tuple(next(given) if of else None for of in of_weights)
        )

    def _section(self, layouts: Sequence[Layout], start: int, purpose: str) -> _Section:
        num_bytes = pages_of(layouts)
        stretch = self._slots.tier.cut(num_bytes, purpose) if num_bytes else None
        return _Section(layouts, start, stretch)

    # Copies. They may run on other threads, one a direction.

    def begin(self) -> None:
        """Take a slot without anything in it, for state that is not in scratch yet."""
        self._at_home, self._has_weights = self._home is not None, False
        self._slot = None if self._at_home else self._slots.take()

    def fetch(self) -> None:
        """Take a slot and copy the state there.

        Raises:
            ScratchError: the disk has not done what it was asked for.
        """
        self.begin()
        with named_faults(self._what):
            for stretch, memory in self._copied():
                self._slots.tier.read(stretch, memory)

    def store(self) -> None:
        """Copy the state from the slot to scratch."""
        with named_faults(self._what):
            for stretch, memory in self._copied(self._has_weights):
                self._slots.tier.write(stretch, memory)

    def note_weights(self) -> None:
        """Note that masters have been published: weights that live in scratch are in the slot."""
        self._has_weights = True

    def bring(self, memory: Sequence[Tensor]) -> None:
        """Copy weights that live in scratch to the device, while no slot is needed for that.

        Args:
            memory: where they go, a stretch for each type of parameters.
        Raises:
            ScratchError: the disk has not done what it was asked for.
        """
        layout = self._layout
        with named_faults(self._what):
            for weights, masters, into in zip(layout.weights, layout.masters, memory, strict=True):
                section = weights or masters
                if section.stretch:
                    self._slots.tier.read(section.stretch, into.view(torch.uint8))

    def at_rest(self, state: Mapping[Tensor, Mapping[str, object]]) -> dict[int, Tensor]:
        """Masters and moments as they are in scratch, on the host, by the identity of what stands
        for each. Another thread may ask, while no step and no store begins.

        Args:
            state: the optimizer's state, by parameter.
        Raises:
            ScratchError: the disk has not done what it was asked for.
        """
        layout = self._layout
        memory = aligned(layout.end if self._home is None else 0, CPU)
        sections = [*layout.masters, *[layout.moments] * self._has_moments]
        with named_faults(self._what):
            for of in sections if self._home is None else ():
                if of.stretch:
                    self._slots.tier.read(of.stretch, memory[of.start : of.end])
        masters = [buffer for of in layout.masters for buffer in self._buffers_in(of, memory)]
        found = {id(master): view for master, view in self._masters.views_in(masters)}
        for entry, view in self._entries(state, self._buffers_in(layout.moments, memory)):
            if isinstance(entry, Tensor) and (entry.shape, entry.dtype) == (view.shape, view.dtype):
                found[id(entry)] = view
        return found

    def leave(self) -> None:
        """Give the slot back; its copy has ended."""
        if not self._at_home:
            self._slots.give(self.memory)
        self._slot, self._at_home = None, False

    @property
    def scratch_bytes(self) -> tuple[int, int, int]:
        """Bytes in scratch: of masters, of moments, and of weights."""
        masters = sum(of.num_bytes for of in self._layout.masters)
        weights = sum(of.num_bytes for of in self._layout.made_weights)
        return masters, self._layout.moments.num_bytes, weights

    @property
    def bytes_each_way(self) -> int:
        """Bytes that a fetch copies, and a store but for weights."""
        layout = self._layout
        return sum(of.num_bytes for of in layout.masters) + layout.moments.num_bytes

    def _copied(self, weights: bool = False) -> list[tuple[Stretch, Tensor]]:
        """What is copied between scratch and the slot, and where it is there."""
        if self._at_home:
            return []
        layout = self._layout
        sections = [*layout.masters, *[layout.moments] * self._has_moments]
        sections += layout.made_weights * weights
        return [(of.stretch, self.memory[of.start : of.end]) for of in sections if of.stretch]

    @property
    def memory(self) -> Tensor:
        """The slot that the bucket has, uint8."""
        assert self._slot is not None, "the state of a bucket is used while it is in scratch"
        return self._slot

    # Views.

    @property
    def present(self) -> bool:
        """The bucket has a slot, or steps where its state lives."""
        return self._slot is not None or self._at_home

    def attach(self, state: Mapping[Tensor, Mapping[str, object]]) -> None:
        """Let masters and moments be what is in the slot.

        Args:
            state: the optimizer's state, by parameter.
        """
        layout = self._layout
        masters = [buffer for of in layout.masters for buffer in self._buffers(of)]
        self._masters.move_to(
            masters, [buffer.flat for of in layout.made_weights for buffer in self._buffers(of)]
        )
        for moment, view in self._both(state):
            moment.data = view

    def _buffers(self, section: _Section) -> list[FlatBuffer]:
        """The stretches of a section, in the slot or where they live."""
        if self._home is None or not self._at_home:
            return section.buffers(self.memory)
        return self._buffers_in(section, torch.empty(0, dtype=torch.uint8))

    def _buffers_in(self, section: _Section, memory: Tensor) -> list[FlatBuffer]:
        """The stretches of a section, where they live if that is memory in which the optimizer
        steps; else in a copy of a slot."""
        if self._home is None or section.stretch is None:
            return section.buffers(memory)
        return buffers_within(section.layouts, self._home.bytes_of(section.stretch))

    def gradient(self) -> list[FlatBuffer]:
        """Memory of the slot for the gradient of the step."""
        return buffers_within(self._gradient, self.memory[self._layout.end :])

    def let_moments_go(self, state: Mapping[Tensor, Mapping[str, object]]) -> None:
        """Put moments that the step has made elsewhere into the slot, or where they live, and let
        them be hollow.

        Args:
            state: the optimizer's state, by parameter.
        Raises:
            ModelError: two moments of the optimizer are one tensor.
        """
        found = self._both(state)
        if len({id(moment) for moment, _ in found}) < len(found):
            raise ModelError(
                "two entries of the optimizer's state are one tensor, which offloaded state cannot "
                "keep; expected tensors of their own, or memory.offload = 'none'"
            )
        for moment, view in found:
            if moment.data_ptr() != view.data_ptr():
                view.copy_(moment)
            moment.data = hollow(view)
        self._has_moments = self._has_moments or bool(found)

    def let_masters_go(self) -> None:
        """Let masters be hollow; their values are in the slot, or where they live."""
        self._masters.leave()

    def _both(self, state: Mapping[Tensor, Mapping[str, object]]) -> list[tuple[Tensor, Tensor]]:
        """Each moment that there is, with its view of the slot."""
        return [
            (moment, view)
            for moment, view in self._entries(state, self._buffers(self._layout.moments))
            if isinstance(moment, Tensor) and _fits(moment, view)
        ]

    def _entries(
        self, state: Mapping[Tensor, Mapping[str, object]], buffers: Sequence[FlatBuffer]
    ) -> list[tuple[object, Tensor]]:
        """Each entry of the state that should be a moment, with its view of a slot."""
        return [
            (state.get(self._parameters[place], {}).get(key), view)
            for ((key, _), places), buffer in zip(self._keys.items(), buffers, strict=True)
            for place, view in zip(places, buffer.views, strict=True)
        ]


def buffers_within(layouts: Sequence[Layout], memory: Tensor) -> list[FlatBuffer]:
    """Stretches one behind the other in some memory, uint8, each from a page on."""
    starts = [0, *accumulate(_page(layout.num_bytes) for layout in layouts)]
    return [
        FlatBuffer.within(layout, memory[start:])
        for layout, start in zip(layouts, starts, strict=False)
    ]


def pages_of(layouts: Sequence[Layout]) -> int:
    """The size of `buffers_within`, in bytes."""
    return sum(_page(layout.num_bytes) for layout in layouts)


def _page(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _by_type(moments: Sequence[Moments]) -> dict[tuple[str, torch.dtype], list[int]]:
    """The indices of the parameters that have a moment of that key and type."""
    known = [(key, dtype, place) for place, of in enumerate(moments) for key, dtype in of.items()]
    return {
        known[group[0]][:2]: [known[one][2] for one in group]
        for group in by_key((key, dtype) for key, dtype, _ in known)
    }


def _fits(moment: Tensor, view: Tensor) -> bool:
    return (
        moment.shape == view.shape and moment.dtype == view.dtype and moment.device == view.device
    )
