"""K-FAC by its keys, beside the published rule written down once more in numpy."""

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import axrt
from axrt.config import Optimizer
from axrt.errors import AxrtError, ConfigError
from axrt.model.deferral import Deferral
from axrt.model.matrices import trained_in
from axrt.store import kfac
from axrt.store.owners import owners_of_stage
from axrt.store.presets import optimizer_factory
from axrt.transport.local import LocalWorld

from ..sweeps import fewer, swept
from .matrices import MICROBATCHES, Block, batches, six_blocks, trained_on
from .reference import SEED, Item, Outcome, configured, train_on_a_rank

WIDTH, STEPS = 6, fewer(10, 8)
OF_ALL = {"lr": 0.05, "rest_lr": 0.003, "weight_decay": 0.1}
KFAC: dict[str, Any] = {
    "name": "kfac",
    "refresh": 1,
    "lag": 1,
    "damping": 0.01,
    "kl_clip": 0.002,
    **OF_ALL,
}
SLOW: dict[str, Any] = {**KFAC, "refresh": 3, "lag": 2, "sample": 2, "kl_clip": 0.0}
DOUBLE: dict[str, Any] = {"dtype": torch.float64}


class First(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.double())


def model() -> axrt.PipelineModule:
    first = axrt.LayerSpec(First, 8, WIDTH, **DOUBLE)
    last = axrt.LayerSpec(nn.Linear, WIDTH, 5, **DOUBLE)
    return six_blocks(first, axrt.LayerSpec(Block, WIDTH, 2 * WIDTH, False, **DOUBLE), last)


def trained(
    pipe: int,
    data: int,
    keys: dict[str, Any],
    steps: int = STEPS,
    of: Callable[[], Any] = model,
    given: Callable[[int], list[Item]] | None = None,
    **sections: Any,
) -> Outcome:
    keys = {"optimizer": keys, "memory": {"zero": int(data > 1)}, **sections}
    return trained_on(pipe, data, of, steps, given, **keys)


@cache
def alone(slowly: bool) -> Outcome:
    return trained(1, 1, SLOW if slowly else KFAC)


def is_matrix(name: str) -> bool:
    return name[0] in "123456" and name.endswith("weight")


class Rule:
    """The published rule for one matrix."""

    def __init__(self, rows: int, columns: int, place: int, keys: dict[str, Any]) -> None:
        self.a, self.g, self.keys, self.place = np.eye(columns), np.eye(rows), keys, place
        root = 1 + keys["damping"] ** 0.5
        self.inverses = np.eye(rows) / root, np.eye(columns) / root
        self.waiting: dict[int, Any] = {}
        self.momentum = np.zeros((rows, columns))

    def change(self, step: int, gradient: Any) -> Any:
        self.inverses = self.waiting.pop(step, self.inverses)
        return self.inverses[0] @ gradient @ self.inverses[1]

    def learn(self, step: int, inputs: Any, of_outputs: Any, all_rows: int) -> None:
        """`of_outputs`: gradients of the mean loss over `all_rows`."""
        refresh, offset = self.keys["refresh"], self.place % self.keys["refresh"]
        if step % self.keys.get("sample", 1) == 0:
            rows = len(inputs)
            self.a = 0.95 * self.a + 0.05 * inputs.T @ inputs / rows
            each = of_outputs * all_rows
            self.g = 0.95 * self.g + 0.05 * each.T @ each / rows
        if step == 0 or (step >= refresh + offset and (step - offset) % refresh == 0):
            pi = np.sqrt((np.trace(self.a) / len(self.a)) / (np.trace(self.g) / len(self.g)))
            root = np.sqrt(self.keys["damping"])
            self.waiting[step + self.keys["lag"]] = (
                np.linalg.inv(self.g + root / pi * np.eye(len(self.g))),
                np.linalg.inv(self.a + root * pi * np.eye(len(self.a))),
            )


def array_of(tensor: Tensor | None) -> Any:
    assert tensor is not None
    return tensor.numpy()


