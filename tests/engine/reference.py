"""The oracle: plain PyTorch in one process, as the design defines it, and the same run on axrt's
ranks."""

import copy
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import axrt
from axrt.model.loss import Loss
from axrt.observe.observer import Observer
from axrt.scheduler.policies import NAMES, policy_by_name
from axrt.store.bucket_settings import LrSchedule, OptimizerFactory, constant
from axrt.transport import Transport
from axrt.transport.payload import on

SEED = 7
SCRATCH = "AXRT_TEST_SCRATCH"  # memory.scratch of runs that these helpers configure; unset: none
# One of each class: whole or split backwards, with a chunk a rank or several, and two pipes.
CLASSES = ("1f1b", "zb-h1", "breadth-first", "zb-v", "chimera")
POLICIES = (*CLASSES, *(name for name in NAMES if name not in CLASSES))
TWO_PIPES = tuple(
    name for name in POLICIES if policy_by_name(name).placements == ("bidirectional",)
)
# they have the bits of plain torch
ONE_PIPE = tuple(name for name in POLICIES if name not in TWO_PIPES)
CPU = torch.device("cpu")
Item = tuple[Any, Any]
P = ParamSpec("P")
T = TypeVar("T")


def made_once(run: Callable[P, T]) -> Callable[P, T]:
    """A run beside which results are held: it is made once for all cases of a process that ask for
    it with equal arguments."""
    made: dict[object, T] = {}

    @wraps(run)
    def asked(*args: P.args, **keys: P.kwargs) -> T:
        key = _as_key((args, keys))
        if key not in made:
            made[key] = run(*args, **keys)
        return made[key]

    return asked


def _as_key(value: Any) -> object:
    if isinstance(value, dict):
        return frozenset((name, _as_key(of)) for name, of in value.items())
    return tuple(map(_as_key, value)) if isinstance(value, list | tuple) else value


