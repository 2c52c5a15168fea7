"""What an engine promises besides bits."""

import gc
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.device.queues import Inline, Moment
from axrt.model.inlet import Inflow
from axrt.model.open_microbatch import OpenMicrobatch
from axrt.observe.observer import Observer
from axrt.runtime import rank as rank_module
from axrt.runtime.compute import Compute
from axrt.scheduler.placement import Linear
from axrt.scheduler.policies import policy_by_name
from axrt.scheduler.task import Kind, Task
from axrt.transport import Transport
from axrt.transport.control import News
from axrt.transport.local import LocalWorld

from ..sweeps import first, swept
from .models import perceptron
from .on_a_thread import run_tasks_on_a_thread
from .reference import (
    ONE_PIPE,
    Outcome,
    adamw,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
    train_on_a_rank,
)

MICROBATCHES = 6
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)


def made(
    transport: Transport, model: axrt.PipelineModule | None = None, **sections: Any
) -> axrt.Engine:
    return axrt.initialize(
        model or perceptron(), config=configured(MICROBATCHES, **sections), transport=transport
    )


def alone(model: axrt.PipelineModule | None = None, **sections: Any) -> axrt.Engine:
    return made(LocalWorld(1).alone(), model, **sections)


class Looks:
    """A moment that has passed after so many looks."""

    def __init__(self, looks: int) -> None:
        self._left = looks

    def passed(self) -> bool:
        self._left -= 1
        return self._left < 0


class LateEnds(Inline):
    """Runs what is put at once, and tells its end some looks later."""

    at_once = False

    def put(self, run: Callable[[], object]) -> Moment:
        run()
        return Looks(3)


def delayed(device: torch.device) -> Compute:
    """What a device looks like to the loop, with room for two tasks."""
    return Compute(LateEnds(), 2)


@cache
def in_plain_torch(steps: int) -> Outcome:
    return train_in_plain_torch(perceptron(), BATCHES, steps)


