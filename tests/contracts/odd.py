"""A table of models that do what most do not. Add a row: a function that makes the model, and what
is promised of it.

Inputs are float32, shape (6, 8), targets int64, shape (6,), of four classes.
"""
# mypy: ignore-errors

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from axrt import LayerSpec, PipelineModule, TiedLayerSpec

WIDTH, CLASSES = 8, 4


@dataclass(frozen=True)
class Odd:
    """A row of the table.

    Args:
        model: function that makes the model anew.
        refused: beginning or pattern of the only refusal that is allowed; "": it is trained, with
            the bits of plain PyTorch.
        refused_where: "stages": it may be refused where there are several stages, as a cut may lie
            at the odd layer or not; "always".
        optimizer: function of named parameters that makes an optimizer; None: AdamW.
        between: function of the layers that is called between two steps.
        exact: False: values are within 1e-6 of plain PyTorch's, whose sums have another order.
    """

    model: Callable[[], PipelineModule]
    refused: str = ""
    refused_where: str = "always"
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    between: Callable[[Sequence[Any]], None] | None = None
    exact: bool = True


def seeded(make: Callable[[], Any]) -> Any:
    """What a function makes, with weights that are the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return make()


def around(*middle: Any, loss: Any = functional.cross_entropy) -> PipelineModule:
    """Odd layers, the third and those that follow, between linear ones: enough for four stages."""
    wide, last = LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Linear, WIDTH, CLASSES)
    return PipelineModule([wide, LayerSpec(nn.Tanh), *middle, wide, last], loss)


class LazyLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(CLASSES)

    def forward(self, outputs: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(outputs), target)


def linear() -> nn.Linear:
    return seeded(lambda: nn.Linear(WIDTH, WIDTH))


# Hooks.


def with_hook(register: Callable[[nn.Module], object]) -> Callable[[], PipelineModule]:
    def make() -> PipelineModule:
        module = linear()
        register(module)
        return around(module)

    return make


class HooksItsOutput(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        out = super().forward(value)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient * 2)
        return out


class HooksItsInput(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * 3)
        return super().forward(value)


# State.


class Counts(nn.Module):
    """A buffer in place."""

    seen: Tensor

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return value * (1 + 0.01 * self.seen.detach().clone())


class Replaces(nn.Module):
    """Another tensor each time."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * value.detach().mean(0)
        return value - self.mean


class Extra(nn.Linear):
    """State beside tensors, which changes what is computed and grows."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__(width, width)
        self.kind, self.told = kind, [1.0]

    def get_extra_state(self) -> Any:
        if self.kind == "tensor":
            return torch.tensor(self.told)
        return {"told": list(self.told), "pair": (1, None), "t": torch.tensor(self.told)}

    def set_extra_state(self, state: Any) -> None:
        self.told = list(state.tolist() if self.kind == "tensor" else state["told"])

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * self.told[-1]


class ExtraAndOwn(Extra):
    """Extra state, and loading of its own."""

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)


class Caches(nn.Linear):
    """Makes something of its weights when it has loaded them, by a hook or by its own loading."""

    def __init__(self, width: int, by_hook: bool) -> None:
        super().__init__(width, width)
        self.total = float(self.weight.detach().sum())
        self.by_hook = by_hook
        if by_hook:
            self.register_load_state_dict_post_hook(lambda module, keys: module.note())

    def note(self) -> None:
        self.total = float(self.weight.detach().sum())

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if not self.by_hook:
            self.note()

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * (1 + 0.01 * self.total)


def grow(layers: Sequence[Any]) -> None:
    for layer in layers:
        if isinstance(layer, Extra):
            layer.told.append(layer.told[-1] + 0.25)


class Masked(nn.Linear):
    """Buffers of booleans and integers."""

    mask: Tensor
    places: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.register_buffer("mask", torch.arange(width) % 3 > 0)
        self.register_buffer("places", torch.arange(width).flip(0))

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value * self.mask)[:, self.places]


# Computations.


class Draws(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value + 0.1 * torch.randn_like(value) * torch.rand(())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = linear(), reentrant

    def forward(self, value: Tensor) -> Any:
        return checkpoint(self.inner, value, use_reentrant=self.reentrant)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value**3 * 0.1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        return gradient * value**2 * 0.3


class Unused(nn.Linear):
    """A weight that nobody uses."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.other = nn.Parameter(torch.ones(3))


