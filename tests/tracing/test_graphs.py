"""Graphs that are hard to cut: memory with several names, buffers that change, contexts, constants;
and modules that cannot be traced."""

import copy
import itertools
import random
from collections import UserDict
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import axrt
from axrt.tracing.exporting import called_with
from axrt.tracing.layer import TracedLayer
from axrt.tracing.traced import TracedModule
from axrt.transport.local import LocalWorld

from ..sweeps import swept

WIDTH = 4
CPU = torch.device("cpu")


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets)


def apart(model: TracedModule) -> nn.Sequential:
    """The layers as if each were on a rank of its own: they share no memory."""
    return nn.Sequential(*map(copy.deepcopy, model.sequential(0)))


def through(whole: nn.Sequential, inputs: Any) -> Any:
    """What the layers return; what travels from one to the next is copied."""
    value = inputs
    for layer in whole:
        value = layer(tree_map_only(Tensor, Tensor.clone, value))
    return value


def state(module: nn.Module) -> dict[str, Tensor]:
    """Weights, buffers and gradients by name."""
    named = (*module.named_parameters(), *module.named_buffers())
    found = {name: tensor.detach() for name, tensor in named}
    found |= {
        f"gradient of {n}": p.grad for n, p in module.named_parameters() if p.grad is not None
    }
    return found


def own(name: str) -> str:
    """The name in the module, of one in the pipeline."""
    what, _, full = name.rpartition(" ")
    return f"{what} {full.partition('.')[2]}".strip()


def check_like(module: nn.Module, inputs: Any) -> TracedModule:
    """The layers have the module's bits: outputs, gradients and buffers, in both modes, also when
    they have loaded other values."""
    model = axrt.traced(module, (inputs, None), loss_fn)
    assert not any(isinstance(layer, axrt.TiedLayerSpec) for layer in model.layers)
    for training in (True, False):
        for factor in (1.0, 1.5):
            plain, whole = copy.deepcopy(module).train(training), apart(model).train(training)
            for of in (plain, whole):
                load_scaled(of, factor)
            with torch.set_grad_enabled(training):  # evaluations are without
                torch.manual_seed(3)
                expected = called_with(plain, inputs)
                torch.manual_seed(3)
                found = through(whole, inputs)
            assert torch.equal(found, expected)
            for made in (expected, found) if training else ():
                (made * torch.linspace(0.5, 2.0, made.numel()).view_as(made)).sum().backward()
            theirs, mine = state(plain), {own(name): of for name, of in state(whole).items()}
            for name in mine:
                assert torch.equal(mine[name], theirs[name]), (name, training)
            assert {n for n in theirs if n.startswith("gradient")} <= mine.keys()
    return model


def load_scaled(module: nn.Module, factor: float) -> None:
    """Give all that is saved of a module other values."""
    with torch.no_grad():
        for of in {of.data_ptr(): of for of in module.state_dict().values()}.values():
            of.mul_(factor if of.is_floating_point() else 1)


def linears(number: int) -> Any:
    return nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(number))


class TwoNames(nn.Module):
    """A view is changed in place after other layers, and the whole is read then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        half = x[:, :2]
        y = self.layers[2](self.layers[1](x + 1.0))
        half.mul_(y[:, :2].detach())
        made: Tensor = self.layers[3](y + x * 1.0)
        return made


class GivenBack(nn.Module):
    """Dropout that does nothing gives the very tensor that it was given, which is changed later."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * 1.0
        same = functional.dropout(x, 0.5, training=False)
        y = self.layers[2](self.layers[1](x + 1.0))
        same.detach().mul_(2.0)
        made: Tensor = self.layers[3](y + x * 1.0 + same)
        return made


