"""What the parameters of a stage take on a rank: the classes that hold them in a run hold skeletons
here, and the sizes of their memory are read off.

So alignment, the cut into buckets and the rules of narrow types are those of a run.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from axrt.config import Config
from axrt.model.precision import Types, types_of, types_on_device
from axrt.scheduler.bucket import across, of_group
from axrt.scheduler.job import Job
from axrt.store.assign import BucketSpec, Share, buckets_of
from axrt.store.bucket import gradient_of
from axrt.store.bucket_settings import OptimizerFactory
from axrt.store.flat import FlatBuffer, Layout, by_key
from axrt.store.gradient import Gradient
from axrt.store.masters import Masters
from axrt.store.owners import CostsWhole, Owned, Owners, by_owner, owned_by, owners_of_stage
from axrt.store.probe import Moments, Probed
from axrt.store.shards import Cut, cut_of

from .skeleton import META, Skeletons, like

_MIB = 1024 * 1024
_EACH_SHARD = 16  # shards of more are as large as another one, to the alignment of their ends
_USUAL = -1  # stands for all pipes with no shard that is unlike most others
Probe = Callable[[BucketSpec, Sequence[nn.Parameter]], Probed]


@dataclass(frozen=True, slots=True)
class BucketBytes:
    """The sizes of a bucket's memory, in bytes."""

    weights: int  # weights that layers compute with
    masters: int  # float32 masters of those that are narrow
    in_place: int  # weights that the optimizer steps as they are
    gradients: int  # gradient over microbatches
    total: int  # gradient over copies, where that is memory of its own
    moments: tuple[int, ...] | None  # moments of the optimizer, by key and type; None: not known
    copies: int  # number of places that hold the bucket
    arriving: int  # what other copies send of their gradients for the shard that this one adds up
    # weights of the own shard in memory that is neither that of `weights` nor that of
    # `masters`; 0 where weights are always whole
    kept: int
    # weights of the own shard that are in scratch besides masters, of each type
    stored: tuple[int, ...]
    is_tied: bool  # some copies of it are on other stages
    factors: int  # what an optimizer keeps of whole matrices beside moments
    virtual_weights: int = 0  # copies that virtual members compute with
    virtual_gradients: int = 0  # gradients of theirs beside the bucket's


class StageBytes(NamedTuple):
    """The sizes of what a stage holds from step to step, in bytes."""

    buckets: tuple[BucketBytes, ...]  # its buckets
    frozen: int  # frozen parameters and buffers
    originals: int  # float32 values of those that are narrow


class _Named(NamedTuple):
    """A trained parameter of a stage without memory, and the narrow type that it gets, if any."""

    name: str
    parameter: nn.Parameter
    narrow: torch.dtype | None


class BucketSizes:
    """The sizes of buckets, found once for all that are alike: in stages, replicas and runs."""

    def __init__(self) -> None:
        self._of_kind: dict[tuple[object, ...], dict[int, BucketBytes]] = {}
        self._same: dict[BucketBytes, BucketBytes] = {}
        self._stages: dict[tuple[int, ...], StageBytes] = {}

    def of_kind(self, kind: tuple[object, ...]) -> dict[int, BucketBytes]:
        """The sizes of buckets of a kind that are known by now, by shard."""
        return self._of_kind.setdefault(kind, {})

    def one_of(self, found: BucketBytes) -> BucketBytes:
        """The object that stands for all of the same sizes, so that they are told by identity."""
        return self._same.setdefault(found, found)

    def stage_of(self, buckets: Iterable[BucketBytes], frozen: tuple[int, int]) -> StageBytes:
        """The object that stands for all stages with these buckets and frozen tensors."""
        made = StageBytes(tuple(buckets), *frozen)
        return self._stages.setdefault((*frozen, *map(id, made.buckets)), made)


class _Bucket(NamedTuple):
    """A bucket of a stage, on whatever pipe."""

    spec: BucketSpec  # parameters and their copies
    # narrow type that each parameter gets; None: it stays as it is
    narrow: list[torch.dtype | None]
    cut: Cut | None  # its shards, as the first pipe has them; None: there are none
    # near, groups: copies of a group of replicas, and groups
    near: int
    groups: int
    known: dict[int, BucketBytes]  # sizes of such buckets that are known by now, by shard