class Sometimes(nn.Module):
    """Skips its weights for some microbatches."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value) if float(value.detach().sum()) > 0 else value * 2


class Stops(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.detach()


class Balanced(nn.Module):
    """Experts with a loss of their own, which goes along the stages."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.work = nn.Linear(width, 2), nn.Linear(width, width)

    def forward(self, value: Any) -> tuple[Tensor, Tensor]:
        features, loss = value if isinstance(value, tuple) else (value, 0.0)
        shares = self.gate(features).softmax(-1)
        return self.work(features) * shares[:, :1], loss + shares.mean(0).square().sum()


class Left(Balanced):
    """The same, left on the layer."""

    def forward(self, value: Any) -> Any:
        out, self.balance = super().forward(value)
        return out


class LeavesInABuffer(Balanced):
    """The same in a buffer."""

    balance: Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("balance", torch.zeros(()), persistent=False)

    def forward(self, value: Any) -> Any:
        out, self.balance = super().forward(value)
        return out


class LeavesOnItsClass(Balanced):
    """The same on the class, with more elements than one."""

    shares: Any = None

    def forward(self, value: Any) -> Any:
        type(self).shares = self.gate(value).softmax(-1)
        return super().forward(value)[0]


LEFT: list[Tensor] = []


class LeavesDeep(Balanced):
    """The same in an attribute of its own, deep."""

    def forward(self, value: Any) -> Any:
        out, balance = super().forward(value)
        self._left = {"losses": [(balance,)]}
        return out


class LeavesInAList(Balanced):
    """The same in a list of the module."""

    def forward(self, value: Any) -> Any:
        out, balance = super().forward(value)
        LEFT[:] = [balance]
        return out


def looks_at_a_layer() -> PipelineModule:
    experts = seeded(lambda: Left(WIDTH))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets) + experts.balance

    return around(experts, loss=loss)


class HeadOfPair(nn.Linear):
    def forward(self, value: Any) -> Any:
        return super().forward(value[0]), value[1]


def with_balance(outputs: Any, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs[0], targets) + 0.1 * outputs[1]


class Kept(NamedTuple):
    features: Tensor
    scale: Tensor


class Pair(nn.Module):
    def forward(self, value: Tensor) -> Kept:
        return Kept(value, value.mean(1, keepdim=True))


class OfPair(nn.Module):
    def forward(self, value: Kept) -> Tensor:
        return value.features * value.scale


@dataclass
class Packed:
    features: Tensor


class Unpacks(nn.Module):
    def forward(self, value: Any) -> Any:
        return value.features if isinstance(value, Packed) else Packed(value)


# Weights.


def frozen(make: Callable[[], nn.Module]) -> nn.Module:
    return seeded(make).requires_grad_(False)


def half_frozen() -> nn.Module:
    module = linear()
    module.bias.requires_grad_(False)
    return module


def shared_module() -> PipelineModule:
    module = linear()
    return around(module, nn.Tanh(), module)


def shared_weight() -> PipelineModule:
    first, second = linear(), linear()
    second.weight = first.weight
    return around(first, nn.Tanh(), second)


def tied() -> PipelineModule:
    def transposed(module: Any, value: Tensor) -> Tensor:
        return value @ module.weight

    return PipelineModule(
        [
            TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH, bias=False),
            LayerSpec(nn.Tanh),
            TiedLayerSpec("t", nn.Linear, WIDTH, WIDTH, bias=False, forward_fn=transposed),
            LayerSpec(nn.Linear, WIDTH, CLASSES),
        ],
        functional.cross_entropy,
    )


def tied_with_values() -> PipelineModule:
    def transposed(module: Any, value: Tensor) -> Tensor:
        return value @ module.weight

    given = seeded(lambda: nn.Linear(WIDTH, WIDTH, bias=False))
    return PipelineModule(
        [
            TiedLayerSpec("t", given),
            LayerSpec(nn.Tanh),
            TiedLayerSpec("t", given, forward_fn=transposed),
            LayerSpec(nn.Linear, WIDTH, CLASSES),
        ],
        functional.cross_entropy,
    )


