"""What would train nonsense, or do nothing, is refused in one line."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.exit_codes import Exit, exit_code_of
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

from .models import perceptron
from .reference import configured, random_batches

MICROBATCHES = 4
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)


class Apart(nn.Module):
    """Hands on what it got without its gradient."""

    def forward(self, value: Tensor) -> Tensor:
        return value.detach()


class Frozen(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.requires_grad_(False)


@torch.no_grad()
def without_gradient(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets)


def weighted_without_gradient(outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
    return functional.cross_entropy(outputs, targets, reduction="sum").detach(), len(targets)


def errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).sum()


def own(outputs: Tensor, targets: Tensor) -> Tensor:
    """Has a gradient of its own, and none of the model's."""
    return functional.cross_entropy(outputs.detach() * torch.ones((), requires_grad=True), targets)


def layered(*layers: Any, loss_fn: Any = functional.cross_entropy) -> axrt.PipelineModule:
    return axrt.PipelineModule(list(layers), loss_fn)


LINEARS = (
    axrt.LayerSpec(nn.Linear, 16, 16),
    axrt.LayerSpec(nn.Linear, 16, 16),
    axrt.LayerSpec(nn.Linear, 16, 5),
)
FROZEN = (
    axrt.LayerSpec(Frozen, 16, 16),
    axrt.LayerSpec(Frozen, 16, 16),
    axrt.LayerSpec(Frozen, 16, 5),
)
NO_GRADIENT = (
    "the loss of step 0, microbatch 0 depends on no weight that is trained; expected one that does"
)


def train(ranks: int, model: axrt.PipelineModule, steps: int = 1, **sections: Any) -> list[float]:
    def rank_main(transport: Transport) -> list[float]:
        with axrt.initialize(
            model, config=configured(MICROBATCHES, **sections), transport=transport
        ) as engine:
            return [engine.train_batch(iter(BATCHES(step))).loss for step in range(steps)]

    return LocalWorld(ranks, seed=ranks).run(rank_main)[0]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("model", "text"),
    [
        (layered(*LINEARS, loss_fn=without_gradient), NO_GRADIENT),
        (layered(*LINEARS, loss_fn=weighted_without_gradient), NO_GRADIENT),
        (layered(*LINEARS, axrt.LayerSpec(Apart)), NO_GRADIENT),
        (
            layered(*LINEARS, loss_fn=errors),
            "the loss of step 0, microbatch 0 is of type torch.int64; expected a floating-point "
            "number",
        ),
        (layered(*FROZEN), "no weight of the model is trained"),
        (
            layered(lambda value: value[:, :5], nn.ReLU(), nn.ReLU()),
            "no weight of the model is trained",
        ),
    ],
)
def test_a_model_that_would_learn_nothing_is_refused_at_its_first_step(
    ranks: int, recompute: str, model: axrt.PipelineModule, text: str
) -> None:
    with pytest.raises(axrt.ModelError, match=text) as caught:
        train(ranks, model, schedule={"policy": "1f1b"}, memory={"recompute": recompute})
    assert "\n" not in str(caught.value)
    assert exit_code_of(caught.value) is Exit.BAD_INPUT


def test_inputs_and_losses_that_want_a_gradient_do_not_hide_that_no_weight_is_trained() -> None:
    with pytest.raises(axrt.ModelError, match="no weight of the model is trained"):
        train(1, layered(*FROZEN, loss_fn=own))


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_stages_that_are_frozen_are_fine_as_long_as_one_is_trained(frozen: tuple[int, ...]) -> None:
    model = layered(*(FROZEN[place] if place in frozen else LINEARS[place] for place in range(3)))
    losses = train(3, model, 3, optimizer={"lr": 0.01})
    assert losses[0] != losses[1] != losses[2]


def test_what_comes_before_a_detach_stays_as_it_is_as_in_plain_torch() -> None:
    assert len(set(train(3, layered(LINEARS[0], axrt.LayerSpec(Apart), LINEARS[2]), 3))) == 3


def test_a_model_without_trained_weights_can_be_evaluated() -> None:
    def rank_main(transport: Transport) -> float:
        with axrt.initialize(
            layered(*FROZEN), config=configured(MICROBATCHES), transport=transport
        ) as engine:
            return engine.eval_batch(iter(BATCHES(0))).loss

    assert len(set(LocalWorld(2).run(rank_main))) == 1


