"""The files of layers that the members of a team share out: whole layers, which the first member
writes as each comes together."""

# Members send what is cut to the first one, layer by layer, and go on when that is written: nobody
# holds more than one layer that is not its own. What is whole is the same on each member, and the
# first one has it. So a layer that changes buffers may be no layer of tokens, which a first forward
# refuses (`axrt/model/team_layers.py`).
#
# A file does not know of teams. So any number of members, and one rank alone, load what any other
# number has saved, and a run's files are the same to the byte.

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from axrt.errors import DataError, SaveError
from axrt.model.tensor_cuts import Parts
from axrt.runtime.coroutine import Put, Steps, at_once, run_on
from axrt.runtime.shard_exchange import ShardExchange
from axrt.store.bucket import Bucket
from axrt.store.local_model import LocalModel
from axrt.store.saved_piece import copied_now
from axrt.store.state import ParameterState

from .layers import Live, LiveTensors, all_weights, layer_of
from .snapshot import Snapshot
from .writing import Presence, Records, after_copies, layer_files, write_files


class _OfParameter(NamedTuple):
    """What a member has of a parameter that is cut; it can travel in a message."""

    name: str  # name of the parameter
    weight: Tensor  # its part of the weight
    state: dict[str, Tensor]  # its part of the optimizer's state, by key


class _Layer(NamedTuple):
    """What a member has of a layer."""

    weights: LiveTensors  # weights and buffers, by name
    # of parameters, by name, each with the bucket that must be present
    states: Mapping[str, tuple[ParameterState, Bucket | None]]

    def cut(self, parts: Parts) -> list[_OfParameter]:
        """What of it is cut, copied to the CPU."""
        with Presence() as presence:
            return [self._of_parameter(name, presence) for name in self.weights if name in parts]

    def _of_parameter(self, name: str, presence: Presence) -> _OfParameter:
        live, (state, bucket) = self.weights[name], self.states.get(name, (None, None))
        for of in (live.bucket, bucket):
            if of is not None:
                presence.bring(of)
        tensors = state.tensors if state else {}  # of what is frozen there is none
        copies = {key: copied_now(value) for key, value in tensors.items()}
        return _OfParameter(name, copied_now(live.value), copies)

    def whole(self, parts: Parts, of_members: Sequence[Sequence[_OfParameter]]) -> "_Layer":
        """The whole layer, from what each member has of what is cut."""
        weights, states = dict(self.weights), dict(self.states)
        for name in [name for name in weights if name in parts]:
            part = parts[name]
            of_all = [one for of in of_members for one in of if one.name == name]
            weights[name] = Live(part.whole([one.weight for one in of_all]), None)
            if name in states:
                state, _ = states[name]
                tensors = {
                    key: part.whole([one.state[key] for one in of_all]) for key in state.tensors
                }
                states[name] = replace(state, tensors=tensors), None
        return _Layer(weights, states)


def save_team(
    directory: Path,
    model: LocalModel,
    exchange: ShardExchange,
    snapshot: Snapshot | None = None,
    put: Put = at_once,
) -> Steps[Records]:
    """Write the layers of this rank, of which each member of a team has a part; all ranks call it,
    and the first member of the first pipe writes. One layer at a time comes together. Arguments and
    results are those of `save_layers`."""
    weights = all_weights(model)
    states = {
        name: (state, bucket)
        for bucket in model.all_buckets
        for name, state in bucket.state.saved()
    }
    layers = {
        place: _Layer(
            weights[place], {name: of for name, of in states.items() if layer_of(name) == place}
        )
        for place, _ in model.layers()
    }
    if snapshot is None:
        return _save(directory, model, exchange, layers, put)
    copies = {place: _taken(layer, snapshot) for place, layer in layers.items()}
    snapshot.begin()
    return after_copies(snapshot, _save(directory, model, exchange, copies, put))


def _taken(layer: _Layer, snapshot: Snapshot) -> _Layer:
    """A layer with the copies that a snapshot takes."""

    def taken(value: Tensor, bucket: Bucket | None) -> Tensor:
        return snapshot.take(Live(value, bucket))

    return _Layer(
        {name: Live(snapshot.take(live), None) for name, live in layer.weights.items()},
        {
            name: (
                replace(of, tensors={key: taken(one, bucket) for key, one in of.tensors.items()}),
                None,
            )
            for name, (of, bucket) in layer.states.items()
        },
    )


def _save(
    directory: Path,
    model: LocalModel,
    exchange: ShardExchange,
    layers: Mapping[int, _Layer],
    put: Put,
) -> Steps[Records]:
    records: Records = {}
    faults: list[Exception] = []
    for place, module in sorted(model.layers()):
        stage, layer = model.stage_of(place), layers[place]
        came = yield from exchange.to_writer(stage, place, layer.cut(model.parts))
        if came is not None and not faults:  # else others go on all the same
            try:
                of_members = [[_OfParameter(*one) for one in of] for of in came]
                whole = layer.whole(model.parts, of_members)
                files = list(layer_files(place, module, whole.weights, whole.states))
                records.update((yield from run_on(put, partial(write_files, directory, files))))
            except (SaveError, DataError) as error:
                faults.append(error)
        yield from exchange.written(stage, place)
    if faults:
        raise faults[0]
    return records
