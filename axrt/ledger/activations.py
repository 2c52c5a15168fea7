"""What a stage keeps of a microbatch from its forward to its backward (the stash), and sends on.

The stage of a run computes here with fake tensors of the CPU, which have shapes and types and no
memory. What autograd saves is counted while its graph lives; or what weight gradients read that
wait, where that is more. Kernels of an accelerator may save something else: its attention may, for
example.
"""

import copy
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from axrt.config import Config
from axrt.device.device import CPU
from axrt.model.joints import Joint, Team
from axrt.model.layer_runs import RunSettings
from axrt.model.linear import Linear, may_wait
from axrt.model.module import LossFunction
from axrt.model.per_layer import shapes
from axrt.model.precision import NarrowLayers, Types, types_of, types_on_device
from axrt.model.seeds import BorrowedGenerator
from axrt.model.stage import Stage
from axrt.model.team_layers import OF_ONE, TeamLayers
from axrt.scheduler.job import Job
from axrt.transport.payload import flatten, unflatten

from .parameters import num_bytes
from .skeleton import Skeletons, like


class StashBytes(NamedTuple):
    """Sizes of one microbatch on a stage, in bytes."""

    kept: int  # what it keeps from its forward on
    again: int  # what it keeps in addition once its layers have run again (recomputation)
    saved: int  # what autograd has saved of it after its forward, which may leave the device
    sent: int  # activation that it sends on; 0 on the last stage
    sent_back: int  # gradient that comes back for it
    slices: int = 0  # what comes of other members at one of its joints


class Stashes:
    """Finds out what the stages of a model keep. Stages that are alike are run once.

    Args:
        loss_fn: loss function of the model.
        of_team: what a member of a team, or a virtual one, runs of each layer.
        virtual: number of virtual members of a rank.
    """

    def __init__(
        self,
        skeletons: Skeletons,
        loss_fn: LossFunction,
        sample: Any,
        of_team: TeamLayers = OF_ONE,
        virtual: int = 1,
    ) -> None:
        self._skeletons, self._loss_fn, self._sample = skeletons, loss_fn, sample
        self._of_team, self._virtual = of_team, virtual
        self._known: dict[tuple[object, ...], tuple[StashBytes, Any]] = {}

    def of_stages(self, config: Config, job: Job) -> list[StashBytes]:
        """The sizes on each stage.

        Args:
            job: schedule that says where the model is cut, and what is recomputed.
        Raises:
            Exception: some layer cannot run on fake tensors; whatever it raises.
        """
        from torch._subclasses import FakeTensorMode  # which takes its time

        types, found = types_of(config.precision), []
        to = self._types_on_device(types)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        generator = BorrowedGenerator(config.run.seed, CPU)
        with warnings.catch_warnings(), generator.borrowed(), mode:
            warnings.simplefilter("ignore")  # of fake tensors
            value, target = (_fake(part) for part in self._sample)
            for stage in range(job.stages):
                again = config.parallel.gather_again
                key = (*self._key(job, stage, types, value), again)
                if key not in self._known:
                    settings = self._settings(job, generator, types, again)
                    self._known[key] = self._run(job, stage, settings, to, value, target)
                one, value = self._known[key]
                found.append(one)
                # a value that is known from before is of another mode, and of the same shapes
                value = _fake(value)
        return found

    def _key(self, job: Job, stage: int, types: Types, value: Any) -> tuple[object, ...]:
        places = range(job.cuts[stage], job.cuts[stage + 1])
        return (
            *(self._skeletons.key_of(place) for place in places),
            (stage == job.last_stage, job.recomputed.get(stage, 0), job.splits),
            types,
            shapes(value),
        )

    def _settings(
        self, job: Job, generator: BorrowedGenerator, types: Types, again: bool
    ) -> RunSettings:
        of_team = self._of_team
        return RunSettings(job, generator, types=types, of_team=of_team, gathers_again=again)

    def _run(
        self,
        job: Job,
        stage: int,
        settings: RunSettings,
        to: Mapping[int, torch.dtype],
        value: Any,
        target: Any,
    ) -> tuple[StashBytes, Any]:
        """The sizes on a stage, and the value that it sends on."""
        first, last, types = job.cuts[stage], stage == job.last_stage, settings.types
        again = job.recomputed.get(stage, 0)
        layers = self._layers(range(first, job.cuts[stage + 1]), types, to)
        sketch = _Sketch(layers, first, self._loss_fn if last else None, settings, again)
        weights = [*sketch.layers.parameters(), *sketch.layers.buffers()]
        products = _Products(sketch.layers)
        with _saved() as saved:
            out, slices = sketch.ran(value, target if last else None, self._of_team.team)
            kept = _apart([*saved(), *sketch.open(0).kept_beside()], weights)
            leaves = _apart(saved(), weights)
            if again:
                products.forget_layers(sketch, again)
                sketch.recompute(0)
            graphs = _apart([*saved(), *sketch.open(0).kept_beside()], weights)
            afterwards = max(graphs, products.num_bytes(weights))
        sketch.drop()
        kept = kept if again else afterwards
        sent = [] if last else flatten(out)[1]
        back = [tensor for tensor in sent if tensor.requires_grad]
        again_bytes = max(0, afterwards - kept)
        sizes = (kept, again_bytes, leaves, num_bytes(sent), num_bytes(back), slices)
        of_all = StashBytes(*(self._virtual * size for size in sizes))
        return of_all, None if last else out

    def _types_on_device(self, types: Types) -> dict[int, torch.dtype]:
        """The types that tensors of skeletons get, by identity. It builds all skeletons, and is not
        to be asked for within a mode, where all tensors seem to be fake ones."""
        found: dict[int, torch.dtype] = {}
        for place in range(len(self._skeletons.layers)):
            found.update(types_on_device(self._skeletons.layer(place), types))
        return found

    def _layers(
        self, places: Iterable[int], types: Types, to: Mapping[int, torch.dtype]
    ) -> list[nn.Module]:
        """Copies of skeletons whose tensors are fake, in the types that they have on a device."""
        layers, memo = [], dict[int, Any]()
        for place in places:
            skeleton = self._skeletons.layer(place)
            if len(self._skeletons.key_of(place)) > 1:
                memo = {}  # built layers share a skeleton, and no tensors
            for tensor in _all_tensors(skeleton):
                memo.setdefault(id(tensor), like(tensor, CPU, to.get(id(tensor))))
            layers.append(copy.deepcopy(skeleton, memo))
        if types.weights:
            narrow = NarrowLayers(types)
            for layer in layers:
                narrow.add(layer)  # for its hooks: fake tensors it leaves as they are
        return layers