class Einsum(nn.Module):
    """A view whose operation does not say that it is one, changed behind other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * 1.0
        turned = torch.einsum("ij->ji", x)
        y = self.layers[2](self.layers[1](x + 1.0))
        turned.detach().mul_(2.0)
        made: Tensor = self.layers[3](y + x * 1.0)
        return made


class Statistics(nn.Module):
    """Running means that no schema says are changed: of a norm that runs several times, and of
    buffers that are not saved and are read elsewhere."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(6)
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True)
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("var", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:2]:
            x = self.norm(layer(x).unsqueeze(0)).squeeze(0)
        x = self.layers[2](x)
        x = functional.batch_norm(x, self.mean, self.var, training=self.training)
        made: Tensor = self.layers[4](self.layers[3](x) + self.mean.exp())
        return self.layers[5](made)  # type: ignore[no-any-return]


class OneNorm(nn.Module):
    """A norm under two names, whose running mean is read elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = linears(5), nn.BatchNorm1d(WIDTH)
        self.again = self.norm

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.layers[1](self.norm(self.layers[0](x))))
        x = self.layers[3](self.layers[2](x))
        mean: Any = self.norm.running_mean
        return self.layers[4](x - mean)  # type: ignore[no-any-return]


class Names(nn.Module):
    """Names that layers have themselves, and a norm that is frozen while the rest trains."""

    def __init__(self) -> None:
        super().__init__()
        self.constants, self.operations = nn.BatchNorm1d(WIDTH), linears(3)
        self.contexts, self.frozen = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
        self.by = torch.full((WIDTH,), 0.5)

    def train(self, mode: bool = True) -> "Names":
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.operations[0](x)) * self.by
        x = self.constants(self.operations[1](x))
        return self.contexts(self.operations[2](x))  # type: ignore[no-any-return]


class OnlyInEvaluation(nn.Module):
    """A layer at the front that training does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.front = linears(4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.training else self.front(x)
        for layer in self.layers:
            x = layer(x)
        return x


class RunningMean(nn.Module):
    """A mean that is kept in no_grad, saved in a buffer, and read in another place."""

    mean: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
                self.seen.add_(1)
        x = self.layers[2](x - self.mean)
        made: Tensor = self.layers[3](x / (self.seen + 1))
        return made


class Contexts(nn.Module):
    """Autocast, no_grad, and tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)
        self.by = torch.full((WIDTH,), 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.by
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.layers[1](x)
        with torch.no_grad():
            z = self.layers[2](x) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        made: Tensor = self.layers[3](y.float() + z)
        return made


class Tables(nn.Module):
    """A table that depends on no input, which all layers read; one that is saved; and a mask that
    does depend on one."""

    frequencies: Tensor
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(6)
        self.register_buffer("frequencies", torch.arange(WIDTH) / 7, persistent=False)
        self.register_buffer("table", torch.rand(3, WIDTH))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(3), self.frequencies)
        angles.mul_(2.0)[0].fill_(0.5)
        turned, mask = angles.cos() + angles.sin(), keep.unsqueeze(1).to(x.dtype)
        for layer in self.layers:
            x = (layer(x) * turned * self.frequencies.exp() + self.table[:3]) * mask
        return x


class Draws(nn.Module):
    """Random numbers that nobody reads, and some that all layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(3, WIDTH)
        for layer in self.layers:
            functional.dropout(x, 0.5, self.training)
            x = functional.dropout(layer(x), 0.5, self.training) + noise
        return x


class OtherInEvaluation(nn.Module):
    """Another graph, with the weights in the same order, and one with only some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(5)

    def forward(self, x: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if self.training or place % 2 == 0:
                x = torch.tanh(layer(x)) if self.training else layer(x).clamp(-1, 1)
        return x


class Backwards(nn.Module):
    """In evaluation the layers run the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if self.training else reversed(self.layers):
            x = layer(x)
        return x


class Shared(nn.Module):
    """Layers that run several times, and a norm that counts what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm = linears(2), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.norm(self.layers[1](self.layers[0](x)))
        return x


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "two names": (TwoNames, torch.rand(3, WIDTH)),
    "given back": (GivenBack, torch.rand(3, WIDTH)),
    "einsum": (Einsum, torch.rand(3, WIDTH)),
    "statistics": (Statistics, torch.rand(3, WIDTH)),
    "one norm": (OneNorm, torch.rand(3, WIDTH)),
    "names": (Names, torch.rand(3, WIDTH)),
    "only in evaluation": (OnlyInEvaluation, torch.rand(3, WIDTH)),
    "running mean": (RunningMean, torch.rand(3, WIDTH)),
    "contexts": (Contexts, torch.rand(3, WIDTH)),
    "tables": (Tables, (torch.rand(3, WIDTH), torch.tensor([True, False, True]))),
    "random numbers": (Draws, torch.rand(3, WIDTH)),
    "other in evaluation": (OtherInEvaluation, torch.rand(3, WIDTH)),
    "backwards in evaluation": (Backwards, torch.rand(3, WIDTH)),
}


@pytest.mark.parametrize("name", CASES)
def test_layers_on_ranks_of_their_own_have_the_modules_bits(name: str) -> None:
    make, inputs = CASES[name]
    torch.manual_seed(1)
    model = check_like(make().train(), inputs)
    least = {"backwards in evaluation": 1, "one norm": 2}.get(name, 3)
    assert len(model.layers) >= least


def test_layers_that_run_several_times_share_their_weights() -> None:
    """And what a norm counts is in one layer."""
    torch.manual_seed(1)
    module = Shared()
    model = axrt.traced(module, (torch.rand(3, WIDTH), None), loss_fn)
    whole = apart(model).train()
    found = through(whole, torch.ones(3, WIDTH))
    assert torch.equal(found, copy.deepcopy(module).train()(torch.ones(3, WIDTH)))
    assert int(next(of for n, of in whole.named_buffers() if "tracked" in n)) == 2


class Drawn(nn.Module):
    """A random program: linear layers, views, changes in place, skips and buffers."""

    count: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.layers = seed, linears(6)
        self.register_buffer("count", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        draw = random.Random(self.seed)
        kept = [x * 1.0]
        for place in range(6):
            kept.append(self.layers[place](draw.choice(kept)))
            for _ in range(draw.randrange(4)):
                self._step(draw, kept)
        return torch.stack([one.sum(-1) for one in kept if one.dim() == 2]).sum(0)

    def _step(self, draw: random.Random, kept: list[Tensor]) -> None:
        one, other = draw.choice(kept), draw.choice(kept)
        what = draw.randrange(10)
        if what == 0:
            kept.append(one.view(-1, 2, 2).transpose(1, 2).reshape(-1, WIDTH))
        elif what == 1:
            one.detach().mul_(1.25)
        elif what == 2:
            kept.append(one.t().t())
        elif what == 3 and self.training:
            self.count.add_(one.detach().sum(0))
        elif what == 4:
            kept.append(one + self.count.clone())
        elif what == 5:
            kept.append(functional.dropout(one, 0.5, training=False))
        elif what == 8:
            kept.append(torch.einsum("ij->ij", one))
        elif what == 9:
            kept.append(torch.unsafe_split(one, WIDTH, 1)[0] + one)
        elif what == 6:
            one.detach()[0].copy_(other.detach()[1])
        else:
            kept.append(one + other)


def runs(module: nn.Module, inputs: Tensor) -> bool:
    try:
        for training in (True, False):
            copy.deepcopy(module).train(training)(inputs).sum().backward()
    except RuntimeError:
        return False
    return True


@swept(("first", [0, 1000, 2000, 3000]), quick=1)
def test_random_programs_have_the_modules_bits(first: int) -> None:
    """Those that eager code runs, whose changes in place autograd does not refuse."""
    tried, seeds = 0, itertools.count(first)
    while tried < 12:
        torch.manual_seed(seed := next(seeds))
        module, inputs = Drawn(seed), torch.rand(3, WIDTH)
        if runs(module, inputs):
            check_like(module, inputs)
            tried += 1


def test_tables_follow_the_types_of_buffers_and_outlive_no_mode() -> None:
    inputs = CASES["tables"][1]
    model = axrt.traced(Tables(), (inputs, None), loss_fn)
    first = apart(model)[0]
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(first(inputs)[0], FakeTensor)
    assert type(first(inputs)[0]) is Tensor
    types = set()
    for layer in apart(model):
        tables = cast(TracedLayer, layer)._parts[True].tables
        for of in (layer, copy.deepcopy(layer).double()) if tables else ():
            assert tables
            types |= {one.dtype for one in tables.of(of, CPU)}
    assert {torch.float32, torch.float64} <= types


class OneTensorTwice(nn.Module):
    """A tensor that operations give back as it is: both are read by every layer behind it.

    Args:
        again: what gives it back, or a tensor that has its values.
    """

    def __init__(self, again: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        one = self.layers[0](x)
        same = self.again(one)
        out = one + 1.0
        for layer in self.layers[1:]:
            out = layer(out) * one + same.sin()
        return cast(Tensor, out)


GIVE_BACK: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout in evaluation": lambda x: functional.dropout(x, 0.5, training=False),
    "dropout of nothing": lambda x: functional.dropout(x, 0.0),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.0, training=True),
    "its own type": lambda x: x.float(),
    "another's type": lambda x: x.type_as(x),
    "flatten": lambda x: x.flatten(1),
    "contiguous": lambda x: x.contiguous(),
    "in place": torch.relu_,
    "in place, after a view": lambda x: (x.view(-1, 4, 4), x.mul_(1.5))[1],
    "of a view": lambda x: x.view(-1, 4, 4).flatten(1),
}


@pytest.mark.parametrize("name", GIVE_BACK)
def test_a_tensor_that_is_given_back_has_one_gradient(name: str) -> None:
    """Sums of its parts in another order would have other bits."""
    for seed in range(4):
        torch.manual_seed(seed)
        check_like(OneTensorTwice(GIVE_BACK[name]), torch.rand(5, 16))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return self.layer(x)  # type: ignore[no-any-return]
        return x


def test_a_branch_on_values_is_refused_with_its_line() -> None:
    with pytest.raises(axrt.ModelError, match=r"test_graphs.py:\d+, `if x.sum\(\) > 0:`, depends"):
        axrt.traced(Branches(), (torch.rand(2, WIDTH), None), loss_fn)


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        (
            (torch.rand(3, WIDTH), 1),
            r"\(float32 of shape \(3, 4\), 1\), and the sample has float32",
        ),
        (torch.rand(2, WIDTH), r"float32 of shape \(2, 4\), and the sample has float32 of shape"),
        (torch.rand(3, WIDTH).double(), "float64 of shape"),
        ((torch.rand(3, WIDTH),), "expected the same shapes"),
    ],
)
def test_a_microbatch_unlike_the_sample_is_refused_with_both(inputs: Any, told: str) -> None:
    model = axrt.traced(TwoNames(), (torch.rand(3, WIDTH), None), loss_fn)
    with pytest.raises(axrt.DataError, match=told):
        model.sequential(0)(inputs)


def test_backward_hooks_are_refused_by_name() -> None:
    module = TwoNames()
    module.layers[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(axrt.ModelError, match=r"layers.1 \(Linear\) has backward hooks"):
        axrt.traced(module, (torch.rand(3, WIDTH), None), loss_fn)


def test_forward_hooks_run_once() -> None:
    module = TwoNames()
    module.layers[1].register_forward_hook(lambda _, __, out: out * 2)
    check_like(module, torch.rand(3, WIDTH))


class Selected(nn.Module):
    """What travels within a layer has a size that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        few = self.layers[1](x[x[:, 0] > 0])
        return self.layers[3](self.layers[2](x + few.sum(0)))  # type: ignore[no-any-return]


def test_a_size_that_depends_on_values_does_not_travel() -> None:
    torch.manual_seed(1)
    assert len(check_like(Selected(), torch.rand(3, WIDTH)).layers) > 1


def test_inputs_that_the_forward_does_not_take_are_told() -> None:
    told = r"unexpected keyword argument 'y'; expected a sample whose inputs its forward takes"
    with pytest.raises(axrt.ModelError, match=told):
        axrt.traced(TwoNames(), ({"y": torch.rand(3, WIDTH)}, None), loss_fn)


def test_a_module_is_trained_in_the_mode_that_it_is_in() -> None:
    """As in plain torch: dropout of one that was not put into training is off."""
    torch.manual_seed(1)
    module = Draws().eval()
    model = axrt.traced(module, (torch.ones(3, WIDTH), None), loss_fn)
    torch.manual_seed(2)
    expected = module(torch.ones(3, WIDTH))
    torch.manual_seed(2)
    assert torch.equal(model.sequential(0)(torch.ones(3, WIDTH)), expected)


def penalized(weight: Tensor) -> Any:
    return lambda outputs, targets: loss_fn(outputs, targets) + weight.square().sum()


def test_a_loss_that_looks_at_weights_of_other_stages_is_refused() -> None:
    module, sample = TwoNames(), (torch.rand(3, WIDTH), None)
    model = axrt.traced(module, sample, penalized(module.layers[0].weight))

    def on_one(transport: Any) -> Any:
        return axrt.initialize(copy.copy(model), transport=transport)

    with pytest.raises(axrt.ConfigError, match="loss_fn uses layer 0"):
        LocalWorld(2).run(on_one)
    module.layers[3].weight = module.layers[0].weight  # of which layers have copies
    with pytest.raises(axrt.ConfigError, match="loss_fn is a function that uses a Parameter"):
        axrt.traced(module, sample, penalized(module.layers[0].weight))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = nn.Linear(WIDTH, WIDTH), torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.layer(x) * self.count  # type: ignore[no-any-return]


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return -gradient


def reversed_(_: Any, x: Tensor) -> Any:
    return Reverse.apply(x)  # type: ignore[no-untyped-call]


def hooked(_: Any, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 0.5)  # type: ignore[no-untyped-call]
    return x


def counted(self: Any, x: Tensor) -> Any:
    self.calls += 1
    return x * self.calls


def averaged(self: Any, x: Tensor) -> Any:
    self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
    return x - self.mean


def drawn(_: Any, x: Tensor) -> Tensor:
    return x * random.random()


def drawn_by_numpy(_: Any, x: Tensor) -> Tensor:
    return x * float(np.random.rand())


def seeded(_: Any, x: Tensor) -> Tensor:
    torch.manual_seed(7)
    return x + torch.rand(3, WIDTH)


def inferred(_: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        gate = x.sum().sigmoid()
    return x * gate.clone()


def checkpointed(_: Any, x: Tensor) -> Any:
    return checkpoint(torch.tanh, x, use_reentrant=True)


def saving(_: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one * 2, lambda one: one):
        return x * x


class Between(nn.Module):
    """Something between two layers that no graph has."""

    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.does, self.calls = linears(2), does, 0
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.does(self, self.layers[0](x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("does", "told"),
    [
        (reversed_, "`return Reverse.apply.*calls Reverse, an autograd.Function"),
        (hooked, "sets a hook of a tensor"),
        (counted, "assigns its attribute calls"),
        (averaged, "assigns its buffer mean.*self.mean.copy_"),
        (drawn, "random numbers of Python or numpy"),
        (drawn_by_numpy, "random numbers of Python or numpy"),
        (seeded, "seeds torch's generator"),
        (inferred, "enters torch.inference_mode"),
        (checkpointed, "CheckpointFunction.*use_reentrant=False"),
        (saving, "sets hooks of saved tensors"),
    ],
)
def test_what_no_graph_has_is_refused(does: Callable[[Any, Tensor], Tensor], told: str) -> None:
    module = Between(does)
    before = {name: of.clone() for name, of in module.state_dict().items()}
    with pytest.raises(axrt.ModelError, match=told):
        axrt.traced(module, (torch.rand(3, WIDTH), None), loss_fn)
    for name, of in module.state_dict().items():
        assert type(of) is Tensor
        assert torch.equal(of, before[name])
    assert module.calls == 0


def test_an_input_may_stand_at_two_places_of_the_sample() -> None:
    class Difference(TwoNames):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return self.layers[1](self.layers[0](x) - y)  # type: ignore[no-any-return]

    module, same = Difference(), torch.zeros(3, WIDTH)
    layers = axrt.traced(module, ((same, same), None), loss_fn).sequential(0)
    given = torch.rand(3, WIDTH), torch.rand(3, WIDTH)
    assert torch.equal(layers(given), module(*given))


def test_names_that_python_has_itself_are_refused() -> None:
    module = nn.Sequential(nn.ModuleDict({"class": nn.Linear(WIDTH, WIDTH)})["class"])
    axrt.traced(module, (torch.rand(3, WIDTH), None), loss_fn)
    named = nn.Module()
    named.add_module("class", nn.Linear(WIDTH, WIDTH))
    with pytest.raises(axrt.ModelError, match="has the name 'class'"):
        axrt.traced(named, (torch.rand(3, WIDTH), None), loss_fn)


class OneMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.turned = self.layer.weight.detach().t()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) @ self.turned  # type: ignore[no-any-return]


class OneOfTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, self.layer, torch.sin, (x,))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (Counted, r"count is a tensor .* in place, and no buffer.*register_buffer\('count'"),
        (OneMemory, "turned has memory of layer.weight"),
        (OneOfTwo, r"`return torch.cond\(|found cond in the module's graph"),
    ],
)
def test_what_layers_of_their_own_could_not_do_is_refused(
    make: Callable[[], nn.Module], told: str
) -> None:
    with pytest.raises(axrt.ModelError, match=told):
        axrt.traced(make(), (torch.rand(3, WIDTH), None), loss_fn)


