"""What a rank really holds now, by purpose: the memory that its parameters, their gradients and
their optimizers' state are in."""

from collections.abc import Iterator

from torch import Tensor

from axrt.offload.tier import HostTier
from axrt.store.flat import is_hollow
from axrt.store.local_model import LocalModel
from axrt.store.matrix_optimizer import is_factor
from axrt.store.routes import OnHost
from axrt.store.slots import Slots

from .ledger import IN_SCRATCH, Entry, Ledger, Purpose, Tier
from .parameters import num_bytes


def measured(model: LocalModel) -> Ledger:
    """The memory of a rank's parameters, as it is allocated now."""
    return Ledger.of(_entries(model))


def _entries(model: LocalModel) -> Iterator[Entry]:
    trained = {id(parameter) for bucket in model.all_buckets for _, parameter in bucket.named}
    weights = [
        parameter
        for bucket in model.all_buckets
        for _, parameter in bucket.named
        if not is_hollow(parameter)  # it is whole for residencies alone
    ]
    masters = [master for bucket in model.all_buckets for master in bucket.stepped]
    stepped = [master for master in masters if _residencies(model, master)]
    memories = [(bucket.gradient.sums, bucket.gradient.own_totals) for bucket in model.all_buckets]
    rest = [
        tensor
        for _, layer in model.layers()
        for tensor in (*layer.parameters(), *layer.buffers())
        if id(tensor) not in trained
    ]
    originals = list(model.narrow.originals().values()) if model.narrow else []
    kept = [one for of in model.all_buckets if of.shard for one in of.shard.kept_weights]
    in_residencies = any(bucket.has_residencies for bucket in model.all_buckets)
    whole = num_bytes(weights)
    held: tuple[tuple[Purpose, Tier, int], ...] = (
        (
            Purpose.WEIGHTS,
            Tier.DEVICE,
            num_bytes([*kept, *stepped]) - num_bytes(stepped) if in_residencies else whole,
        ),
        (Purpose.GATHERED, Tier.DEVICE, whole if in_residencies else 0),
        (
            Purpose.MASTERS,
            Tier.DEVICE,
            num_bytes([*weights, *stepped]) - whole,
        ),
        (
            Purpose.GRADIENTS,
            Tier.DEVICE,
            num_bytes(flat for sums, _ in memories for flat in sums),
        ),
        (
            Purpose.TOTALS,
            Tier.DEVICE,
            num_bytes(flat for _, of in memories for flat in of if _residencies(model, flat)),
        ),
        (Purpose.MOMENTS, Tier.DEVICE, num_bytes(_moments(model))),
        *[(Purpose.FACTORS, tier, size) for tier, size in _factors(model)],
        (Purpose.SLOTS, Tier.DEVICE, model.slots.num_bytes if model.slots else 0),
        (Purpose.GRADIENTS, Tier.HOST, model.host_slots.num_bytes if model.host_slots else 0),
        (Purpose.FROZEN, Tier.DEVICE, num_bytes(rest)),
        (Purpose.ORIGINALS, Tier.HOST, num_bytes(originals)),
    )
    yield from (Entry(*one) for one in held)
    yield from in_scratch(model)


def in_scratch(model: LocalModel) -> Iterator[Entry]:
    """What a rank has in memory below its device, whatever is under way."""
    yield _of_stashes(model)
    for bucket in model.all_buckets:
        for purpose, size in zip(IN_SCRATCH, bucket.route.scratch_bytes, strict=True):
            yield Entry(purpose, _tier_of(model), size)


def _of_stashes(model: LocalModel) -> Entry:
    tier = Tier.DISK if model.stash and model.stash.is_on_disk else Tier.HOST
    return Entry(Purpose.STASH, tier, model.stash.num_bytes if model.stash else 0)


def _residencies(model: LocalModel, tensor: Tensor) -> bool:
    """The tensor has memory on the device that is no slot, no slot of the host, and no scratch in
    which it is attached."""
    elsewhere: list[Slots | HostTier] = [of for of in (model.slots, model.host_slots) if of]
    if isinstance(model.scratch, HostTier):
        elsewhere.append(model.scratch)
    return not is_hollow(tensor) and not any(memory.has(tensor) for memory in elsewhere)


def _tier_of(model: LocalModel) -> Tier:
    on_disk = model.scratch is not None and model.scratch.is_disk
    return Tier.DISK if on_disk else Tier.HOST


def _moments(model: LocalModel) -> Iterator[Tensor]:
    for bucket in model.all_buckets:
        state = bucket.optimizer.state if bucket.optimizer else {}
        for parameter, of_one in state.items():
            for key, value in of_one.items():
                is_tensor = isinstance(value, Tensor) and value.dim() > 0 and not is_factor(key)
                if is_tensor and value.shape == parameter.shape and _residencies(model, value):
                    yield value


def _factors(model: LocalModel) -> Iterator[tuple[Tier, int]]:
    for bucket in model.all_buckets:
        yield Tier.DEVICE, bucket.factors.num_bytes
        for of_one in bucket.optimizer.state.values() if bucket.optimizer else ():
            for key, value in of_one.items():
                if is_factor(key):
                    yield (
                        Tier.HOST if isinstance(bucket.route, OnHost) else Tier.DEVICE,
                        value.nbytes,
                    )