class ReplacesItsWeight(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        out = super().forward(value)
        self.weight = nn.Parameter(self.weight.detach().clone())
        return out


class Looks(nn.Module):
    """Rows of a table, whose norms it bounds as it looks them up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=1.0)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.table((value.detach()[:, 0] * 10).long().remainder(5))


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LazyLinear(WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value)


# Losses.


class Scores(nn.Module):
    """Weights, dropout, a buffer, and work in place on the target."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.score = seeded(lambda: nn.Linear(CLASSES, CLASSES))
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value: Tensor, target: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        target.add_(1).remainder_(CLASSES)
        return functional.cross_entropy(self.score(self.dropout(value)), target)


def summed(outputs: Tensor, targets: Tensor) -> tuple[Tensor, float]:
    return functional.cross_entropy(outputs, targets, reduction="sum"), float(len(targets))


def closed_over(inner: Any) -> Any:
    return lambda value: (inner[0] if isinstance(inner, list) else inner)(value)


def with_default(module: nn.Module) -> Any:
    def layer(value: Tensor, inner: nn.Module = module) -> Tensor:
        return inner(value)

    del module
    return layer


def times(weight: nn.Parameter) -> Any:
    return lambda value: value * weight


class Calls:
    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner

    def __call__(self, value: Tensor) -> Tensor:
        return self.inner(value)


def taught(teacher: nn.Module) -> Any:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(teacher(outputs), targets)

    return loss


# Optimizers.


class Wrapped(torch.optim.Optimizer):
    """Keeps what it needs beside `state`."""

    def __init__(self, named: Any) -> None:
        parameters = [parameter for _, parameter in named]
        super().__init__(parameters, {"lr": 0.1})
        self.slow = [parameter.detach().clone() for parameter in parameters]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter, slow in zip(group["params"], self.slow, strict=True):
                if parameter.grad is not None:
                    slow.lerp_(parameter.detach() - 0.1 * parameter.grad, 0.5)
                    parameter.data.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow}


def plain(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[Any], Any]:
    return lambda named: kind([parameter for _, parameter in named], **options)


def of_linear(*wrapped: Callable[[nn.Module], nn.Module]) -> PipelineModule:
    module: nn.Module = linear()
    for wrap in wrapped:
        module = seeded(lambda: wrap(module))  # noqa: B023
    return around(module)


def unfreeze(layers: Sequence[Any]) -> None:
    for layer in layers:
        if isinstance(layer, nn.Module):
            layer.requires_grad_(True)


def left_on(layer: type[nn.Module], who: str, where: str) -> Odd:
    """A row of what a loss needs and a layer keeps: refused where stages are cut."""
    told = f"{who} keeps a tensor with a gradient in {where}"
    return Odd(lambda: around(LayerSpec(layer, WIDTH)), told, "stages")