def test_a_table_that_is_handed_out_may_be_changed() -> None:
    class Masked(TwoNames):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), torch.ones(3, 3).triu()

    layers = axrt.traced(Masked(), (torch.rand(3, WIDTH), None), loss_fn).sequential(0)
    _, mask = layers(torch.ones(3, WIDTH))
    mask.mul_(5.0)
    assert layers(torch.ones(3, WIDTH))[1].max() == 1.0


class Multiplied(Tables):
    """A table that is a product, which autocast rounds."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        turned = torch.full((3, 1), 1.1) @ self.frequencies.unsqueeze(0)
        made: Tensor = self.layers[1](self.layers[0](x)) + turned
        return made * keep.unsqueeze(1)


def test_tables_under_autocast_are_their_own() -> None:
    inputs = CASES["tables"][1]
    torch.manual_seed(1)
    module = Multiplied()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = module(*inputs)
    model = axrt.traced(module, (inputs, None), loss_fn, compute="bfloat16")
    layers = model.sequential(0)
    assert not torch.equal(layers(inputs), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layers(inputs), expected)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("a module", (1, 2), None), "got a str; expected a torch.nn.Module"),
        ((TwoNames(), torch.ones(3), None), "got a sample of type Tensor"),
        ((TwoNames(), (1, 2, 3), None), "got a sample of type tuple of length 3"),
        ((TwoNames(), (torch.ones(3, WIDTH, device="meta"), 2), None), "on cpu and meta"),
        ((TwoNames(), (UserDict(), 2), None), "UserDict cannot travel.*make a dict"),
        ((TwoNames(), (1, 2), None), "inputs without a tensor"),
    ],
)
def test_what_is_no_module_or_no_sample_is_refused(arguments: Any, told: str) -> None:
    with pytest.raises(axrt.ConfigError, match=told):
        axrt.traced(*arguments)


def test_a_module_without_values_is_planned_and_not_trained() -> None:
    with torch.device("meta"):
        model = axrt.traced(TwoNames(), (torch.rand(3, WIDTH), None), loss_fn)
    assert model.boundaries(2) == [0, 1, 3]
    with pytest.raises(axrt.ConfigError, match="layers.0.weight is on the meta device"):
        axrt.initialize(model)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"precision": {"compute": "bfloat16"}}, r"axrt.traced\(..., compute='bfloat16'\)"),
        ({"precision": {"weights": "bfloat16"}}, r"axrt.traced\(..., weights='bfloat16'\)"),
        ({"parallel": {"tensor_shards": 2}}, "a traced module has shapes of whole layers"),
    ],
)
def test_settings_that_a_graph_cannot_have_are_refused(section: Any, told: str) -> None:
    model = axrt.traced(TwoNames(), (torch.rand(3, WIDTH), None), loss_fn)
    with pytest.raises(axrt.ConfigError, match=told):
        axrt.initialize(model, config=section)