@dataclass
class Outcome:
    """What a run leaves: losses by step, gradient norms by step, final parameters by name."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]

    def __eq__(self, other: object) -> bool:
        """To the bit."""
        assert isinstance(other, Outcome)
        return (
            self.losses == other.losses
            and self.norms == other.norms
            and self.parameters.keys() == other.parameters.keys()
            and all(
                torch.equal(tensor, other.parameters[name])
                for name, tensor in self.parameters.items()
            )
        )


def momentum(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9)


def spoiling(named: Any) -> torch.optim.Optimizer:
    """The same, and writes to gradients when it has stepped, as optimizers may."""

    def spoil(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.fill_(float("nan"))

    optimizer = momentum(named)
    optimizer.register_step_post_hook(spoil)
    return optimizer


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(named, lr=1e-2)


def train_in_plain_torch(
    model: axrt.PipelineModule,
    batches: Callable[[int], Sequence[Item]],
    steps: int,
    factory: OptimizerFactory = adamw,
    schedule: LrSchedule = constant,
    *,
    clip: float = 0.0,
    compute: torch.dtype | None = None,
    device: torch.device = CPU,
) -> Outcome:
    """`batches(step)` are the microbatches of a step, of all replicas, one after the other."""
    whole = model.sequential(SEED).to(device)
    loss_fn = loss_in(whole, model)
    named = [
        (name, parameter) for name, parameter in whole.named_parameters() if parameter.requires_grad
    ]
    optimizer = factory(named)
    initial = [group["lr"] for group in optimizer.param_groups]
    losses, norms = [], []
    for step in range(steps):
        items = batches(step)
        of_step, weights = [], []
        for k, (inputs, target) in enumerate(items):
            value = run_in_plain_torch(whole, on(device, inputs), step, k, compute, device)
            with computing(compute, device):
                loss = loss_fn(value, on(device, target))
            if isinstance(loss, tuple):
                loss, weight = loss
                weights.append(float(weight))
            torch.autograd.backward(loss if weights else loss / len(items))
            of_step.append(loss.item())
        gradients = [p.grad for _, p in named if p.grad is not None]
        for gradient in gradients if weights else ():
            gradient.mul_(1 / sum(weights))
        norm = total_norm(gradients)
        norms.append(norm.item())
        if clip:
            nn.utils.clip_grads_with_norm_([p for _, p in named], clip, norm)
        for group, lr in zip(optimizer.param_groups, initial, strict=True):
            group["lr"] = lr * schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(of_step) / (sum(weights) if weights else len(of_step)))
    return Outcome(
        losses, norms, {name: parameter.detach().cpu().clone() for name, parameter in named}
    )


def loss_in(whole: nn.Sequential, model: axrt.PipelineModule) -> Any:
    """The loss of a whole model: where it is a module with weights, that of these layers."""
    return whole[-1].loss if isinstance(whole[-1], Loss) else model.loss_fn


def total_norm(gradients: list[Tensor]) -> Tensor:
    """The norm by which `clip_grad_norm_` clips; of gradients on a device the norm of all norms is
    taken on the host, as axrt takes it, whose last bit may be another."""
    norm = nn.utils.get_total_norm(gradients)
    if norm.device == CPU:
        return norm
    of_each = torch.stack(list(torch._foreach_norm(gradients))).cpu()
    on_host: Tensor = torch.linalg.vector_norm(of_each)
    torch.testing.assert_close(on_host, norm.cpu(), rtol=1e-6, atol=0)
    return on_host


@made_once
def plain_torch(
    model: Callable[[], axrt.PipelineModule],
    batches: Callable[[int], Sequence[Item]],
    steps: int,
    factory: OptimizerFactory = adamw,
    **keys: Any,
) -> Outcome:
    """`train_in_plain_torch` of a new model, made once."""
    return train_in_plain_torch(model(), batches, steps, factory, **keys)


@dataclass
class Scale:
    """A dynamic loss scale, as `torch.amp.GradScaler` keeps it."""

    scale: float = 65536.0
    interval: int = 2000
    good: int = 0

    def update(self, overflowed: bool) -> None:
        self.good = 0 if overflowed else self.good + 1
        if overflowed:
            self.scale *= 0.5
        elif self.good == self.interval:
            self.scale, self.good = self.scale * 2.0, 0


def train_with_masters(
    model: axrt.PipelineModule,
    batches: Callable[[int], Sequence[Item]],
    steps: int,
    factory: OptimizerFactory = adamw,
    schedule: LrSchedule = constant,
    *,
    to: torch.dtype = torch.bfloat16,
    keep: Sequence[type[nn.Module]] = (),
    in_weights: bool = False,
    clip: float = 0.0,
    scale: Scale | None = None,
    holder_of: Callable[[int], int] = lambda k: 0,
    group_of: Callable[[int], int] = lambda holder: 0,
    device: torch.device = CPU,
) -> Outcome:
    """The same where layers compute with copies of type `to`, and the optimizer steps float32
    masters; modules of classes in `keep` stay float32.

    Gradients add up in float32, or in the copies' type, over the microbatches that have the same
    holder, and over holders in float32: over those of a group first, then over groups. Each layer
    of tied weights has a copy of its own; these are added up like holders, in the order of layers.
    """
    whole = model.sequential(SEED).to(device)
    named = [(name, p) for name, p in whole.named_parameters() if p.requires_grad]
    optimizer = factory(named)
    initial = [group["lr"] for group in optimizer.param_groups]
    narrow = _Narrow(whole, named, to, tuple(keep), device)
    outcome = Outcome([], [], {})
    for step in range(steps):
        narrow.copy()
        before = [buffer.clone() for buffer in narrow.layers.buffers()]
        factor, items = scale.scale if scale else 1.0, batches(step)
        of_step, weights = narrow.run(model, items, step, factor, in_weights, holder_of)
        for name, master in named:
            of_all = 1 / ((sum(weights) or 1.0) * factor)
            master.grad = narrow.gradient(name, of_all, group_of)
        norm = total_norm([p.grad for _, p in named if p.grad is not None])
        outcome.losses.append(sum(of_step) / (sum(weights) or len(of_step)))
        outcome.norms.append(norm.item())
        for group, lr in zip(optimizer.param_groups, initial, strict=True):
            group["lr"] = lr * schedule(step)
        overflowed = scale is not None and not all(map(math.isfinite, [norm.item(), *of_step]))
        if overflowed:
            for buffer, value in zip(narrow.layers.buffers(), before, strict=True):
                buffer.copy_(value)
        else:
            if clip:
                nn.utils.clip_grads_with_norm_([p for _, p in named], clip, norm)
            optimizer.step()
        if scale:
            scale.update(overflowed)
    outcome.parameters = {name: p.detach().cpu().clone() for name, p in named}
    return outcome


@made_once
def plain_masters(
    model: Callable[[], axrt.PipelineModule],
    batches: Callable[[int], Sequence[Item]],
    steps: int,
    factory: OptimizerFactory = adamw,
    **keys: Any,
) -> Outcome:
    """`train_with_masters` of a new model, made once; not for keys that it changes."""
    return train_with_masters(model(), batches, steps, factory, **keys)


class _Narrow:
    """Layers of another type, but for modules that are kept, which take and give that type; and the
    sums of their gradients, by holder and name."""

    def __init__(
        self,
        whole: nn.Sequential,
        masters: Sequence[tuple[str, nn.Parameter]],
        to: torch.dtype,
        keep: tuple[type[nn.Module], ...],
        device: torch.device,
    ) -> None:
        self.layers = _narrowed(whole, to, keep)
        self._to, self._keep, self._device = to, keep, device
        self._named = dict(self.layers.named_parameters())
        everywhere = list(whole.named_parameters(remove_duplicate=False))
        self._copies = {
            name: [other for other, parameter in everywhere if parameter is master]
            for name, master in masters
        }
        self._masters = masters
        self._sums: dict[int, dict[str, Tensor]] = {}

    @torch.no_grad()
    def copy(self) -> None:
        for name, master in self._masters:
            for copy_of_it in self._copies[name]:
                self._named[copy_of_it].copy_(master)

    def run(
        self,
        model: axrt.PipelineModule,
        items: Sequence[Item],
        step: int,
        factor: float,
        in_weights: bool,
        holder_of: Callable[[int], int],
    ) -> tuple[list[float], list[float]]:
        """The losses and weights of a step's microbatches, whose gradients are added up."""
        losses, weights = [], []
        for k, (inputs, target) in enumerate(items):
            value = on(self._device, inputs)
            for place, layer in enumerate(self.layers):
                _generator_of(self._device).manual_seed(axrt.seed_of(SEED, step, k, place))
                if not isinstance(layer, self._keep):
                    value = _cast(value, torch.float32, self._to)
                value = _cast(layer(value), torch.float32, self._to)
            outputs = _cast(value, self._to, torch.float32)
            loss = model.loss_fn(outputs, on(self._device, target))
            if isinstance(loss, tuple):
                loss, weight = loss
                weights.append(float(weight))
            losses.append(loss.item())
            torch.autograd.backward((loss if weights else loss / len(items)) * factor)
            self._add(self._sums.setdefault(holder_of(k), {}), in_weights)
        return losses, weights

    def _add(self, sums: dict[str, Tensor], in_weights: bool) -> None:
        for name, parameter in self._named.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                found = gradient if in_weights else gradient.float()
                sums[name] = sums[name] + found if name in sums else found

    def gradient(self, name: str, factor: float, group_of: Callable[[int], int]) -> Tensor | None:
        """The sum over holders and copies, in float32; it is let go."""
        groups: dict[int, list[Tensor]] = {}
        for holder in sorted(self._sums):
            for copy_of_it in self._copies[name]:
                if copy_of_it in self._sums[holder]:
                    found = self._sums[holder].pop(copy_of_it).float()
                    groups.setdefault(group_of(holder), []).append(found)
        sums = [sum(of_group[1:], of_group[0]) for of_group in groups.values()]
        return sum(sums[1:], sums[0]) * factor if sums else None