def by_numpy(
    given: Callable[[int], Sequence[Item]],
    keys: dict[str, Any],
    owner_of: Callable[[str], int] | None = None,
) -> Outcome:
    """Steps by it; with factors of all microbatches, or of those of a matrix's owner."""
    whole = model().sequential(SEED)
    named = dict(whole.named_parameters())
    names = [name for name in named if is_matrix(name)]
    shapes = {name: named[name].shape for name in names}
    rules = {name: Rule(*shapes[name][:2], place, keys) for place, name in enumerate(names)}  # type: ignore[call-arg]
    rest = [p for name, p in named.items() if not is_matrix(name)]
    decays = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(decays, lr=keys["rest_lr"], betas=(0.9, 0.95))
    seen: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name in names:

        def note(module: Any, inputs: Any, out: Tensor, name: str = name) -> None:
            out.retain_grad()
            seen[name].append((inputs[0].detach(), out))

        whole.get_submodule(name.removesuffix(".weight")).register_forward_hook(note)
    outcome = Outcome([], [], {})
    for step in range(STEPS):
        items = given(step)
        seen.update({name: [] for name in names})
        losses = [nn.functional.cross_entropy(whole(inputs), target) for inputs, target in items]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        outcome.losses.append(float(torch.stack(losses).mean().detach()))
        gradients = {name: array_of(named[name].grad) for name in names}
        changes = {name: rules[name].change(step, gradients[name]) for name in names}
        slope = sum((changes[name] * gradients[name]).sum() for name in names)
        lr, most = keys["lr"], keys["kl_clip"]
        nu = min(1.0, np.sqrt(most / (lr**2 * slope))) if most else 1.0
        for name in names:
            mine = owner_of(name) if owner_of else 0
            own = slice(mine * MICROBATCHES, (mine + 1) * MICROBATCHES) if owner_of else slice(None)
            inputs = np.concatenate([x.numpy() for x, _ in seen[name][own]])
            of_outputs = np.concatenate([array_of(out.grad) for _, out in seen[name][own]])
            all_rows = sum(len(x) for x, _ in seen[name])
            rule = rules[name]
            rule.momentum = 0.9 * rule.momentum + nu * changes[name]
            with torch.no_grad():
                named[name].mul_(1 - lr * 0.1).sub_(lr * torch.from_numpy(rule.momentum))
            rule.learn(step, inputs, of_outputs, all_rows)
        adamw.step()
        whole.zero_grad()
    outcome.parameters = {name: p.detach() for name, p in named.items()}
    return outcome


def owners_among(places: range) -> dict[str, int]:
    """The replica, of two, that owns each parameter of a stage."""
    of = model()
    every = [one for place in places for one in trained_in(of.layers[place], place)]
    return {**owners_of_stage(optimizer_factory(Optimizer(**KFAC), of), of.layers, every, 2)}


def assert_close(found: Outcome, expected: Outcome, most: float) -> None:
    assert found.losses == pytest.approx(expected.losses, abs=most)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found.parameters[name], value, rtol=0, atol=most)


@pytest.mark.parametrize("keys", [KFAC, SLOW])
def test_it_is_the_published_rule_with_the_samples_of_all(keys: dict[str, Any]) -> None:
    assert_close(trained(1, 1, keys), by_numpy(batches(1), keys), 1e-12)


@swept(("zero", [2, 1, 3]), ("keys", [SLOW, KFAC]))
def test_it_is_the_published_rule_with_the_samples_of_owners(
    zero: int, keys: dict[str, Any]
) -> None:
    owners = owners_among(range(8))
    assert {owner for name, owner in owners.items() if is_matrix(name)} == {0, 1}
    expected = by_numpy(batches(2), keys, owners.__getitem__)
    memory: dict[str, Any] = {"zero": zero}
    if keys is SLOW:
        memory |= {"bucket_mb": 0.0005, "reductions": 2 if zero == 2 else 1}
    assert_close(trained(1, 2, keys, memory=memory), expected, 1e-12)
    others = by_numpy(batches(2), keys, lambda name: 1 - owners[name])
    with pytest.raises(AssertionError):
        assert_close(others, expected, 1e-6)


@swept(
    (
        "pipe, policy, memory",
        [
            (2, "1f1b", {"bucket_mb": 0.0005}),
            (2, "zb-h1", {}),
            (2, "breadth-first", {"scratch": "host", "offload": "stream"}),
            (4, "zb-v", {"scratch": "disk", "offload": "stream"}),
            (2, "1f1b", {"recompute": "full"}),
            (
                *(2, "breadth-first"),
                {"scratch": "host", "offload": "stream", "offload_parameters": True},
            ),
        ],
    ),
    ("keys", [KFAC, SLOW]),
)
def test_no_bit_hangs_on_ranks_policies_or_memory(
    pipe: int, policy: str, memory: dict[str, Any], keys: dict[str, Any], tmp_path: Any
) -> None:
    expected = alone(keys is SLOW)
    if memory.get("scratch") == "disk":
        memory = {**memory, "scratch": f"disk:{tmp_path}"}
    assert trained(pipe, 1, keys, schedule={"policy": policy}, memory=memory) == expected


