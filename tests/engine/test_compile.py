"""Layers that torch compiles: before the first step, each kind once, and with the bits of compiled
layers wherever they are held.

Nothing else compiles: what is compiled, and when, is read from a backend that counts; bits are
those of `aot_eager`, which keeps them. The real compiler, inductor, takes half a minute, and has
one case.
"""

import shutil
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt import LayerSpec, PipelineModule
from axrt.transport.local import LocalWorld

from ..sweeps import swept
from .models import motley, perceptron
from .reference import (
    Outcome,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

# The compiler looks at .grad of what is no leaf, and says nothing unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute")

MICROBATCHES, STEPS = 4, 2
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Any]


@pytest.fixture(autouse=True)
def compiler_with_nothing_in_it() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[threading.Thread, str]]:
    """What the backend "counting" has compiled: on which rank, and the operations of the graph."""
    graphs: list[tuple[threading.Thread, str]] = []

    def counting(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        assert not any(isinstance(one, torch.SymInt) for one in example), (
            "a shape is taken for variable"
        )
        operations = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
        graphs.append((threading.current_thread(), " ".join(operations)))
        return graph.forward

    _registered(monkeypatch, "counting", counting)
    return graphs


def _registered(monkeypatch: pytest.MonkeyPatch, name: str, backend: Backend) -> None:
    from torch._dynamo.backends import registry

    torch.compiler.list_backends()  # fills the registry at its first call
    for known in ("_COMPILER_FNS", "_BACKENDS"):
        monkeypatch.setattr(registry, known, dict(getattr(registry, known)))
    registry.register_backend(backend, name)


def compiling(backend: str, policy: str = "1f1b") -> dict[str, dict[str, Any]]:
    return configured(MICROBATCHES, schedule={"policy": policy}, run={"compile": backend})


def train(
    ranks: int, whole: PipelineModule, config: dict[str, dict[str, Any]], batches: Any = BATCHES
) -> Outcome:
    return together(
        LocalWorld(ranks, 0).run(
            lambda transport: train_on_a_rank(
                transport, whole, batches, STEPS, config, sample=batches(0)[0]
            )
        )
    )


@swept(
    ("ranks, policy", [(1, "1f1b"), (2, "zb-h1"), (4, "adaptive"), (4, "1f1b")]),
    quick=2,
)
def test_compiled_layers_have_the_bits_of_those_that_are_not_where_the_backend_keeps_them(
    ranks: int, policy: str
) -> None:
    assert train(ranks, perceptron(), compiling("aot_eager", policy)) == train_in_plain_torch(
        perceptron(), BATCHES, STEPS
    )


def test_structured_activations_and_functions_in_place_compile_too() -> None:
    batches = random_batches((6, 12), classes=4, microbatches=MICROBATCHES)
    assert train(3, motley(), compiling("eager"), batches) == train_in_plain_torch(
        motley(), batches, STEPS
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.skipif(not shutil.which("g++"), reason="inductor wants a C++ compiler")
def test_what_inductor_makes_does_not_depend_on_where_the_model_is_cut() -> None:
    alone = train(1, perceptron(3), compiling("inductor"))
    assert train(2, perceptron(3), compiling("inductor")) == alone


def test_everything_is_compiled_before_the_first_step(
    compiled: list[tuple[threading.Thread, str]],
) -> None:
    def here() -> int:
        return sum(rank == threading.current_thread() for rank, _ in compiled)

    def on_a_rank(transport: axrt.transport.Transport) -> tuple[int, int]:
        with axrt.initialize(
            perceptron(), config=compiling("counting"), transport=transport, sample=BATCHES(0)[0]
        ) as engine:
            before = here()
            for _ in range(2):
                engine.train_batch(iter(BATCHES(0)))
                engine.eval_batch(BATCHES(1))
            return before, here()

    for before, after in LocalWorld(2, 0).run(on_a_rank):
        assert 0 < before == after
    assert sum("layer_norm" in graph for _, graph in compiled) == 5, (
        "each rank trains and evaluates, and in the first layer no input wants a gradient"
    )


def test_layers_of_many_sizes_are_all_compiled(
    compiled: list[tuple[threading.Thread, str]],
) -> None:
    sizes = range(16, 2, -1)
    layers = [LayerSpec(nn.Linear, size, size - 1) for size in sizes]
    model = PipelineModule(layers, lambda out, target: functional.cross_entropy(out, target % 2))
    with axrt.initialize(
        model, config=compiling("counting"), transport=LocalWorld(1).alone(), sample=BATCHES(0)[0]
    ):
        assert sum("linear" in graph for _, graph in compiled) == 2 * len(sizes)


class Scaled(nn.Module):
    """Prints alike whatever its factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, value: Tensor) -> Tensor:
        return value * self.factor


def test_layers_that_print_alike_and_differ_are_all_compiled(
    compiled: list[tuple[threading.Thread, str]],
) -> None:
    layers = [
        LayerSpec(nn.Linear, 16, 5),
        *(LayerSpec(Scaled, 1 + number / 8) for number in range(12)),
    ]
    with axrt.initialize(
        PipelineModule(layers, functional.cross_entropy),
        config=compiling("counting"),
        transport=LocalWorld(1).alone(),
        sample=BATCHES(0)[0],
    ):
        assert sum("mul" in graph for _, graph in compiled) == 2 * 12


def test_replicas_may_compile() -> None:
    config, batches = (
        compiling("aot_eager"),
        random_batches((6, 16), classes=5, microbatches=2 * MICROBATCHES),
    )
    config["parallel"] = {"data": 2}

    def trained(config: dict[str, dict[str, Any]]) -> list[Outcome]:
        run = lambda transport: train_on_a_rank(  # noqa: E731
            transport, perceptron(), batches, STEPS, config, sample=batches(0)[0]
        )
        return LocalWorld(2, 0).run(run)

    plain = configured(MICROBATCHES, schedule={"policy": "1f1b"}, parallel={"data": 2})
    assert trained(config) == trained(plain)


def test_compiled_layers_run_again_and_go_through_two_pipes() -> None:
    def train(ranks: int, policy: str, compile: str, recompute: str) -> list[Outcome]:
        config = configured(
            MICROBATCHES,
            schedule={"policy": policy},
            memory={"recompute": recompute},
            run={"compile": compile},
        )
        sample = BATCHES(0)[0]
        return LocalWorld(ranks, 1).run(
            lambda t: train_on_a_rank(t, perceptron(), BATCHES, STEPS, config, sample=sample)
        )

    for ranks, policy in ((1, "gpipe"), (2, "chimera")):
        assert train(ranks, policy, "aot_eager", "full") == train(ranks, policy, "", "none")


class Rebinds(nn.Module):
    """A buffer that is bound anew, one that changes in evaluations too, a counter and a list, all
    of which the output shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rebound", torch.zeros(()))
        self.register_buffer("always", torch.zeros(()))
        self.linear = nn.Linear(16, 5)
        self.count, self.seen = 0, [0]

    rebound: Tensor
    always: Tensor

    def forward(self, value: Tensor) -> Tensor:
        self.rebound = self.rebound + 1
        self.always.add_(1)
        self.count += 1
        self.seen[0] += 1
        self.last = self.count
        out: Tensor = self.linear(value) * (
            1 + self.rebound + self.always + self.count + self.seen[0]
        )
        return out


class Sums(nn.Module):
    """A loss with a state."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls = self.calls + 1
        loss: Tensor = functional.cross_entropy(out, target) * self.calls
        return loss


def test_modules_are_after_compiling_as_they_were() -> None:
    def model() -> PipelineModule:
        return PipelineModule([LayerSpec(Rebinds)], Sums())

    plain = train(1, model(), configured(MICROBATCHES))
    assert train(1, model(), compiling("eager")) == plain


def test_a_layer_that_works_in_place_does_not_change_what_the_next_is_compiled_with() -> None:
    def shifted(tokens: Tensor) -> Tensor:
        return tokens.add_(1)

    tokens = [(torch.arange(9).repeat(2, 1), torch.zeros(2, dtype=torch.long))] * MICROBATCHES
    model = PipelineModule(
        [shifted, LayerSpec(nn.Embedding, 10, 4), lambda value: value.sum(1)],
        functional.cross_entropy,
    )
    with axrt.initialize(
        model, config=compiling("eager"), transport=LocalWorld(1).alone(), sample=tokens[0]
    ):
        assert int(tokens[0][0].max()) == 8


class Drifts(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(value)


def test_a_layer_that_changes_its_parameters_is_refused() -> None:
    model = PipelineModule([LayerSpec(Drifts, 16, 5)], functional.cross_entropy)
    with pytest.raises(
        axrt.ConfigError, match="a layer changes its own parameters as it runs"
    ) as raised:
        axrt.initialize(
            model, config=compiling("eager"), transport=LocalWorld(1).alone(), sample=BATCHES(0)[0]
        )
    assert "run.compile = '' trains without" in "".join(raised.value.__notes__)


def test_compiling_leaves_weights_and_buffers_and_the_users_generator_alone() -> None:
    def model() -> PipelineModule:
        return PipelineModule(
            [LayerSpec(nn.Linear, 16, 8), LayerSpec(nn.BatchNorm1d, 8), LayerSpec(nn.Linear, 8, 5)],
            functional.cross_entropy,
        )

    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    with axrt.initialize(
        model(),
        config=compiling("aot_eager"),
        transport=LocalWorld(1).alone(),
        sample=BATCHES(0)[0],
    ) as engine:
        assert torch.equal(torch.rand(1), expected)
        layers = dict(engine._model.layers())
        assert dict(layers[1].named_buffers())["num_batches_tracked"] == 0
        assert not dict(layers[1].named_buffers())["running_mean"].any()
        assert all(parameter.grad is None for _, parameter in engine.named_parameters())
    assert train(2, model(), compiling("aot_eager")) == train_in_plain_torch(
        model(), BATCHES, STEPS
    )


def test_auto_measures_what_is_compiled(compiled: list[tuple[threading.Thread, str]]) -> None:
    config = compiling("counting", "auto")
    with axrt.initialize(
        perceptron(), config=config, transport=LocalWorld(1).alone(), sample=BATCHES(0)[0]
    ) as engine:
        assert compiled
        assert engine.candidates


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_sample_compiling_is_refused_on_every_rank(ranks: int) -> None:
    model, config = perceptron(), compiling("eager")
    with pytest.raises(
        axrt.ConfigError,
        match="compiles before the first step with a microbatch, and none was given",
    ):
        LocalWorld(ranks, 0).run(
            lambda transport: axrt.initialize(model, config=config, transport=transport)
        )


def test_a_backend_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        axrt.ConfigError, match=r"run.compile = 'indcutor'; did you mean 'inductor'\?"
    ):
        axrt.initialize(
            perceptron(),
            config=compiling("indcutor"),
            transport=LocalWorld(1).alone(),
            sample=BATCHES(0)[0],
        )


def test_a_backend_that_fails_says_which_key_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        raise OSError("no compiler here")

    _registered(monkeypatch, "failing", failing)
    with pytest.raises(Exception, match="no compiler here") as raised:
        axrt.initialize(
            perceptron(),
            config=compiling("failing"),
            transport=LocalWorld(1).alone(),
            sample=BATCHES(0)[0],
        )
    assert "while compiling as run.compile = 'failing' wants it" in "".join(raised.value.__notes__)