ODD: dict[str, Odd] = {
    "a hook of forward": Odd(
        with_hook(lambda m: m.register_forward_hook(lambda _, given, out: out * 2))
    ),
    "a hook before forward": Odd(
        with_hook(lambda m: m.register_forward_pre_hook(lambda _, given: (given[0] + 1,)))
    ),
    "a hook of backward": Odd(
        with_hook(lambda m: m.register_full_backward_hook(lambda _, of, out: (of[0] * 0.5,)))
    ),
    "a hook before backward": Odd(
        with_hook(lambda m: m.register_full_backward_pre_hook(lambda _, of: (of[0] * 0.5,)))
    ),
    "a hook of a weight": Odd(with_hook(lambda m: m.weight.register_hook(lambda g: g * 0.5))),
    "a hook of an output": Odd(lambda: around(LayerSpec(HooksItsOutput, WIDTH, WIDTH))),
    "a hook of an input": Odd(lambda: around(LayerSpec(HooksItsInput, WIDTH, WIDTH))),
    "two hooks that commute": Odd(
        lambda: around(*(LayerSpec(kind, WIDTH, WIDTH) for kind in (HooksItsOutput, HooksItsInput)))
    ),
    "a buffer that counts": Odd(lambda: around(LayerSpec(Counts))),
    "a buffer that is not saved": Odd(lambda: around(LayerSpec(Counts, persistent=False))),
    "a buffer that is replaced": Odd(lambda: around(LayerSpec(Replaces))),
    "buffers of other types": Odd(lambda: around(LayerSpec(Masked, WIDTH))),
    "running means": Odd(lambda: around(LayerSpec(nn.BatchNorm1d, WIDTH))),
    "running means of all": Odd(lambda: around(LayerSpec(nn.BatchNorm1d, WIDTH, momentum=None))),
    "no running means": Odd(
        lambda: around(LayerSpec(nn.BatchNorm1d, WIDTH, track_running_stats=False))
    ),
    "extra state, a tensor": Odd(lambda: around(LayerSpec(Extra, WIDTH, "tensor")), between=grow),
    "extra state, a dictionary": Odd(lambda: around(LayerSpec(Extra, WIDTH, "d")), between=grow),
    "extra state and loading of its own": Odd(
        lambda: around(LayerSpec(ExtraAndOwn, WIDTH, "tensor")), between=grow
    ),
    "what a hook makes as it loads": Odd(lambda: around(LayerSpec(Caches, WIDTH, True))),
    "loading of its own": Odd(lambda: around(LayerSpec(Caches, WIDTH, False))),
    "functions": Odd(lambda: around(torch.tanh, lambda value: value.mul(2), functional.relu_)),
    "a function of a module": Odd(
        lambda: around(partial(functional.linear, bias=None, weight=torch.eye(WIDTH)))
    ),
    "a method of a module": Odd(
        lambda: around(linear().forward), "layer 2 is a function that uses a Linear, whose weight"
    ),
    "a module in a partial": Odd(
        lambda: around(partial(linear())), "layer 2 is a function that uses a Linear, whose weight"
    ),
    "a module in a list in a closure": Odd(
        lambda: around(closed_over([linear()])), "layer 2 is a function that uses a Linear, whose w"
    ),
    "a module as a default": Odd(
        lambda: around(with_default(linear())),
        "layer 2 is a function that uses a Linear, whose weight",
    ),
    "a function of a function of a module": Odd(
        lambda: around(closed_over(closed_over(linear()))),
        "layer 2 is a function that uses a Linear, whose weight",
    ),
    "a parameter in a closure": Odd(
        lambda: around(times(nn.Parameter(torch.ones(WIDTH)))),
        "layer 2 is a function that uses a Parameter, which nobody would train",
    ),
    "a callable object with a module": Odd(
        lambda: around(Calls(linear())), "layer 2 is a function that uses a Linear, whose weight"
    ),
    "a loss that uses a module": Odd(
        lambda: around(loss=seeded(lambda: taught(nn.Linear(CLASSES, CLASSES)))),
        "loss_fn is a function that uses a Linear",
    ),
    "a loss that uses a frozen module": Odd(
        lambda: around(
            loss=seeded(lambda: taught(nn.Linear(CLASSES, CLASSES).requires_grad_(False)))
        )
    ),
    "work in place": Odd(lambda: around(linear(), nn.ReLU(inplace=True), linear())),
    "an identity": Odd(lambda: around(nn.Identity(), lambda value: value)),
    "views": Odd(lambda: around(lambda v: v.t(), lambda v: v.t(), lambda v: v.expand(6, WIDTH))),
    "numbers drawn": Odd(lambda: around(LayerSpec(Draws), nn.RReLU(), nn.AlphaDropout(0.2))),
    "checkpointing of its own": Odd(lambda: around(Checkpointed(reentrant=False))),
    "checkpointing of its own, reentrant": Odd(lambda: around(Checkpointed(reentrant=True))),
    "an autograd function": Odd(lambda: around(Cube.apply)),
    "a script": Odd(lambda: around(torch.jit.script(nn.Sequential(linear(), nn.Tanh())))),
    "a weight that is not used": Odd(lambda: around(LayerSpec(Unused, WIDTH))),
    "weights that are sometimes used": Odd(lambda: around(LayerSpec(Sometimes, WIDTH))),
    "no gradient to the first layers": Odd(lambda: around(LayerSpec(Stops))),
    "named tuples": Odd(
        lambda: around(LayerSpec(Pair), LayerSpec(OfPair)), "Kept cannot travel", "stages"
    ),
    "a class of its own between stages": Odd(
        lambda: around(LayerSpec(Unpacks), LayerSpec(Unpacks)), "Packed", "stages"
    ),
    "a frozen layer": Odd(lambda: around(frozen(lambda: nn.Linear(WIDTH, WIDTH)))),
    "a frozen bias": Odd(lambda: around(half_frozen())),
    "a frozen first layer": Odd(
        lambda: PipelineModule(
            [frozen(lambda: nn.Linear(WIDTH, WIDTH)), *around().layers],
            functional.cross_entropy,
        )
    ),
    "unfrozen later": Odd(
        lambda: around(frozen(lambda: nn.Linear(WIDTH, WIDTH))),
        "2.weight was frozen when the engine took it",
        between=unfreeze,
    ),
    "a module twice": Odd(shared_module, "TiedLayerSpec|several buckets|two stages", "stages"),
    "a weight twice": Odd(shared_weight, "TiedLayerSpec|several buckets|two stages", "stages"),
    "tied weights": Odd(tied, exact=False),
    "tied weights with values of their own": Odd(tied_with_values, exact=False),
    "a weight that is replaced": Odd(
        lambda: around(ReplacesItsWeight(WIDTH, WIDTH)), "2.weight was replaced"
    ),
    "weight norm": Odd(lambda: of_linear(parametrizations.weight_norm)),
    "spectral norm": Odd(lambda: of_linear(parametrizations.spectral_norm)),
    "an orthogonal weight": Odd(lambda: of_linear(parametrizations.orthogonal)),
    "a lazy module within another": Odd(
        lambda: around(LayerSpec(Wrapping)), "its shape is known after the first"
    ),
    "a lazy layer": Odd(
        lambda: around(LayerSpec(nn.LazyLinear, WIDTH)), "its shape is known after the first"
    ),
    "a lazy loss": Odd(
        lambda: around(loss=LazyLoss()), "loss_fn is LazyLoss: its shape is known after the first"
    ),
    "a table with bounded norms": Odd(lambda: around(LayerSpec(Looks))),
    "double precision": Odd(
        lambda: around(torch.Tensor.double, linear().double(), torch.Tensor.float)
    ),
    "a loss along the stages": Odd(
        lambda: PipelineModule(
            [
                *(LayerSpec(Balanced, WIDTH) for _ in range(3)),
                LayerSpec(HeadOfPair, WIDTH, CLASSES),
            ],
            with_balance,
        )
    ),
    "a loss that is left on a layer": left_on(Left, r"2 \(Left\)", "balance"),
    "a loss that is left in a buffer": left_on(
        LeavesInABuffer, r"2 \(LeavesInABuffer\)", "balance"
    ),
    "what a loss needs, left on a class": left_on(LeavesOnItsClass, "", "LeavesOnItsClass.shares"),
    "a loss that is left deep": left_on(LeavesDeep, "", "_left"),
    "a loss that is left in a list": left_on(LeavesInAList, "", "LEFT"),
    "a loss that looks at a layer": Odd(
        looks_at_a_layer,
        r"loss_fn uses layer 2 .Left., which is on another stage|keeps a tensor with a gradient",
        "stages",
    ),
    "a loss with weights": Odd(lambda: around(loss=Scores())),
    "a sum and a weight": Odd(lambda: around(loss=summed)),
    "momentum": Odd(lambda: around(), optimizer=plain(torch.optim.SGD, lr=0.1, momentum=0.9)),
    "the largest second moment": Odd(
        lambda: around(), optimizer=plain(torch.optim.Adam, amsgrad=True)
    ),
    "an optimizer with state elsewhere": Odd(lambda: around(), "Wrapped", optimizer=Wrapped),
}