@pytest.mark.parametrize(("zero", "policy"), [(1, "zb-h1"), (2, "1f1b"), (3, "1f1b")])
def test_each_stage_of_a_pipeline_has_owners_of_its_own(zero: int, policy: str) -> None:
    owners = {**owners_among(range(4)), **owners_among(range(4, 8))}
    expected = by_numpy(batches(2), KFAC, owners.__getitem__)
    found = trained(2, 2, KFAC, schedule={"policy": policy}, memory={"zero": zero})
    assert_close(found, expected, 1e-12)


class Half(nn.Module):
    """Half the sum of squared errors of each row, whose matrix of second derivatives is that of the
    inputs."""

    def forward(self, found: Tensor, wanted: Tensor) -> Tensor:
        return 0.5 * (found - wanted).pow(2).sum(1).mean()


def test_one_step_of_least_squares_ends_at_the_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """With G the identity, nothing of the factors before, damping 0 and a rate of 1."""
    from axrt.model.factor_sums import FactorSums

    added = FactorSums.add

    def add(self: FactorSums, gradient: Tensor, x: Tensor) -> None:
        added(self, gradient, x)
        self.outputs[0].copy_(torch.eye(3, **DOUBLE) / self.rows)

    monkeypatch.setattr(FactorSums, "add", add)
    torch.manual_seed(1)
    items = [(torch.randn(6, 4, **DOUBLE), torch.randn(6, 3, **DOUBLE)) for _ in range(4)]
    x, wanted = (torch.cat(of) for of in zip(*items, strict=True))
    least = torch.linalg.lstsq(x, wanted).solution.T

    def line() -> axrt.PipelineModule:
        return axrt.PipelineModule([axrt.LayerSpec(nn.Linear, 4, 3, bias=False, **DOUBLE)], Half())

    keys = {
        "name": "kfac",
        "lr": 1.0,
        "weight_decay": 0.0,
        "momentum": 0.0,
        "damping": 0.0,
        "kl_clip": 0.0,
        "betas": [0.9, 0.0],
        "refresh": 1,
        "matrices": "0.weight",
    }
    # The first step has inverses of the identity, and the factors of its samples are there behind
    # it: from wherever it leads, the second ends at the minimum.
    found = trained(1, 1, keys, 2, line, lambda step: items)
    torch.testing.assert_close(found.parameters["0.weight"], least, rtol=0, atol=1e-12)
    before = trained(1, 1, keys, 1, line, lambda step: items).parameters["0.weight"]
    assert float((before - least).norm()) > 0.1


def as_it_is(*layers: Any) -> axrt.PipelineModule:
    return axrt.PipelineModule([*layers], nn.functional.cross_entropy)