class _Sketch(Stage):
    """A stage on fake tensors, which have no addresses."""

    def ran(self, value: Any, target: Any, team: Team) -> tuple[Any, int]:
        """What a forward sends on, and the most bytes that come at one of its joints, or at one of
        its backward: as many as this member has for others."""
        if team.size == 1:
            return self.forward(0, value, target), 0
        most, out = 0, self.forward_piece(0, (value, target))
        while isinstance(out, Joint):
            came = {member: out.outgoing(member) for member in range(1, team.size)}
            most = max(most, num_bytes([one for of in came.values() for one in of]))
            out = self.forward_piece(0, None, came)
        # What is gathered again comes beside gradients, and is put together.
        again = max((num_bytes(of.own) for of in self.open(0).again), default=0)
        return out, most + (2 * team.size - 1) * again

    def _to_send(self, tensor: Tensor) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad)


class _Products:
    """The products of weight gradients that wait, where backwards are split: each reads the input
    of its layer and the gradient of the output.
    """

    def __init__(self, layers: nn.Module) -> None:
        self._of: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        for module in layers.modules():
            if isinstance(module, Linear):
                self._of[module] = []
                module.register_forward_hook(self._note)

    def forget_layers(self, stage: Stage, count: int) -> None:
        """Forget what the first layers of a stage have done, which will run again."""
        for layer in list(stage.layers.values())[:count]:
            for module in layer.modules():
                if module in self._of:
                    self._of[module] = []

    def num_bytes(self, weights: Iterable[Tensor]) -> int:
        """The size of the memory that all products read."""
        pairs = [pair for of_one in self._of.values() for pair in of_one]
        gradients = sum(out.nbytes for _, out in pairs)
        return _apart([x for x, _ in pairs], weights) + gradients

    def _note(self, module: Linear, args: tuple[Any, ...], out: Any) -> None:
        waits = module.weight.requires_grad and may_wait(args[0])
        if waits and torch.is_grad_enabled() and not torch.is_autocast_enabled(CPU.type):
            self._of[module].append((args[0].detach(), out.detach()))


class _Saved:
    """A tensor that a graph has saved; it lives as long as the graph."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def _saved() -> Iterator[Any]:
    """Context that gives a function, which lists the tensors that living graphs have saved."""
    living: weakref.WeakSet[_Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Saved:
        one = _Saved(tensor.detach())  # an output that knows its graph would keep it for ever
        living.add(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one.tensor):
        yield lambda: [one.tensor for one in living]


def _apart(tensors: Iterable[Tensor], weights: Iterable[Tensor]) -> int:
    """The size of the memory that tensors are in, without that of weights."""
    own = {tensor.untyped_storage()._cdata for tensor in weights}
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return num_bytes([one for one in dense if one.untyped_storage()._cdata not in own])


def _all_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Parameters, buffers, and tensors that are plain attributes."""
    yield from module.parameters()
    yield from module.buffers()
    for one in module.modules():
        yield from (value for value in vars(one).values() if isinstance(value, Tensor))


def _fake(payload: Any) -> Any:
    """The payload with fake tensors, within a mode that makes them."""
    skeleton, tensors = flatten(payload)
    return unflatten(skeleton, [like(tensor, CPU) for tensor in tensors])