@pytest.mark.parametrize(("pipe", "data"), [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_an_evaluation_of_nothing_is_refused_on_every_rank_and_harms_nobody(
    pipe: int, data: int
) -> None:
    def rank_main(transport: Transport) -> float:
        with axrt.initialize(
            perceptron(),
            config=configured(MICROBATCHES, parallel={"data": data}),
            transport=transport,
        ) as engine:
            with pytest.raises(
                axrt.DataError,
                match="eval_batch got no microbatch on any replica; expected one or more",
            ) as caught:
                engine.eval_batch(iter([]))
            assert exit_code_of(caught.value) is Exit.BAD_INPUT
            return engine.train_batch(iter(BATCHES(engine.data_rank))).loss

    assert len(set(LocalWorld(pipe * data, seed=3).run(rank_main))) == 1


def test_a_replica_may_have_nothing_to_evaluate_where_another_has_something() -> None:
    def rank_main(transport: Transport) -> tuple[int, float]:
        with axrt.initialize(
            perceptron(), config=configured(MICROBATCHES, parallel={"data": 3}), transport=transport
        ) as engine:
            result = engine.eval_batch(iter(BATCHES(0)[: 2 * (engine.data_rank == 1)]))
            return result.microbatches, result.loss

    found = LocalWorld(6, seed=3).run(rank_main)
    assert found == [found[0]] * 6
    assert found[0][0] == 2


CALLS: dict[str, Callable[[axrt.Engine], object]] = {
    "train_batch": lambda engine: engine.train_batch(iter(BATCHES(0))),
    "eval_batch": lambda engine: engine.eval_batch(iter(BATCHES(0))),
    "broadcast": lambda engine: engine.broadcast(3),
    "timeline": lambda engine: engine.timeline(),
    "save_checkpoint": lambda engine: engine.save_checkpoint("runs/refused/step"),
    "load_checkpoint": lambda engine: engine.load_checkpoint("runs/refused"),
    "close": lambda engine: engine.close(),
}


def while_it_trains(engine: axrt.Engine, within: Callable[[], object]) -> float:
    """The loss of a step during whose second microbatch something is done."""

    def batches() -> Iterator[Any]:
        first, *others = BATCHES(0)
        yield first
        within()
        yield from others

    return engine.train_batch(batches()).loss


@pytest.mark.parametrize("call", CALLS)
def test_a_call_from_another_thread_is_refused_while_one_is_under_way(call: str) -> None:
    with axrt.initialize(
        perceptron(), config=configured(MICROBATCHES), transport=LocalWorld(1).alone()
    ) as engine:
        refusals: list[str] = []

        def other() -> None:
            try:
                CALLS[call](engine)
            except axrt.AxrtError as error:
                refusals.append(str(error))

        def within() -> None:
            thread = threading.Thread(target=other, name="the other")
            thread.start()
            thread.join()

        assert while_it_trains(engine, within) == pytest.approx(train(1, perceptron())[0])
        (refusal,) = refusals
        assert refusal.startswith(
            f"thread 'the other' calls {call} while thread 'MainThread' is in train_batch; "
            "expected one call"
        )
        assert engine.train_batch(iter(BATCHES(1))).step == 1


@pytest.mark.parametrize("call", CALLS)
def test_a_call_within_a_call_is_refused(call: str) -> None:
    engine = axrt.initialize(
        perceptron(), config=configured(MICROBATCHES), transport=LocalWorld(1).alone()
    )
    with pytest.raises(
        axrt.AxrtError,
        match=f"thread 'MainThread' calls {call} within train_batch; expected it after train_batch",
    ):
        while_it_trains(engine, lambda: CALLS[call](engine))


def test_a_norm_that_is_still_under_way_is_not_waited_for_within_a_call() -> None:
    def rank_main(transport: Transport) -> list[float | None]:
        with axrt.initialize(
            perceptron(), config=configured(MICROBATCHES), transport=transport
        ) as engine:
            norms = []
            for step in range(3):
                result = engine.train_batch(iter(BATCHES(step)))
                norms.append(result.grad_norm)
                while_it_trains(engine, lambda: None)
                assert result.grad_norm == norms[-1]
            return norms

    assert None not in LocalWorld(2, seed=1).run(rank_main)[0]


def unfrozen(layers: list[Any]) -> None:
    layers[1].requires_grad_(True)


def replaced(layers: list[Any]) -> None:
    layers[1].weight = nn.Parameter(torch.zeros(16, 16))


def added(layers: list[Any]) -> None:
    layers[1].scale = nn.Parameter(torch.ones(16))


def grown(layers: list[Any]) -> None:
    layers[1].beside = nn.Linear(16, 2)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (unfrozen, "1.weight was frozen when the engine took it, and has requires_grad = True now"),
        (replaced, "1.weight was replaced after the engine took the layer"),
        (added, "1.scale was added after the engine took the layer"),
        (grown, "1.beside was added after the engine took the layer"),
    ],
)
def test_what_is_unfrozen_replaced_or_added_later_is_refused_by_name(
    change: Callable[[list[Any]], None], text: str, ranks: int
) -> None:
    """Nothing ever trained it, without a word."""

    def rank_main(transport: Transport) -> None:
        layers = [nn.Linear(16, 16), Frozen(16, 16), nn.Linear(16, 5)]
        config = configured(MICROBATCHES, parallel={"partition": "uniform"})
        with axrt.initialize(layered(*layers), config=config, transport=transport) as engine:
            engine.train_batch(iter(BATCHES(0)))
            change(layers)
            engine.train_batch(iter(BATCHES(1)))

    with pytest.raises(axrt.ModelError, match=f"{text}.*; expected that before axrt.initialize"):
        LocalWorld(ranks).run(rank_main)