class Huge(nn.Module):
    """Multiplies by so much that squares are infinite, and the next layer by as little."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.linear = factor, nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.linear(value * self.factor) / self.factor
        return out


@pytest.mark.filterwarnings("ignore:the inputs of 1")
@pytest.mark.parametrize("factor", [1.0, 1e25])
def test_a_factor_that_is_no_number_drops_the_step(factor: float) -> None:
    def of() -> axrt.PipelineModule:
        return as_it_is(nn.Linear(8, 8), Huge(factor), nn.Linear(8, 5))

    def main(transport: Any) -> list[Any]:
        by_key: Any = None
        config = configured(MICROBATCHES, parallel={"data": 2}, memory={"zero": 1}, optimizer=KFAC)
        with axrt.initialize(of(), by_key, config=config, transport=transport) as engine:
            first = engine.data_rank * MICROBATCHES
            items = batches(2)(0)[first : first + MICROBATCHES]
            return [engine.train_batch(iter(items)) for _ in range(2)]

    for of_rank in LocalWorld(2, 1).run(main):
        assert [result.skipped for result in of_rank] == [factor > 1] * 2
        assert (of_rank[0].loss == of_rank[1].loss) == (factor > 1), "weights are as they were"


def test_the_layer_whose_factor_is_no_number_is_named() -> None:
    with pytest.warns(UserWarning, match=r"the inputs of 1\.linear\.weight, or the gradients of"):
        trained(1, 1, KFAC, 1, lambda: as_it_is(nn.Linear(8, 8), Huge(1e25), nn.Linear(8, 5)))


def test_factors_do_not_know_the_loss_scale() -> None:
    """They would be wrong by its square."""
    keys = {**KFAC, "kl_clip": 0.0}

    def of() -> axrt.PipelineModule:
        return as_it_is(*[axrt.LayerSpec(nn.Linear, *size) for size in ((8, 8), (8, 8), (8, 5))])

    narrow, expected = (
        trained(1, 1, keys, 6, of, precision=precision)
        for precision in ({"weights": "float16", "loss_scale": 4096.0}, {})
    )
    assert_close(narrow, expected, 1e-2)


@pytest.mark.parametrize(("pipe", "data"), [(1, 1), (2, 1), (1, 2)])
def test_a_factor_that_has_no_inverse_is_told_with_a_damping_that_does(
    pipe: int, data: int
) -> None:
    """Eight inputs in a step are of rank 8 at most."""
    keys = {**KFAC, "betas": [0.9, 0.0], "damping": 0.0}

    def few(step: int) -> list[Item]:
        return [(inputs[:1], target[:1]) for inputs, target in batches(data)(step)]

    with pytest.raises(
        AxrtError, match=r"a factor of \d.*weight is not positive definite"
    ) as found:
        trained(pipe, data, keys, 3, given=few)
    enough = float(str(found.value).partition("at least ")[2].split()[0])
    trained(pipe, data, {**keys, "damping": enough}, 3, given=few)


def test_no_step_and_no_refresh_waits_for_a_device() -> None:
    """They read no value: here tensors have none, and whoever asks for one is told so."""
    weight = nn.Parameter(torch.empty(4, 3, device="meta"))
    of = as_it_is(*[axrt.LayerSpec(nn.Linear, *size) for size in ((3, 3), (3, 4), (4, 5))])
    optimizer = optimizer_factory(Optimizer(**KFAC), of)([("1.weight", weight)])
    assert isinstance(optimizer, kfac.KfacAndAdamW)
    for _ in range(3):
        weight.grad = torch.empty_like(weight)
        optimizer.precondition(weight, weight.grad)
        optimizer.step()
        assert any(key.endswith(".due") for key in optimizer.state[weight])
        optimizer.refresh()
        assert not any(key.endswith(".due") for key in optimizer.state[weight])


SHARDED: dict[str, Any] = {"parallel": {"data": 2}, "memory": {"zero": 2}}


class Twice(nn.Linear):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(super().forward(value))


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.linear(torch.tanh(self.linear(value)))
        return out


class WithoutCall(Shared):
    def forward(self, value: Tensor) -> Tensor:
        return nn.functional.linear(value, self.linear.weight)


class AlsoWithoutCall(Shared):
    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.linear(value)
        return out + nn.functional.linear(value, self.linear.weight)


class TwoNames(Shared):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(8, 8)
        self.other.weight = self.linear.weight


def hooked() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
    return layer


@pytest.mark.parametrize(
    ("middle", "sections", "text"),
    [
        (Shared, {}, r"1\.linear\.weight is used 8 times in 4 microbatches"),
        (lambda: Twice(8, 8), {}, r"1\.weight is no weight of a Linear"),
        (
            lambda: axrt.TiedLayerSpec("a", nn.Linear, 8, 8),
            {},
            r"1\.weight is held by several layers",
        ),
        (TwoNames, {}, r"1\.linear\.weight is held by several layers or modules"),
        (WithoutCall, {}, r"1\.linear\.weight is not that of what its torch\.nn\.Linear was given"),
        (AlsoWithoutCall, {}, r"1\.linear\.weight is not that of what"),
        (AlsoWithoutCall, SHARDED, r"1\.linear\.weight is not that of what"),
        (hooked, {"schedule": {"policy": "zb-h1"}}, r"the gradient of 1\.weight is not that of"),
        (Shared, {"parallel": {"data": 2}, "memory": {"zero": 0}}, r"expected memory\.zero = 1"),
        (Shared, {"schedule": {"policy": "chimera"}}, r"2 copies of .*memory\.zero = 1 or more"),
        (Shared, {"optimizer": {**KFAC, "clip": 1.0}}, r"optimizer\.clip = 1 with"),
        (Shared, {"run": {"compile": "default"}}, r"compiled layers do not show"),
        (Shared, {"memory": {"offload": "cpu"}}, r"its factors are where layers compute"),
        (Shared, {"memory": {"offload_activations": 1}}, r"inputs of layers stay"),
        (
            Shared,
            {"parallel": {"data": 4, "group": 2}, "memory": {"zero": 1}},
            r"parallel\.group = 2 .* groups' factors differ",
        ),
        (
            Shared,
            {"parallel": {"data": 2}, "memory": {"zero": 1}, "schedule": {"share": True}},
            r"its factors follow from who computes what",
        ),
    ],
)
def test_what_has_no_factors_is_refused(
    middle: Callable[[], Any], sections: dict[str, Any], text: str
) -> None:
    def of() -> axrt.PipelineModule:
        given = middle()
        is_tied = isinstance(given, axrt.TiedLayerSpec)
        last = axrt.TiedLayerSpec("a", nn.Linear, 8, 8) if is_tied else nn.Linear(8, 8)
        return as_it_is(nn.Linear(8, 8), given, last, nn.Linear(8, 5))

    def main(transport: Any) -> Any:
        by_key: Any = None
        layout = {"pipe": ranks // data, "data": data, **sections.get("parallel", {})}
        config = configured(MICROBATCHES, **{"optimizer": KFAC, **sections, "parallel": layout})
        return train_on_a_rank(transport, of(), batches(data), 1, config, by_key)

    data = sections.get("parallel", {}).get("data", 1)
    ranks = 2 if "chimera" in str(sections) else data
    with pytest.raises((AxrtError, ConfigError), match=text):
        LocalWorld(ranks, 1).run(main)


def test_an_evaluation_and_its_layers_leave_factors_alone() -> None:
    def run(evaluates: bool) -> list[float]:
        def main(transport: Any) -> list[float]:
            by_key: Any = None
            config = configured(MICROBATCHES, optimizer=KFAC)
            with axrt.initialize(model(), by_key, config=config, transport=transport) as engine:
                losses = []
                for number in range(4):
                    losses.append(engine.train_batch(iter(batches(1)(number))).loss)
                    if evaluates:
                        engine.eval_batch(iter(batches(1)(number + 9)))
                return losses

        return LocalWorld(1, 1).run(main)[0]

    assert run(True) == run(False)


def of_step(engine: axrt.Engine, between: Callable[[], None]) -> list[float]:
    losses = []
    for number in range(4):
        losses.append(engine.train_batch(iter(batches(1)(number))).loss)
        between()
    return losses


def test_backwards_of_others_leave_factors_alone() -> None:
    """Those of the user, of a copy, and of what he has pickled."""

    def run(disturbs: bool) -> list[float]:
        torch.manual_seed(1)
        layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)]

        def between() -> None:
            for layer in (layers[1], copy.deepcopy(layers[1]), pickled(layers[1])):
                layer(torch.randn(3, 8)).pow(2).sum().backward()
                layer.weight.grad = None

        def main(transport: Any) -> list[float]:
            by_key: Any = None
            config = configured(MICROBATCHES, optimizer=KFAC)
            given = as_it_is(*layers)
            with axrt.initialize(given, by_key, config=config, transport=transport) as engine:
                return of_step(engine, between if disturbs else lambda: None)

        return LocalWorld(1, 1).run(main)[0]

    assert run(True) == run(False)


def pickled(layer: nn.Linear) -> nn.Linear:
    found: nn.Linear = pickle.loads(pickle.dumps(layer))
    return found


class Doubled(nn.Module):
    """Gives twice what its linear layer gives, by itself or by a hook."""

    def __init__(self, by_hook: bool) -> None:
        super().__init__()
        self.linear, self.by_hook = nn.Linear(8, 8), by_hook
        if by_hook:
            self.linear.register_forward_hook(lambda module, given, out: 2 * out)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = self.linear(input=value)
        return out if self.by_hook else 2 * out


def test_factors_are_of_what_the_layer_itself_gives() -> None:
    by_hook, by_itself = (
        trained(
            *(1, 1, {**KFAC, "kl_clip": 0.0}, 6),
            of=lambda: as_it_is(
                axrt.LayerSpec(nn.Linear, 8, 8),
                axrt.LayerSpec(Doubled, of),  # noqa: B023
                axrt.LayerSpec(nn.Linear, 8, 5),
            ),
        )
        for of in (True, False)
    )
    assert by_hook == by_itself


class Asks(nn.Module):
    """Multiplies its input with what a linear layer makes of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.question, self.linear = nn.Parameter(torch.ones(1, 8)), nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        out: Tensor = value * self.linear(self.question.expand(len(value), 8))
        return out