class StageParameters:
    """The parameters of a stage, on whatever pipe.

    Args:
        job: schedule that says where the model is cut.
        stage: index of the stage.
        factory: what makes the optimizer of a bucket.
        probe: function that says what is known of a bucket's optimizer, from its spec and what is
            stepped.
        sizes: sizes that are known by now.
    """

    def __init__(
        self,
        skeletons: Skeletons,
        config: Config,
        job: Job,
        stage: int,
        factory: OptimizerFactory,
        probe: Probe,
        sizes: BucketSizes,
    ) -> None:
        self._config, self._job, self._probe, self._sizes = config, job, probe, sizes
        self._factory = factory
        self._types = types = types_of(config.precision)
        self._cuts = skeletons.cuts
        places = range(job.cuts[stage], job.cuts[stage + 1])
        trained = list(_trained(skeletons, places, types))
        narrow = {name: to for name, _, to in trained}
        specs = buckets_of(
            skeletons.layers,
            job.cuts,
            stage,
            [(name, parameter) for name, parameter, _ in trained],
            job.pipes,
            config.memory.bucket_mb * _MIB,
            Share(*skeletons.cuts.team, skeletons.cuts.parts, job.shards),
        )
        shards = job.pipes_a_group if job.shards else 1
        named = [(name, one) for name, one, _ in trained]
        owners = owners_of_stage(factory, skeletons.layers, named, shards)
        # what each owner steps; () where each shard has as many elements
        self.owned: tuple[Owned, ...] = ()
        if owners and isinstance(factory, CostsWhole):
            self.owned = owned_by(factory, named, owners, shards)
        self._buckets = [self._bucket(spec, narrow, owners) for spec in specs]
        frozen = list(_frozen(skeletons, places, types))
        self._frozen = sum(size for size, _ in frozen), sum(size for _, size in frozen)
        self._of_pipe: dict[int, StageBytes] = {}
        # the pipes of a group whose shards are unlike those of most others
        self.apart = frozenset(_pipes_apart([bucket.cut for bucket in self._buckets]))

    def _bucket(
        self, found: BucketSpec, types: Mapping[str, torch.dtype | None], owners: Owners
    ) -> _Bucket:
        config, job = self._config, self._job
        spec, cut = by_owner(found, cut_of(config, job, 0, found.copies), owners)
        narrow = [types[name] for name, _ in spec.named]
        parameters = [parameter for _, parameter in spec.named]
        if cut:
            is_whole = cut.whole or not self._probe(spec, parameters).elementwise
            cut = cut._replace(whole=is_whole)
        stepped = [
            like(one, META, one.dtype if to is None else torch.float32)
            for one, to in zip(parameters, narrow, strict=True)
        ]
        known = self._probe(spec, [one for one in stepped if isinstance(one, nn.Parameter)])
        me = spec.copies[0]
        near = len(of_group(spec.copies, me, job.pipes_a_group))
        groups = len(across(spec.copies, me, job.pipes_a_group))
        kind = (
            tuple((tuple(one.shape), one.dtype, one.stride()) for one in parameters),
            tuple(narrow),
            known.moments is not None and tuple(tuple(of.items()) for of in known.moments),
            cut and cut._replace(shift=0),  # on the first pipe
            config.precision.gradients,
            self._types.weights,
            config.memory.offload,
            job.pipes_a_group,
            job.offloads_weights,
            near,
            groups,
            len(spec.copies),
            len({copy.stage for copy in spec.copies}) > 1,
            self._kept_of_each(list(zip(spec.called, stepped, strict=True))),
            self._of_virtual(spec),
        )
        return _Bucket(spec, narrow, cut, near, groups, self._sizes.of_kind(kind))

    def of_pipe(self, pipe: int) -> StageBytes:
        """The sizes of what the copy of a pipe holds."""
        like = _like_pipe(self._job, pipe, self.apart)
        if like not in self._of_pipe:
            buckets = [self._of(bucket, pipe) for bucket in self._buckets]
            self._of_pipe[like] = self._sizes.stage_of(buckets, self._frozen)
        return self._of_pipe[like]

    def _of(self, bucket: _Bucket, pipe: int) -> BucketBytes:
        shard = 0 if bucket.cut is None else _like(bucket.cut, bucket.cut.shard_of(pipe))
        if shard not in bucket.known:
            bucket.known[shard] = self._sizes.one_of(self._found(bucket, shard))
        return bucket.known[shard]

    def _found(self, bucket: _Bucket, shard: int) -> BucketBytes:
        spec, narrow, cut, near, groups, _ = bucket
        types, in_scratch = self._types, self._job.offloads_weights
        cut = cut and cut._replace(pipe=shard * cut.stride, shift=0)
        parameters = [parameter for _, parameter in spec.named]
        masters = Masters(parameters, narrow, META, cut, types.weights, in_scratch=in_scratch)
        in_float32 = self._config.precision.gradients == "float32"
        gradient = gradient_of(spec, masters, in_float32, META, types.weights, cut)
        gradient.open()
        gradient.show_total()  # which allocates it
        weights, stepped = num_bytes(parameters), masters.parameters
        beside = num_bytes([*parameters, *stepped])
        in_place = [one for one in stepped if not masters.is_master(one)]
        of_type = [
            [in_place[place] for place in of] for of in by_key(one.dtype for one in in_place)
        ]
        known = self._probe(spec, masters.shown)
        moments = known.moments and [known.moments[piece.place] for piece in masters.pieces]
        return BucketBytes(
            weights,
            beside - weights,
            sum(Layout(of).num_bytes for of in of_type),
            num_bytes(gradient.sums),
            num_bytes(gradient.own_totals),
            None if moments is None else tuple(_flat_moments(stepped, moments)),
            len(spec.copies),
            _arriving_bytes(gradient, cut, near, groups),
            _kept(masters, stepped, self._config.memory.offload != "none"),
            tuple(of.num_bytes for of in masters.layouts_of_weights if of) if in_scratch else (),
            len({copy.stage for copy in spec.copies}) > 1,
            self._factors(spec, masters),
            *self._of_virtual(spec),
        )

    def _factors(self, spec: BucketSpec, masters: Masters) -> int:
        stepped = [(spec.called[of.place], masters.whole[of.place]) for of in masters.pieces]
        return sum(self._kept_of_each(stepped))

    def _kept_of_each(self, named: Sequence[tuple[str, Tensor]]) -> tuple[int, ...]:
        """What the optimizer keeps of each parameter as a matrix."""
        factory = self._factory
        if not isinstance(factory, CostsWhole):
            return ()
        return tuple([factory.num_bytes(name, parameter) for name, parameter in named])

    def _of_virtual(self, spec: BucketSpec) -> tuple[int, int]:
        """Bytes of the weights that virtual members copy, and of the gradients, in float32 or
        wider, that they have beside the bucket's."""
        cuts, copied, added = self._cuts, 0, 0
        cut_layers = {name.partition(".")[0] for name in cuts.virtual_parts}
        for name, parameter in spec.named if cuts.virtual > 1 else ():
            part = cuts.virtual_parts.get(name)
            size = parameter.numel() * max(4, parameter.itemsize)
            if part is not None:  # a bias by rows is with the first one alone
                copied += parameter.nbytes * (part.dim is not None)
                added += size
            else:  # one gradient each, but for the first one of a layer that is the rank's own
                added += (cuts.virtual - (name.partition(".")[0] not in cut_layers)) * size
        return copied, added