def _narrowed(whole: nn.Sequential, to: torch.dtype, keep: tuple[type[nn.Module], ...]) -> Any:
    """A copy of the model with weights and buffers of another type."""
    narrow = copy.deepcopy(whole)
    for layer in range(len(narrow)):  # alone, so that tied weights are no longer shared
        narrow[layer] = copy.deepcopy(narrow[layer])

    def walk(module: nn.Module) -> None:
        if isinstance(module, keep):
            forward = module.forward
            module.forward = lambda *args: _cast(
                forward(*_cast(args, to, torch.float32)), torch.float32, to
            )
            return
        for child in module.children():
            walk(child)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(to)

    walk(narrow)
    return narrow


def _cast(value: Any, of: torch.dtype, to: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda one: one.to(to) if one.dtype == of else one, value)


def _generator_of(device: torch.device) -> torch.Generator:
    # torch.manual_seed does this and more: for a device that is not used it keeps the stack, each
    # time.
    if device.type == "cpu":
        return torch.default_generator
    found: torch.Generator = torch.get_device_module(device.type).default_generators[
        device.index or 0
    ]
    return found


def run_in_plain_torch(
    whole: nn.Sequential,
    value: Any,
    step: int,
    k: int,
    compute: torch.dtype | None,
    device: torch.device = CPU,
) -> Any:
    seeded = _generator_of(device)
    for place, layer in enumerate(whole):
        seeded.manual_seed(axrt.seed_of(SEED, step, k, place))
        with computing(compute, device):
            value = layer(value)
        if compute and value.dtype == torch.float32:
            value = value.to(compute)
    return value