@pytest.mark.parametrize("policy", ["1f1b", "zb-h1"])
def test_an_input_may_be_a_weight_that_is_let_go(policy: str) -> None:
    def of() -> axrt.PipelineModule:
        ends = axrt.LayerSpec(nn.Linear, 8, 8), axrt.LayerSpec(nn.Linear, 8, 5)
        return as_it_is(ends[0], axrt.LayerSpec(Asks), axrt.LayerSpec(Asks), ends[1])

    keys = {**KFAC, "matrices": "*.linear.weight"}
    found, expected = (
        trained(2, 2, keys, 4, of, schedule={"policy": policy}, memory={"zero": zero})
        for zero in (3, 1)
    )
    assert_close(found, expected, 1e-6)


def test_gradients_that_are_made_for_the_step_alone_are_changed_in_it() -> None:
    """Narrow ones, whose total has no memory before the step where state is offloaded."""

    def of() -> axrt.PipelineModule:
        sizes = [(8, 8), (8, 8), (8, 8), (8, 5)]
        return as_it_is(*[axrt.LayerSpec(nn.Linear, *size) for size in sizes])

    narrow = {"weights": "bfloat16", "gradients": "weights"}
    found, expected = (
        trained(1, 1, KFAC, 5, of, precision=narrow, memory=memory)
        for memory in ({"scratch": "host", "offload": "stream"}, {})
    )
    assert found == expected