@swept(("policy", ONE_PIPE), ("on_a_thread", [False, True]), quick=4)
def test_work_that_ends_or_begins_later_than_it_starts_changes_no_bit(
    policy: str, on_a_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_a_thread:
        run_tasks_on_a_thread(monkeypatch, 2)
    else:
        monkeypatch.setattr(rank_module, "compute_on", delayed)
    model, config = perceptron(), configured(MICROBATCHES, schedule={"policy": policy})
    outcome = together(
        LocalWorld(3, seed=4).run(
            lambda transport: train_on_a_rank(transport, model, BATCHES, 3, config)
        )
    )
    assert outcome == in_plain_torch(3)


class Watch(Observer):
    """Keeps what happened, and the most microbatches between forward and backward."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.messages: list[News] = []
        self.in_flight = self.most = 0

    def started(self, task: Task) -> None:
        self.tasks.append(task)
        self.in_flight += (task.kind is Kind.FORWARD) - (task.kind is Kind.BACKWARD)
        self.most = max(self.most, self.in_flight)

    def sent(self, rank: int, message: News, payload: object) -> None:
        self.messages.append(message)


@pytest.mark.parametrize("policy", ["1f1b", "eager-1f1b", "gpipe", "axonn"])
def test_a_running_engine_keeps_its_policys_bound(policy: str) -> None:
    def rank_main(transport: Transport) -> Watch:
        watch = Watch()
        config = configured(MICROBATCHES, schedule={"policy": policy})
        with axrt.initialize(
            perceptron(), config=config, transport=transport, observers=[watch]
        ) as engine:
            for step in range(3):
                engine.train_batch(iter(BATCHES(step)))
        return watch

    for rank, watch in enumerate(LocalWorld(3, seed=2).run(rank_main)):
        assert (
            0 < watch.most <= policy_by_name(policy).bounds(Linear(3), rank, MICROBATCHES).in_flight
        )
        assert len(watch.tasks) == 3 * (2 * MICROBATCHES + 1)


def test_an_iterator_that_ends_drops_the_step_on_every_rank() -> None:
    reference = train_in_plain_torch(perceptron(), BATCHES, 2)

    def rank_main(transport: Transport) -> list[float]:
        losses = []
        with axrt.initialize(
            perceptron(), adamw, config=configured(MICROBATCHES), transport=transport
        ) as engine:
            for step in range(2):
                for short in range(MICROBATCHES):
                    with pytest.raises(
                        StopIteration,
                        match=(
                            f"ended after {short} of the {MICROBATCHES} microbatches of step {step}"
                        ),
                    ):
                        engine.train_batch(iter(BATCHES(step)[:short]))
                assert engine.step == step
                losses.append(engine.train_batch(iter(BATCHES(step))).loss)
        return losses

    for seed in range(3):
        assert LocalWorld(3, seed).run(rank_main) == [reference.losses] * 3


@swept(("seed", range(20)), quick=4)
def test_an_iterator_that_ends_with_a_step_ends_every_rank_after_that_step(seed: int) -> None:
    def rank_main(transport: Transport) -> list[float]:
        losses = []
        with made(transport) as engine:
            batches = iter(BATCHES(0) + BATCHES(1))
            losses += [engine.train_batch(batches).loss for _ in range(2)]
            with pytest.raises(
                StopIteration, match=f"after 0 of the {MICROBATCHES} microbatches of step 2"
            ):
                engine.train_batch(batches)
            assert engine.step == 2
            losses.append(engine.eval_batch(iter(BATCHES(2))).loss)
            losses.append(engine.train_batch(iter(BATCHES(3))).loss)
        return losses

    one, two, three = LocalWorld(3, seed).run(rank_main)
    assert one == two == three
    assert len(one) == 4


def plain_evaluation(model: nn.Sequential, items: list[Any]) -> float:
    model.eval()
    with torch.no_grad():
        losses = [
            float(functional.cross_entropy(model(inputs), target)) for inputs, target in items
        ]
    model.train()
    return sum(losses) / len(losses)


@swept(("ranks", [1, 3]), ("policy", ONE_PIPE), quick=4)
def test_an_evaluation_has_the_loss_of_plain_torch_and_changes_nothing(
    ranks: int, policy: str
) -> None:
    items = BATCHES(99) + BATCHES(98)[:3]
    expected = plain_evaluation(perceptron().sequential(7), items)
    reference = in_plain_torch(2)

    def rank_main(transport: Transport) -> list[float]:
        config = configured(MICROBATCHES, schedule={"policy": policy})
        with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
            before = engine.eval_batch(iter(items))
            assert (before.loss, before.microbatches, engine.step) == (expected, len(items), 0)
            losses = [engine.train_batch(iter(BATCHES(0))).loss]
            between = engine.eval_batch(iter(items))
            assert between.loss != expected
            assert engine.eval_batch(iter(items)).loss == between.loss
            losses.append(engine.train_batch(iter(BATCHES(1))).loss)
        return losses

    assert LocalWorld(ranks, seed=5).run(rank_main) == [reference.losses] * ranks


def test_an_evaluation_leaves_every_module_in_its_mode() -> None:
    still = nn.BatchNorm1d(16).eval()
    with alone(axrt.PipelineModule([still, nn.Linear(16, 5)], functional.cross_entropy)) as engine:
        engine.eval_batch(iter(BATCHES(0)))
        assert not still.training


def test_an_evaluation_refuses_a_loss_that_is_not_a_number() -> None:
    items = BATCHES(0)
    items[1] = (items[1][0] * float("inf"), items[1][1])
    with pytest.raises(axrt.NonFiniteLossError, match="at evaluation microbatch 1, stage 0"):
        alone().eval_batch(iter(items))


def test_an_engine_that_has_failed_cannot_be_called_again() -> None:
    items = BATCHES(0)
    items[0] = (items[0][0] * float("inf"), items[0][1])
    engine = alone()
    with pytest.raises(axrt.NonFiniteLossError):
        engine.train_batch(iter(items))
    with pytest.raises(axrt.AxrtError, match="closed, or has failed"):
        engine.train_batch(iter(BATCHES(0)))


def test_results_may_be_read_long_after_their_step() -> None:
    model = axrt.PipelineModule([nn.Linear(1, 1)], lambda outputs, target: outputs.sum())
    items = [(torch.ones(1, 1), torch.zeros(1))]
    with axrt.initialize(model, config=configured(1), transport=LocalWorld(1).alone()) as engine:
        results = [engine.train_batch(iter(items)) for _ in range(1100)]
    assert len({result.loss for result in results}) > 1000
    assert results[0].grad_norm == pytest.approx(2**0.5)


@pytest.mark.parametrize("partition", [[0, 1, 3], [0, 2, 3]])
def test_a_gradient_may_stop_anywhere(partition: list[int]) -> None:
    model = axrt.PipelineModule(
        [axrt.LayerSpec(nn.Linear, 16, 16), torch.detach, axrt.LayerSpec(nn.Linear, 16, 5)],
        functional.cross_entropy,
    )
    config = configured(MICROBATCHES, parallel={"partition": partition})
    outcome = together(
        LocalWorld(2).run(lambda transport: train_on_a_rank(transport, model, BATCHES, 2, config))
    )
    assert outcome == train_in_plain_torch(model, BATCHES, 2)


def test_nothing_of_a_microbatch_stays_behind() -> None:
    def left() -> int:
        gc.collect()
        return sum(type(thing) in (Inflow, OpenMicrobatch) for thing in gc.get_objects())

    def rank_main(transport: Transport) -> None:
        with made(transport) as engine:
            engine.train_batch(iter(BATCHES(0)))
            with pytest.raises(StopIteration):
                engine.train_batch(iter(BATCHES(0)[:2]))

    LocalWorld(3).run(rank_main)
    assert left() == 0


def test_only_the_rank_that_reads_touches_the_batches() -> None:
    def rank_main(transport: Transport) -> bool:
        with made(transport) as engine:
            engine.train_batch(iter(BATCHES(0)) if engine.reads else None)
            return engine.reads

    assert LocalWorld(3).run(rank_main) == [True, False, False]


def test_the_gradient_norm_is_known_on_the_main_rank() -> None:
    def rank_main(transport: Transport) -> float | None:
        with made(transport) as engine:
            return engine.train_batch(iter(BATCHES(0))).grad_norm

    main, other = LocalWorld(2).run(rank_main)
    assert main is not None
    assert other is None


@pytest.mark.parametrize("place", [0, 1, 2])
def test_ranks_without_parameters_train_along_and_need_no_optimizer(place: int) -> None:
    class Still(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value * 2

    layers: list[Any] = [Still(), Still()]
    model = axrt.PipelineModule(
        [*layers[:place], nn.Linear(16, 16), *layers[place:]],
        lambda outputs, target: outputs.mean(),
    )
    losses = LocalWorld(3).run(
        lambda transport: made(transport, model).train_batch(iter(BATCHES(0))).loss
    )
    assert losses[0] == losses[1] == losses[2]


def test_the_configuration_names_optimizer_and_schedule() -> None:
    with alone(optimizer={"name": "sgd", "lr": 0.5, "warmup_steps": 2}) as engine:
        rates = [engine.train_batch(iter(BATCHES(step))).lr for step in range(3)]
    assert rates == [0.25, 0.5, 0.5]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        (None, "batches is of type NoneType; expected an iterator"),
        ([], "batches is of type list; expected an iterator, made once"),
        (iter([torch.zeros(2)]), r"microbatch 0 is a Tensor; expected a pair"),
        (iter([(1, 2, 3)]), r"microbatch 0 is a tuple of 3; expected a pair"),
        (iter([({1}, torch.zeros(2))]), "set cannot travel between stages"),
    ],
)
def test_batches_that_are_none_or_no_pairs_are_refused(item: Any, text: str) -> None:
    with alone() as engine, pytest.raises((axrt.DataError, TypeError), match=text):
        engine.train_batch(item)


def test_a_loss_that_is_not_a_number_stops_the_run_and_is_placed() -> None:
    items = BATCHES(0)
    items[2] = (items[2][0] * float("inf"), items[2][1])
    with pytest.raises(axrt.NonFiniteLossError, match="at step 0, stage 0, microbatch 2"):
        alone().train_batch(iter(items))


def test_a_loss_of_several_numbers_is_refused() -> None:
    model = axrt.PipelineModule([nn.Linear(16, 5)], lambda outputs, target: outputs)
    with pytest.raises(
        TypeError,
        match=r"loss_fn returned a tensor of shape \(6, 5\); expected a tensor with one element",
    ):
        alone(model).train_batch(iter(BATCHES(0)))


def test_a_closed_engine_says_so() -> None:
    engine = alone()
    engine.close()
    engine.close()
    with pytest.raises(axrt.AxrtError, match="this engine is closed"):
        engine.train_batch(iter(BATCHES(0)))


def test_an_exception_of_a_layer_names_rank_step_and_task() -> None:
    def broken(value: Tensor) -> Tensor:
        raise RuntimeError("broken")

    model = axrt.PipelineModule(
        [nn.Linear(16, 16), broken, nn.Linear(16, 5)], functional.cross_entropy
    )
    with pytest.raises(RuntimeError, match="broken") as caught:
        alone(model).train_batch(iter(BATCHES(0)))
    assert caught.value.__notes__ == [
        "in layer 1 (Function), which was given a tensor of shape (6, 16)",
        "on rank 0, step 0, task F0.0",
    ]


def test_parameters_shared_between_stages_are_refused_and_within_a_stage_are_fine() -> None:
    shared = nn.Linear(16, 16)
    model = axrt.PipelineModule(
        [shared, nn.Linear(16, 16), shared, nn.Linear(16, 5)], functional.cross_entropy
    )
    refuse: Callable[[Transport], object] = lambda transport: made(transport, model)  # noqa: E731
    with pytest.raises(axrt.ConfigError, match="shared between stage 0 and stage 1"):
        LocalWorld(2).run(refuse)
    LocalWorld(2).run(lambda transport: made(transport, model, parallel={"partition": [0, 3, 4]}))


@pytest.mark.parametrize(
    ("model", "optimizer", "text"),
    [
        (
            nn.Sequential(nn.Linear(1, 1)),
            None,
            "model is of type Sequential; expected an axrt.PipelineModule",
        ),
        (
            perceptron(),
            torch.optim.SGD([nn.Parameter(torch.zeros(1))]),
            "optimizer is of type SGD; expected a function that makes one",
        ),
    ],
)
def test_what_is_easily_mistaken_is_refused(model: Any, optimizer: Any, text: str) -> None:
    with pytest.raises(axrt.ConfigError, match=text):
        axrt.initialize(model, optimizer, transport=LocalWorld(1).alone())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"model_parameters": []},
            r"initialize does not take model_parameters; expected optimizer=lambda named: "
            r"torch.optim.AdamW\(",
        ),
        (
            {"training_data": []},
            r"initialize does not take training_data; expected engine.train_batch\(batches\) with "
            r"batches = iter",
        ),
        (
            {"lr_scheduler": None},
            "initialize does not take lr_scheduler; expected lr_schedule=lambda step:",
        ),
        (
            {"mpu": None},
            r"initialize does not take mpu; expected \[parallel\] pipe and data in config",
        ),
    ],
)
def test_arguments_of_another_library_are_answered_with_what_there_is(
    arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(axrt.ConfigError, match=text) as caught:
        axrt.initialize(model=perceptron(), transport=LocalWorld(1).alone(), **arguments)
    assert "\n" not in str(caught.value)


def test_arguments_of_nobody_are_refused_as_python_does() -> None:
    with pytest.raises(
        TypeError, match=r"initialize\(\) got an unexpected keyword argument 'modle'"
    ):
        axrt.initialize(perceptron(), modle=3, transport=LocalWorld(1).alone())  # type: ignore[arg-type]


def test_two_engines_live_in_one_process() -> None:
    with alone() as one, alone(run={"seed": 9}) as other:
        first = [one.train_batch(iter(BATCHES(0))).loss, other.train_batch(iter(BATCHES(0))).loss]
    assert first[0] != first[1]
    assert first[0] == train_in_plain_torch(perceptron(), BATCHES, 1).losses[0]


def test_the_users_own_linear_layers_have_their_class_again_after_a_failure() -> None:
    mine = nn.Linear(4, 4)
    model = axrt.PipelineModule([mine], lambda out, target: (out - target).square().mean())
    config = configured(2, schedule={"policy": "zb-h1"})
    with axrt.initialize(model, config=config, transport=LocalWorld(1).alone()) as engine:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine.train_batch(iter([(torch.ones(2, 5), torch.zeros(2, 4))] * 2))
        assert type(mine) is nn.Linear


def test_the_users_own_linear_layers_have_their_class_again_after_close() -> None:
    mine = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers = [mine[0], nn.Sequential(nn.ReLU(), mine[1])]
    model = axrt.PipelineModule(layers, lambda out, target: (out - target).square().mean())
    config = configured(2, schedule={"policy": "zb-h1"})
    before = [layer.weight.detach().clone() for layer in mine]
    with axrt.initialize(model, config=config, transport=LocalWorld(1).alone()) as engine:
        engine.train_batch(iter([(torch.ones(2, 4, requires_grad=True), torch.zeros(2, 4))] * 2))
        assert nn.Linear not in map(type, mine)
    assert [type(layer) for layer in mine] == [nn.Linear, nn.Linear]
    assert not any(parameter._backward_hooks for layer in mine for parameter in layer.parameters())
    assert not any(torch.equal(now.weight, was) for now, was in zip(mine, before, strict=True))


class Shifts(nn.Module):
    """For a batch of one the gradient of `by` is the memory of the gradient that travels on. A hook
    drops it after the first microbatch of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.by, self.heard = nn.Parameter(torch.zeros(8)), 0
        self.by.register_post_accumulate_grad_hook(self._drop)  # type: ignore[no-untyped-call]

    def _drop(self, parameter: nn.Parameter) -> None:
        if self.heard % 4 == 0:
            parameter.grad = None
        self.heard += 1

    def forward(self, value: Tensor) -> Tensor:
        return 0.5 * (value + self.by.unsqueeze(0))


@pytest.mark.parametrize("seed", first(range(4)))
def test_a_gradient_that_a_hook_drops_within_a_step_begins_anew_in_memory_of_its_own(
    seed: int,
) -> None:
    items = [(torch.randn(1, 8), torch.randn(1, 8)) for _ in range(4)]

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(8, 8), Shifts(), nn.Linear(8, 8)]

    def rank_main(transport: Transport) -> dict[str, Tensor]:
        model = axrt.PipelineModule(layers(), nn.functional.mse_loss)
        config = configured(4, schedule={"policy": "gpipe"}, parallel={"partition": [0, 1, 3]})
        with axrt.initialize(model, sgd, config=config, transport=transport) as engine:
            for _ in range(2):
                engine.train_batch(iter(items))
            return {name: value.detach().clone() for name, value in engine.named_parameters()}

    plain = nn.Sequential(*layers())
    optimizer = sgd(plain.named_parameters())
    for _ in range(2):
        optimizer.zero_grad()
        for inputs, target in items:
            (nn.functional.mse_loss(plain(inputs), target) / 4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    first, second = LocalWorld(2, seed).run(rank_main)
    assert all(
        torch.equal((first | second)[name], value) for name, value in plain.named_parameters()
    )


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named], lr=0.5)
