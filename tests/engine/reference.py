"""The oracle: plain PyTorch in one process, as the design defines it, and the same run on axrt's
ranks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import axrt
from axrt.observe.observer import Observer
from axrt.payload import on
from axrt.scheduler.policies import NAMES, policy_by_name
from axrt.store.bucket import LrSchedule, OptimizerFactory, constant
from axrt.transport import Transport

SEED = 7
# they have the bits of plain torch
ONE_PIPE = tuple(name for name in NAMES if policy_by_name(name).placements != ("bidirectional",))
TWO_PIPES = tuple(name for name in NAMES if name not in ONE_PIPE)
CPU = torch.device("cpu")
Item = tuple[Any, Any]


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
                loss = model.loss_fn(value, on(device, target))
            if isinstance(loss, tuple):
                loss, weight = loss
                weights.append(float(weight))
            torch.autograd.backward(loss if weights else loss / len(items))
            of_step.append(loss.item())
        gradients = [p.grad for _, p in named if p.grad is not None]
        for gradient in gradients if weights else ():
            gradient.mul_(1 / sum(weights))
        norms.append(nn.utils.get_total_norm(gradients).item())
        if clip:
            nn.utils.clip_grad_norm_([p for _, p in named], clip)
        for group, lr in zip(optimizer.param_groups, initial, strict=True):
            group["lr"] = lr * schedule(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(of_step) / (sum(weights) if weights else len(of_step)))
    return Outcome(
        losses, norms, {name: parameter.detach().cpu().clone() for name, parameter in named}
    )


def run_in_plain_torch(
    whole: nn.Sequential,
    value: Any,
    step: int,
    k: int,
    compute: torch.dtype | None,
    device: torch.device = CPU,
) -> Any:
    # torch.manual_seed does this and more: for a device that is not used it keeps the stack, each
    # time.
    seeded = (
        torch.default_generator
        if device.type == "cpu"
        else torch.get_device_module(device.type).default_generators[device.index or 0]
    )
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
    return Outcome(
        losses,
        [norm for norm in norms if norm is not None],
        {n: p.detach().cpu().clone() for n, p in copies(engine)},
    )


def copies(engine: axrt.Engine) -> list[tuple[str, nn.Parameter]]:
    """What a rank trains, every copy of a tied weight by the name of its own layer."""
    return [pair for stage in engine._model.stages.values() for pair in stage.named_parameters()]


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


def token_batches(vocab: int, context: int, microbatches: int) -> Callable[[int], list[Item]]:
    """Microbatches of two sequences of random tokens and those that follow them, the same for the
    same step."""

    def of_step(step: int) -> list[Item]:
        tokens = torch.randint(
            vocab, (microbatches, 2, context + 1), generator=torch.Generator().manual_seed(step)
        )
        return [(row[:, :-1], row[:, 1:]) for row in tokens]

    return of_step