def test_what_a_factor_costs_waits_beside_the_weight_gradient() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    deferral, done = Deferral([weight]), list[str]()
    with deferral.collecting(3):
        (weight * 2).sum().backward()  # type: ignore[no-untyped-call]
        deferral.add_beside(weight, lambda: done.append("waited"))
    assert (deferral.pieces(3), done) == (1, [])
    deferral.run_piece(3)
    deferral.add_beside(weight, lambda: done.append("at once"))
    assert (deferral.pieces(3), done) == (0, ["waited", "at once"])


def weighted(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    each = nn.functional.cross_entropy(outputs, target, reduction="sum")
    return each, torch.tensor(float(len(target)))


@pytest.mark.parametrize("data", [1, 2])
def test_a_loss_whose_weights_are_rows_has_the_factors_of_a_mean(data: int) -> None:
    first, *blocks, last = model().layers
    expected = trained(1, data, {**KFAC, "kl_clip": 0.0})
    found = trained(
        *(1, data, {**KFAC, "kl_clip": 0.0}),
        of=lambda: axrt.PipelineModule([first, *blocks, last], weighted),
    )
    assert_close(found, expected, 1e-10)


def test_half_the_weight_is_half_the_rows() -> None:
    """A loss in which half of the rows count has the gradients of the mean over them, and G of
    as many."""

    def halved(outputs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        half = len(target) // 2
        each = nn.functional.cross_entropy(outputs[:half], target[:half], reduction="sum")
        return each, torch.tensor(float(half))

    sums: list[dict[str, Tensor]] = []

    def keep(self: Any, state: Any, weight: float) -> None:
        kept(self, state, weight)
        sums.append({key: one.clone() for key, one in state.items() if key.startswith("left.0.f")})

    kept = kfac._Watched.average_into
    first, *blocks, last = model().layers
    for loss, given in ((halved, None), (weighted, first_halves)):
        of = axrt.PipelineModule([first, *blocks, last], loss)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kfac._Watched, "average_into", keep)
            trained(1, 1, KFAC, 1, lambda of=of: of, given)  # type: ignore[misc]
    half = len(sums) // 2
    for all_rows, of_halves in zip(sums[:half], sums[half:], strict=True):
        torch.testing.assert_close(all_rows, of_halves)


def first_halves(step: int) -> list[Item]:
    return [(inputs[:3], target[:3]) for inputs, target in batches(1)(step)]


def test_a_model_is_given_back_without_hooks() -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)]
    trained(1, 1, KFAC, 2, lambda: as_it_is(*layers))
    assert not any(layer._forward_hooks for layer in layers)
    assert all(type(layer) is nn.Linear for layer in layers)