def test_what_comes_later_and_is_not_to_be_trained_is_no_business_of_the_engines() -> None:
    layers: list[Any] = [nn.Linear(16, 16), Frozen(16, 16), nn.Linear(16, 5)]
    with axrt.initialize(layered(*layers), config=configured(MICROBATCHES)) as engine:
        engine.train_batch(iter(BATCHES(0)))
        layers[0].act = nn.GELU()
        layers[1].teacher = Frozen(16, 16)
        layers[2].still = nn.Parameter(torch.ones(5), requires_grad=False)
        engine.train_batch(iter(BATCHES(1)))
        layers[1].teacher.requires_grad_(True)
        with pytest.raises(axrt.ModelError, match=r"1.teacher was added after the engine took"):
            engine.train_batch(iter(BATCHES(2)))


class Extra(nn.Linear):
    """Has state that is code."""

    told: Any = nn.Linear(2, 2)

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


class Doubled(nn.Linear):
    """Saves what it computes."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "twice"] = self.weight.detach() * 2


class Halves(nn.Linear):
    """Loads other values than it saves."""

    def _load_from_state_dict(self, state: Any, prefix: str, *more: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] / 2
        super()._load_from_state_dict(state, prefix, *more)


class Listed(nn.Linear):
    """Adds to its state what is no tensor."""

    def state_dict(self, *arguments: Any, **keys: Any) -> Any:
        state = super().state_dict(*arguments, **keys)
        state["seen"] = [1]
        return state


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Extra, r"1._extra_state \(get_extra_state\) has Linear; expected tensors, numbers"),
        (Doubled, r"1.twice is made for the state dict alone"),
        (Halves, r"1.weight has other values when layer 1 has loaded what it saves"),
        (Listed, "seen of layer 1 is list; expected tensors only"),
    ],
)
def test_a_layer_whose_state_no_checkpoint_holds_is_refused_at_the_start(
    layer: type[nn.Module], text: str
) -> None:
    """A training once ended at its first save, or lost it without a word."""
    with pytest.raises(axrt.DataError, match=text):
        train(1, layered(nn.Linear(16, 16), layer(16, 5)))


def test_ranks_that_tie_modules_of_other_values_are_refused() -> None:
    def model(seed: int, kind: Any) -> axrt.PipelineModule:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            given = kind and kind(16, 16)
        words = (nn.Linear, 16, 16) if given is None else (given,)
        ends = [axrt.TiedLayerSpec("t", *words), axrt.TiedLayerSpec("t", *words)]
        return layered(ends[0], nn.Linear(16, 16), ends[1], nn.Linear(16, 5))

    config = configured(MICROBATCHES)
    for kinds in ((nn.Linear, nn.Linear), (nn.Linear, None), (None, nn.Linear)):
        with pytest.raises(axrt.ConfigError, match="layer 0, a TiedLayerSpec of a module, has oth"):
            LocalWorld(2).run(
                lambda transport: axrt.initialize(
                    model(transport.rank, kinds[transport.rank]),  # noqa: B023
                    config=config,
                    transport=transport,
                )
            )
