"""What a stage keeps of a microbatch from its forward to its backward (the stash), and sends on.

The stage of a run computes here with fake tensors of the CPU, which have shapes and types and no
memory. What autograd saves is counted while its graph lives; or what weight gradients read that
wait, where that is more. Kernels of an accelerator may save something else: its attention may, for
example.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from axrt.config import Config
from axrt.device.device import CPU
from axrt.model.joints import Team
from axrt.model.layer_runs import RunSettings
from axrt.model.linear import Linear, may_wait
from axrt.model.member_alone import MemberAlone
from axrt.model.module import LossFunction
from axrt.model.per_layer import shapes
from axrt.model.precision import Types, types_of
from axrt.model.seeds import BorrowedGenerator
from axrt.model.stage import Stage
from axrt.model.team_layers import OF_ONE, TeamLayers
from axrt.scheduler.job import Job
from axrt.transport.payload import flatten

from .parameters import num_bytes
from .skeleton import Skeletons
from .sketch import Sketch, Sketches, bytes_apart, fake, fake_tensors, saved_by_graphs


class StashBytes(NamedTuple):
    """Sizes of one microbatch on a stage, in bytes."""

    kept: int  # what it keeps from its forward on
    again: int  # what it keeps in addition once its layers have run again (recomputation)
    saved: int  # what autograd has saved of it after its forward, which may leave the device
    sent: int  # activation that it sends on; 0 on the last stage
    sent_back: int  # gradient that comes back for it
    slices: int = 0  # what comes of other members at one of its joints


class StashSource(Protocol):
    """What knows what stages keep."""

    def of_stages(self, config: Config, job: Job) -> list[StashBytes]:
        """The sizes on each stage."""


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
        types, found = types_of(config.precision), []
        sketches = Sketches(self._skeletons, types)
        with fake_tensors(config.run.seed) as generator:
            value, target = (fake(part) for part in self._sample)
            for stage in range(job.stages):
                again = config.parallel.gather_again
                key = (*self._key(job, stage, types, value), again)
                if key not in self._known:
                    settings = self._settings(job, generator, types, again)
                    self._known[key] = self._run(job, stage, settings, sketches, value, target)
                one, value = self._known[key]
                found.append(one)
                # a value that is known from before is of another mode, and of the same shapes
                value = fake(value)
        return found

    def _key(self, job: Job, stage: int, types: Types, value: Any) -> tuple[object, ...]:
        places = range(job.cuts[stage], job.cuts[stage + 1])
        return (
            *(self._skeletons.key_of(place) for place in places),
            *(self._way_of(place) for place in places),
            (stage == job.last_stage, job.recomputed.get(stage, 0), job.splits),
            types,
            shapes(value),
        )

    def _way_of(self, place: int) -> tuple[object, ...]:
        """How a member runs a layer, which a plan says by its place."""
        if self._of_team.team.size == 1:
            return ()
        return (self._of_team.way_of(place, self._skeletons.layers[place]), place > 0)

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
        sketches: Sketches,
        value: Any,
        target: Any,
    ) -> tuple[StashBytes, Any]:
        """The sizes on a stage, and the value that it sends on."""
        first, last = job.cuts[stage], stage == job.last_stage
        again = job.recomputed.get(stage, 0)
        layers = sketches.layers(range(first, job.cuts[stage + 1]))
        sketch = Sketch(layers, first, self._loss_fn if last else None, settings, again)
        weights = [*sketch.layers.parameters(), *sketch.layers.buffers()]
        products = _Products(sketch.layers)
        with saved_by_graphs() as saved:
            given = value, target if last else None
            out, slices = _ran(sketch, *given, self._of_team.team)
            kept = bytes_apart([*saved(), *sketch.open(0).kept_beside()], weights)
            leaves = bytes_apart(saved(), weights)
            if again:
                products.forget_layers(sketch, again)
                sketch.recompute(0)
            graphs = bytes_apart([*saved(), *sketch.open(0).kept_beside()], weights)
            afterwards = max(graphs, products.num_bytes(weights))
        sketch.drop()
        kept = kept if again else afterwards
        sent = [] if last else flatten(out)[1]
        back = [tensor for tensor in sent if tensor.requires_grad]
        again_bytes = max(0, afterwards - kept)
        sizes = (kept, again_bytes, leaves, num_bytes(sent), num_bytes(back), slices)
        of_all = StashBytes(*(self._virtual * size for size in sizes))
        return of_all, None if last else out


def _ran(sketch: Sketch, value: Any, target: Any, team: Team) -> tuple[Any, int]:
    """What a forward sends on, and the most bytes that come at one of its joints, or at one of its
    backward: as many as this member has for others."""
    member = MemberAlone(sketch, team.size)
    out = member.forward(0, value, target)
    # What is gathered again comes beside gradients, and is put together.
    again = max((num_bytes(of.own) for of in sketch.open(0).again), default=0)
    return out, max(member.joints, default=0) + (2 * team.size - 1) * again


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
        return bytes_apart([x for x, _ in pairs], weights) + gradients

    def _note(self, module: Linear, args: tuple[Any, ...], out: Any) -> None:
        waits = module.weight.requires_grad and may_wait(args[0])
        if waits and torch.is_grad_enabled() and not torch.is_autocast_enabled(CPU.type):
            self._of[module].append((args[0].detach(), out.detach()))
