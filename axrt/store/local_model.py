"""The part of the model that a rank holds: its stages, and their parameters in buckets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from axrt.config import Memory
from axrt.device.device import CPU
from axrt.model.listed import ListedParameters
from axrt.model.precision import NarrowLayers, Place, place_of
from axrt.model.stage import Stage
from axrt.model.tensor_cuts import Parts
from axrt.model.virtual_members import VirtualMembers
from axrt.offload.tier import Tier
from axrt.scheduler.bucket import Copies
from axrt.scheduler.plural import plural
from axrt.store.bucket import Bucket
from axrt.store.flat import by_key, digest_of
from axrt.store.saved_piece import SavedPiece
from axrt.store.scratch_stash import ScratchStash
from axrt.store.slots import Slots

from .loss_scale import LossScale


class _Shown(NamedTuple):
    """A copy of a master that the user has been given."""

    copy: nn.Parameter  # the copy
    # digest of its values when they were the master's; a version would not tell what was
    # written through `.data`
    digest: int
    master: nn.Parameter  # master in the bucket
    bucket: Bucket  # bucket that has the master


@dataclass(frozen=True, slots=True)
class LocalModel:
    """The part of the model that a rank holds."""

    stages: dict[int, Stage | VirtualMembers]  # stages of this rank, by number
    buckets: dict[int, tuple[Bucket, ...]]  # buckets of each stage, by stage
    # pipe whose copy of a stage this is, by stage; numbered over all replicas
    pipes: dict[int, int]
    # layers in a narrow type (mixed precision); None: they are as they are
    narrow: NarrowLayers | None = None
    # scale of the losses of each step; None: they are as they are
    loss_scale: LossScale | None = None
    scratch: Tier | None = None  # tier in which masters and moments live; None: on the device
    # memory on the device to which they come; None where they live there
    slots: Slots | None = None
    # memory on the host for gradients of buckets that step there; None: none does
    host_slots: Slots | None = None
    # stashes of microbatches in scratch; None: they stay on the device
    stash: ScratchStash | None = None
    given: frozenset[int] = frozenset()  # indices of the layers that are the user's own modules
    # copies of masters that the user was given since the last call, where masters live in
    # scratch
    shown: list[_Shown] = field(default_factory=list)
    # parameters that the layers had when they were taken; None: of a part of the model
    listed: ListedParameters | None = None
    # what this member of a team has of the parameters that its members share out
    parts: Parts = field(default_factory=dict)

    def of_pipe(self, pipe: int) -> "LocalModel":
        """The stages and buckets that belong to one pipe."""
        mine = [stage for stage in self.stages if self.pipes[stage] == pipe]
        return LocalModel(
            {stage: self.stages[stage] for stage in mine},
            {stage: self.buckets[stage] for stage in mine},
            dict.fromkeys(mine, pipe),
            self.narrow,
            self.loss_scale,
            self.scratch,
            self.slots,
            self.host_slots,
            parts=self.parts,
        )

    @property
    def copies(self) -> dict[int, tuple[Copies, ...]]:
        """The copies of each bucket of a stage, by stage."""
        return {
            stage: tuple(bucket.copies for bucket in buckets)
            for stage, buckets in self.buckets.items()
        }

    @property
    def all_buckets(self) -> list[Bucket]:
        """The buckets of all stages."""
        return [bucket for buckets in self.buckets.values() for bucket in buckets]

    def notes(self, memory: Memory) -> list[str]:
        """What a person should know of offloaded state, in whole sentences."""
        notes = list(self.scratch.notes) if self.scratch else []
        notes += self.stash.notes if self.stash and not self.scratch else []
        if any(bucket.route.keeps_moments for bucket in self.all_buckets):
            notes.append(
                "The optimizer cannot be stepped on tiny parameters, so what it keeps stays on the "
                "device, and memory.offload takes masters alone."
            )
        most, has = memory.gathered, len(self.stages)
        if any(bucket.has_residencies for bucket in self.all_buckets) and has <= most:
            key = "memory.offload_parameters" if memory.offload_parameters else "memory.zero = 3"
            notes.append(
                f"{key} frees little: a rank has {plural(has, 'stage')}, and memory.gathered = "
                f"{most} may be whole at a time. Give it more schedule.chunks, with "
                "schedule.policy = 'breadth-first'."
            )
        gb = sum(bucket.route.bytes_each_way for bucket in self.all_buckets) / 1e9
        rate = memory.scratch_gb_s
        if rate and gb / rate >= 1.0:
            notes.append(
                f"memory.scratch_gb_s = {rate:g}: a step takes at least {gb / rate:.0f} s to copy "
                f"{gb:.2g} GB in each direction."
            )
        return notes

    @property
    def lr(self) -> float:
        """Learning rate of the first parameter group on this rank; nan where the rank has no
        parameters."""
        return next(
            (bucket.lr for bucket in self.all_buckets if bucket.lr is not None), float("nan")
        )

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters here as plain torch lists them; masters where weights are narrow
        and not in shards.

        A tied weight is listed once, by the name that the first of its layers gives it.
        """
        called = {
            id(p): (name, master)
            for bucket in self.all_buckets
            for name, (_, p), (_, master) in zip(
                bucket.called, bucket.named, bucket.trained, strict=True
            )
        }
        listed: dict[str, nn.Parameter] = {}
        for stage in self.stages.values():
            for _, parameter in stage.named_parameters():
                listed.setdefault(*called[id(parameter)])
        return list(listed.items())

    def full(self) -> Callable[[Tensor], Tensor]:
        """A function that gives, for a parameter or buffer of a layer, what stands for it in its
        full type: the master of a trained parameter, the original of another narrow tensor, or the
        tensor itself.

        What is written there counts when it is published. The values of masters count while their
        bucket is present; those of sharded masters never do.
        """
        if self.narrow is None and not self.has_masters:
            return lambda tensor: tensor
        wide: dict[Place, Tensor] = self.narrow.originals() if self.narrow else {}
        for bucket in self.all_buckets:
            for (_, parameter), master in zip(bucket.named, bucket.whole, strict=True):
                wide[place_of(parameter)] = master
        return lambda tensor: wide.get(place_of(tensor), tensor) if tensor.numel() else tensor

    # Copies of masters for `named_parameters`, where masters are offloaded: a parameter that brings
    # itself to memory when it is read would need a tensor subclass, which optimizers do not expect.
    def shown_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """`named_parameters` for the user: of masters that are elsewhere, copies on the CPU, the
        same ones until they are published. What is written to a copy counts then."""
        elsewhere = self.scratch and self.has_masters and not self.is_sharded
        for bucket in self.all_buckets if elsewhere and not self.shown else ():
            with bucket.route.present():
                for _, master in bucket.trained:
                    copy = nn.Parameter(master.detach().to("cpu", copy=True))
                    self.shown.append(_Shown(copy, digest_of(copy), master, bucket))
        shown = {of.master: of.copy for of in self.shown}
        return [(name, shown.get(master, master)) for name, master in self.named_parameters()]

    @property
    def has_masters(self) -> bool:
        """What is stepped is not what layers compute with, but for frozen parameters."""
        return self.narrow is not None or any(bucket.has_masters for bucket in self.all_buckets)

    @property
    def is_sharded(self) -> bool:
        """Each rank keeps a shard of the state (ZeRO)."""
        return any(bucket.shard for bucket in self.all_buckets)

    @property
    def is_in_parts(self) -> bool:
        """This rank has a part of some layers alone: a shard of their state, or what a member of a
        team has of them."""
        return self.is_sharded or bool(self.parts)

    def optimizers(self) -> dict[str, str]:
        """What tells the optimizer of each bucket, by the name of its first parameter."""
        return {of.named[0][0]: of.optimizer_told for of in self.all_buckets if of.named}

    def pieces_of(self, layer: nn.Module, with_state: bool = True) -> list[SavedPiece]:
        """What this rank keeps of a layer where state is sharded; see `BucketState.pieces_of`."""
        found: list[SavedPiece] = []
        for bucket in self.buckets_with(layer):
            with bucket.route.present():
                found += bucket.state.pieces_of(layer, with_state)
        return found

    def shapes_of(self, layer: nn.Module) -> dict[str, torch.Size]:
        """The shape of each parameter in the buckets of a layer, by name."""
        buckets = self.buckets_with(layer)
        return {name: one.shape for bucket in buckets for name, one in bucket.named}

    def buckets_with(self, layer: nn.Module) -> list[Bucket]:
        """The buckets with parameters of a layer here."""
        mine = set(layer.parameters())
        return [
            bucket
            for bucket in self.all_buckets
            if any(parameter in mine for _, parameter in bucket.named)
        ]

    def bucket_of(self) -> Callable[[Tensor], Bucket | None]:
        """A function that gives, for a tensor of a layer, the bucket that steps it; None for a
        buffer and for what is frozen."""
        places = {
            place_of(parameter): bucket
            for bucket in self.all_buckets
            for _, parameter in bucket.named
        }
        return lambda tensor: places.get(place_of(tensor))

    def note_given_out(self) -> None:
        """The user has been given parameters, see `Bucket.note_given_out`."""
        for bucket in self.all_buckets:
            bucket.note_given_out()

    def keep_memory(self) -> None:
        """Take what the user has done to weights between calls, see `Bucket.keep_memory`."""
        for bucket in self.all_buckets:
            bucket.keep_memory()

    def _copies_here(self) -> Iterator[list[Bucket]]:
        """The buckets of which this rank has several copies, that which is listed first: of tied
        layers, or of the same layers in two pipes."""
        buckets = self.all_buckets
        for places in by_key(bucket.copies for bucket in buckets):
            if len(places) > 1:
                yield [buckets[place] for place in places]

    # A write to a tied weight is carried on, and copies stay. One storage for all layers of a rank
    # was thought of: two stages step at different times, and a step of the one would have to wait
    # for the other. Copies are compared at the next call once the user has asked for parameters,
    # which costs nothing before.
    def reach_all_copies(self) -> None:
        """Have what the user has written to a weight between calls reach the copies beside it."""
        if self.scratch and self.has_masters:
            return  # he was given copies of masters, see `publish_masters`
        for first, *others in self._copies_here():
            for other in others if not first.has_residencies else ():
                for (_, mine), (_, its) in zip(first.trained, other.trained, strict=True):
                    # On an accelerator to look would be to wait for it.
                    if its.device != CPU or not torch.equal(mine, its):
                        with torch.no_grad():
                            its.copy_(mine)

    def publish_masters(self, given_out: bool) -> None:
        """Give layers what was written to masters, in the layers' type.

        Args:
            given_out: the user has masters, and may have written to one through `.data`, which
                changes no version. Then all are published.
        """
        for bucket in self.all_buckets if not self.scratch else ():
            if given_out and not bucket.shard:
                bucket.route.publish()
            else:
                bucket.publish_if_changed()
        beside = {id(first): others for first, *others in self._copies_here()}
        for copy, digest, master, bucket in self.shown:
            if digest_of(copy) == digest:
                continue
            (place,) = (n for n, (_, one) in enumerate(bucket.trained) if one is master)
            for one in (bucket, *beside.get(id(bucket), ())):
                with one.route.present(changes=True), torch.no_grad():
                    one.trained[place][1].copy_(copy)
        self.shown.clear()

    def publish(self) -> None:
        """Give layers what was written to masters and originals, in the layers' type."""
        self.publish_masters(given_out=False)
        if self.narrow is not None:
            self.narrow.publish()

    def stage_of(self, place: int) -> int:
        """The stage here that has a layer.

        Args:
            place: index of the layer in the model.
        """
        return next(number for number, of in self.stages.items() if str(place) in of.layers)

    def layers(self) -> Iterator[tuple[int, nn.Module]]:
        """Each layer with its index in the model."""
        for stage in self.stages.values():
            for place, layer in stage.layers.items():
                yield int(place), layer

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context with every module in evaluation mode, the loss too; afterwards each is in its
        former mode."""
        whole = [
            *(layer for _, layer in self.layers()),
            *(module for stage in self.stages.values() for module in stage.modules_run),
        ]
        modules = list(dict.fromkeys(module for one in whole for module in one.modules()))
        modes = [module.training for module in modules]
        for module in modules:
            module.training = False
        self._let_weights_change()
        try:
            yield
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode
            self._let_weights_change()

    def _let_weights_change(self) -> None:
        for stage in self.stages.values():
            if isinstance(stage, VirtualMembers):
                stage.let_weights_change()

    def release(self, failed: bool = False) -> None:
        """Give the user's own modules back as they were, with their new weights.

        Args:
            failed: True where offloaded masters may be out of reach, see `Bucket.release`.
        """
        for stage in self.stages.values():
            stage.release()
        for bucket in self.all_buckets:
            places = {int(name.partition(".")[0]) for name, _ in bucket.named}
            bucket.release(failed, wanted=bool(places & self.given))
        if self.narrow is not None:
            self.narrow.release()
        if failed:  # a thread may be at scratch
            return
        for of in (self.scratch, self.stash):
            if of is not None:
                of.close()

    def drop(self) -> None:
        """Forget every microbatch under way, and all gradients."""
        for stage in self.stages.values():
            stage.drop()
        if self.stash is not None:
            self.stash.drop()
        for bucket in self.all_buckets:
            bucket.leave_memory()