def computing(
    compute: torch.dtype | None, device: torch.device = CPU
) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, dtype=compute) if compute else nullcontext()


def configured(microbatches: int, **sections: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """A configuration for tests, with sections laid over it."""
    base: dict[str, dict[str, Any]] = {
        "schedule": {"microbatches": microbatches},
        "run": {"seed": SEED, "device": "cpu"},
    }
    if SCRATCH in os.environ:
        base["memory"] = {"offload": "stream", "scratch": os.environ[SCRATCH]}
    return {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}


def train_on_a_rank(
    transport: Transport,
    model: axrt.PipelineModule,
    batches: Callable[[int], Sequence[Item]],
    steps: int,
    config: dict[str, dict[str, Any]],
    factory: OptimizerFactory = adamw,
    schedule: LrSchedule = constant,
    observers: Sequence[Observer] = (),
    sample: Any = None,
) -> Outcome:
    """What one rank of axrt makes of the same; parameters are those that it holds."""
    engine = axrt.initialize(
        model, factory, schedule, config, transport=transport, observers=observers, sample=sample
    )
    with engine:
        mine = slice(
            engine.data_rank * engine.config.schedule.microbatches,
            (engine.data_rank + 1) * engine.config.schedule.microbatches,
        )
        results = [
            engine.train_batch(iter(batches(step)[mine]) if engine.reads else None)
            for step in range(steps)
        ]
        losses = [result.loss for result in results]
        norms = [result.grad_norm for result in results]
        if engine.config.memory.offload_parameters:  # of others than the user's nothing comes back
            every = frozenset(range(len(model.layers)))
            object.__setattr__(engine._model, "given", every)
    return Outcome(
        losses,
        [norm for norm in norms if norm is not None],
        {n: p.detach().cpu().clone() for n, p in copies(engine)},
    )


def copies(engine: axrt.Engine) -> list[tuple[str, nn.Parameter]]:
    """What the optimizers of a rank step, every copy of a tied weight by the name of its own
    layer."""
    return [pair for bucket in engine._model.all_buckets for pair in bucket.trained]


def together(outcomes: Sequence[Outcome], pipes: int = 1) -> Outcome:
    """The outcome of a job from those of its ranks, which agree on the losses; pipes agree on every
    bit."""
    assert all(outcome.losses == outcomes[0].losses for outcome in outcomes)
    parameters: dict[str, Tensor] = {}
    for outcome in outcomes:
        for name, tensor in outcome.parameters.items():
            assert torch.equal(parameters.setdefault(name, tensor), tensor), (
                f"pipes differ in {name}"
            )
    assert pipes * len(parameters) == sum(len(outcome.parameters) for outcome in outcomes)
    return Outcome(outcomes[0].losses, outcomes[0].norms, parameters)


@cache
def random_batches(
    shape: tuple[int, ...], classes: int, microbatches: int
) -> Callable[[int], list[Item]]:
    """Microbatches of random features and class targets, the same for the same step."""

    def of_step(step: int) -> list[Item]:
        generator = torch.Generator().manual_seed(1000 + step)
        return [
            (
                torch.randn(shape, generator=generator),
                torch.randint(classes, shape[:1], generator=generator),
            )
            for _ in range(microbatches)
        ]

    return of_step


@cache
def token_batches(vocab: int, context: int, microbatches: int) -> Callable[[int], list[Item]]:
    """Microbatches of two sequences of random tokens and those that follow them, the same for the
    same step."""

    def of_step(step: int) -> list[Item]:
        tokens = torch.randint(
            vocab, (microbatches, 2, context + 1), generator=torch.Generator().manual_seed(step)
        )
        return [(row[:, :-1], row[:, 1:]) for row in tokens]

    return of_step