def copies_apart(job: Job, stages: Sequence[StageParameters]) -> Iterator[tuple[int, int]]:
    """Replicas, and members there, among which is one like each that there is, as far as these
    stages say; those of replica 0 are."""
    if not job.shards:  # then all hold as much
        yield 0, 0
        return
    pipes, shards = job.pipes // job.replicas, job.pipes_a_group
    apart = frozenset[int]().union(*(of.apart for of in stages))
    yield from ((0, member) for member in range(job.team))
    usual = (pipe for pipe in range(pipes, shards) if pipe not in apart)
    each = range(shards) if shards <= _EACH_SHARD else (*apart, *islice(usual, 1))
    yield from ((pipe // pipes, pipe % job.team) for pipe in each)


def _like_pipe(job: Job, pipe: int, apart: Collection[int]) -> int:
    """What is equal for pipes that hold as much.

    Args:
        apart: pipes of a group that hold what no other one does.
    """
    shards = job.pipes_a_group if job.shards else 1
    of_group = pipe % shards
    return _USUAL if shards > _EACH_SHARD and of_group not in apart else of_group


def _pipes_apart(cuts: Iterable[Cut | None]) -> Iterator[int]:
    """The pipes of a group that have a shard of some bucket which is unlike most others."""
    for cut in cuts:
        if cut is None:
            continue
        for place in range(cut.shards) if cut.whole else (-cut.shift, -1 - cut.shift):
            first = place % cut.shards * cut.stride
            yield from range(first, first + cut.stride)


def _like(cut: Cut, shard: int) -> int:
    """A shard as large as this one, so that thousands of replicas are not each predicted."""
    if cut.whole or cut.shards <= _EACH_SHARD or shard in (0, cut.shards - 1):
        return shard
    return 1


def _kept(masters: Masters, stepped: Sequence[Tensor], offloads: bool) -> int:
    if not masters.has_residencies or masters.in_scratch:
        return 0
    elsewhere = () if offloads else stepped
    return num_bytes([*masters.weights_to_send(), *elsewhere]) - num_bytes(elsewhere)


def _arriving_bytes(gradient: Gradient, cut: Cut | None, near: int, groups: int) -> int:
    """Parts of the group's other copies, and subtotals of other groups."""
    if cut is None:
        part, shard = -(-num_bytes(gradient.sums) // near), num_bytes(gradient.totals) // near
    else:
        part = sum(part.nbytes for part in gradient.part(cut.mine, near))
        shard = sum(total.nbytes for total in gradient.totals)
    return (near - 1) * part + (groups - 1) * shard // groups


def _flat_moments(stepped: Sequence[nn.Parameter], moments: Sequence[Moments]) -> Iterator[int]:
    """The sizes of the flat memory of each moment, as a bucket lays it out."""
    listed = [
        ((key, dtype), parameter)
        for parameter, of_one in zip(stepped, moments, strict=True)
        for key, dtype in of_one.items()
    ]
    for group in by_key(which for which, _ in listed):
        (_, dtype), _ = listed[group[0]]
        of_key = [listed[place][1].to(dtype) for place in group]
        yield FlatBuffer(of_key, META).num_bytes


def _tensors(
    skeletons: Skeletons, places: Iterable[int], types: Types
) -> Iterator[tuple[str, Tensor, torch.dtype | None]]:
    """Each parameter and buffer of a stage once, with its name and the type that it gets; None: it
    stays as it is. Parameters come first, in model order."""
    seen: set[tuple[int, int]] = set()
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        for place in places:
            layer, is_built = skeletons.layer(place), len(skeletons.key_of(place)) > 1
            to = types_on_device(layer, types)
            for name, tensor in of(layer):
                # built layers share a skeleton, and no tensors
                key = (place if is_built else -1, id(tensor))
                if key not in seen:
                    seen.add(key)
                    yield f"{place}.{name}", tensor, to.get(id(tensor))


def _trained(skeletons: Skeletons, places: Iterable[int], types: Types) -> Iterator[_Named]:
    for name, tensor, to in _tensors(skeletons, places, types):
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            is_kept = to is torch.float32
            parameter = like(tensor, META, torch.float32 if is_kept else None)
            assert isinstance(parameter, nn.Parameter)
            yield _Named(name, parameter, None if is_kept else to)


def _frozen(skeletons: Skeletons, places: Iterable[int], types: Types) -> Iterator[tuple[int, int]]:
    """The size of each frozen parameter or buffer on the device, and that of its original."""
    for _, tensor, to in _tensors(skeletons, places, types):
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            continue
        if to is None:
            yield num_bytes([tensor]), 0
        else:
            is_kept = to is torch.float32
            yield tensor.numel() * to.itemsize, 0 if is_kept else tensor.numel() * 4


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The size of the memory that tensors are in; memory that several share counts once."""
    return sum(
        {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
        }.values()
    )
