"""Policy "auto": measured, simulated, chosen alike on every rank.

These cases alone prove what narrows the choice, what layers are measured to take, that a plan is
among the candidates, and which policy is taken where none is named. Plans are made here with little
effort; tests/scheduler has how good they are.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import axrt
from axrt.config import DEFAULTS, Config, described
from axrt.model.costs import measure
from axrt.model.precision import AS_THEY_ARE
from axrt.model.seeds import BorrowedGenerator
from axrt.models.gpt import gpt
from axrt.planning.autoschedule import _decided, choose
from axrt.planning.default_schedule import settled
from axrt.planning.plan_from_costs import Decided
from axrt.planning.step_prediction import AS_FAST
from axrt.scheduler.policies import NAMES
from axrt.scheduler.simulation.cost_table import LayerCosts
from axrt.scheduler.simulation.costs import Edge
from axrt.scheduler.simulation.model_costs import ModelCosts
from axrt.transport import Transport
from axrt.transport.local import LocalWorld
from axrt.world.mesh import Mesh

from .models import Block, motley, perceptron
from .reference import (
    ONE_PIPE,
    TWO_PIPES,
    Outcome,
    adamw,
    configured,
    random_batches,
    together,
    train_in_plain_torch,
)
from .test_default_plan import with_little_effort

MICROBATCHES, STEPS = 4, 2
BATCHES = random_batches((6, 16), classes=5, microbatches=MICROBATCHES)
EQUAL = [LayerCosts(0.01, 0.01, 0.01, 1000, 2**20, 0.0)] * 8


def chosen(
    config: dict[str, Any],
    edge: Edge = Edge(),  # noqa: B008
    ranks: int = 4,
    layers: list[LayerCosts] = EQUAL,
) -> list[Any]:
    return choose(
        Config.read(configured(8, **config)),
        perceptron(layers=len(layers)),
        ranks,
        ModelCosts(layers, edge),
    )


def test_on_equal_costs_the_plan_of_zb_v_is_chosen_and_the_least_memory_of_those_as_fast() -> None:
    first, *others = chosen({})
    assert (first.schedule.policy, first.schedule.max_held) == ("adaptive", 0)
    assert first.held_mib == 8
    assert {one.schedule.policy for one in (first, *others)} == set(ONE_PIPE)
    assert [one.step_s for one in others] == sorted(one.step_s for one in others)


LATE = ModelCosts(EQUAL, Edge(0.01))  # messages take as long as a layer, so a plan is ahead


def followed(monkeypatch: pytest.MonkeyPatch, **schedule: Any) -> Any:
    """What a run under "auto" takes on two ranks where messages are late: the engine, closed."""
    with_little_effort(monkeypatch)
    monkeypatch.setattr("axrt.planning.known_costs.measure", lambda *_: LATE.layers)
    monkeypatch.setattr("axrt.planning.known_costs.measured_edge", lambda *_: LATE.edge)

    def rank_main(transport: Transport) -> Any:
        config = configured(8, schedule={"policy": "auto", "max_held": 4, **schedule})
        sample = BATCHES(0)[0]
        with axrt.initialize(
            perceptron(), config=config, transport=transport, sample=sample
        ) as engine:
            return engine

    return LocalWorld(2).run(rank_main)[0]


def test_with_policies_of_ones_own_a_plan_is_followed_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "my_lifo.py").write_text(
        "from axrt.scheduler.policies import policy_by_name\n\n\n"
        "class Mine(type(policy_by_name('1f1b'))):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    engine = followed(monkeypatch, also=["my_lifo:Mine"])
    assert engine.candidates[0].endswith("along a plan")


def test_a_plan_has_as_many_stages_a_rank_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "along a plan" in followed(monkeypatch).candidates[0]
    assert "along a plan" not in followed(monkeypatch, chunks=3, max_held=0).candidates[0]
    assert followed(monkeypatch, chunks=2)._job.placement.name == "vee"


def test_a_plan_holds_more_where_that_is_faster_and_nothing_limits_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_little_effort(monkeypatch)
    config, model = (
        Config.read(configured(8, schedule={"policy": "auto", "placement": "vee"})),
        perceptron(layers=len(EQUAL)),
    )

    def decided(of: Config) -> Decided:
        return _decided(of, model, Mesh(0, 4, 1), LATE)

    most = decided(config)
    assert most.plan is not None
    assert (most.policy, most.max_held, most.plan.cap) == ("adaptive", 16, 16)
    step_s, of_the_next = (
        float(text.split(": ")[1].split(" ms")[0]) for text in most.candidates[:2]
    )
    assert step_s * AS_FAST < of_the_next
    for limit in ({"activations_mb": 8.0}, {"device_gb": 9.0}, {"offload_activations": 4}):
        limited = decided(replace(config, memory=replace(config.memory, **limit)))
        along = [text for text in limited.candidates if text.endswith("along a plan")]
        assert not any("max_held" in text for text in along), limit
    monkeypatch.setattr("axrt.planning.default_plan._LARGEST", 31)
    along = [text for text in decided(config).candidates if text.endswith("along a plan")]
    assert not any("max_held" in text for text in along)


def test_memory_and_what_is_set_narrow_the_choice() -> None:
    assert (
        max(one.held_mib for one in chosen({}))
        > max(one.held_mib for one in chosen({"memory": {"activations_mb": 8}}))
        == 8
    )
    looped = {one.schedule.policy for one in chosen({"schedule": {"placement": "looped"}})}
    assert looped == {"breadth-first", "interleaved-1f1b", "interleaved-zb"}
    assert {
        one.schedule.policy for one in chosen({"schedule": {"placement": "bidirectional"}})
    } == set(TWO_PIPES)
    assert {
        one.schedule.max_held for one in chosen({"schedule": {"policy": "auto", "max_held": 5}})
    } == {5}
    said = (
        r"activations_mb = 1 is too little .* 4.2 MB of activations holds least: set "
        r"memory.activations_mb = 5, memory.recompute = 'full', or start"
    )
    with pytest.raises(axrt.ConfigError, match=said):
        chosen({"memory": {"activations_mb": 1}})
    with pytest.raises(axrt.ConfigError, match="finds no schedule for 9 ranks that fits the model"):
        chosen({}, ranks=9)


def test_policies_of_ones_own_are_candidates_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that holds nothing back is as fast as gpipe; one that is not there is refused."""
    (tmp_path / "my_own.py").write_text(
        "from axrt.scheduler.policies.gpipe import GPipe\n\nclass Mine(GPipe):\n    name = 'mine'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def tried(name: str) -> dict[str, float]:
        found = chosen({"schedule": {"policy": "auto", "also": [name]}})
        return {one.schedule.policy: one.step_s for one in found}

    found = tried("my_own:Mine")
    assert found["my_own:Mine"] == found["gpipe"]
    with pytest.raises(axrt.ConfigError, match="schedule.also: .*No module named 'not_there'"):
        tried("not_there:X")
    with pytest.raises(axrt.ConfigError, match="expected 'package.module:Class'"):
        tried("gpipe")
    with pytest.raises(axrt.ConfigError, match="expected schedule.policy = 'auto'"):
        chosen({"schedule": {"policy": "1f1b", "also": ["my_own:Mine"]}})


def test_recomputation_counts() -> None:
    plain, again = (
        chosen({"memory": {"recompute": word}, "schedule": {"policy": "auto"}})
        for word in ("none", "full")
    )
    before, after = (
        next(one for one in found if one.schedule.policy == "gpipe") for found in (plain, again)
    )
    assert after.step_s > before.step_s
    assert before.held_mib == 8 * 2
    assert after.held_mib == pytest.approx(2, abs=0.01), (
        "one microbatch, and what came in of the others"
    )


def test_a_placement_alone_takes_a_policy_of_its_own() -> None:
    def start(ranks: int, **schedule: str) -> list[str]:
        config = configured(MICROBATCHES, schedule=schedule)

        def rank_main(transport: Transport) -> str:
            with axrt.initialize(perceptron(), adamw, config=config, transport=transport) as engine:
                return engine.schedule.policy

        return LocalWorld(ranks).run(rank_main)

    assert start(2, placement="bidirectional") == ["dualpipe"] * 2
    assert start(2, placement="looped") == ["breadth-first"] * 2
    with pytest.raises(axrt.ConfigError, match="takes an even number of ranks"):
        start(3, placement="bidirectional")


def test_a_cap_alone_is_for_adaptive_and_elsewhere_the_policies_that_take_one_are_named() -> None:
    def start(**schedule: Any) -> str:
        config = configured(MICROBATCHES, schedule=schedule)
        with_engine = lambda transport: (  # noqa: E731
            axrt.initialize(perceptron(), config=config, transport=transport).schedule.policy
        )
        return LocalWorld(2).run(with_engine)[0]

    assert start(max_held=6) == "adaptive"
    text = (
        "schedule.max_held = 8 on schedule.placement = '{}' with no policy named; expected "
        "schedule.max_held = 0, or {}"
    )
    with pytest.raises(axrt.ConfigError, match=text.format("linear", "schedule.policy = 'axonn'")):
        start(placement="linear", max_held=8)
    for placement in ("looped", "bidirectional"):
        with pytest.raises(
            axrt.ConfigError,
            match=text.format(placement, "another placement: no policy of this one takes a cap"),
        ):
            start(placement=placement, max_held=8)


def test_the_default_is_told_in_one_text() -> None:
    told = next(line for line in described() if line.startswith("  policy "))
    assert all(f"{name} ({placement})" in told for name, placement in DEFAULTS.items())


@pytest.mark.parametrize(
    ("layers", "vocab", "policy"), [(2, 256, "zb-h1"), (2, 2048, "adaptive"), (8, 256, "adaptive")]
)
def test_the_default_looks_at_what_the_busiest_rank_of_a_gpt_computes(
    layers: int, vocab: int, policy: str
) -> None:
    """With two blocks on two ranks the first one would have but an embedding and a small head."""
    model = {"layers": layers, "width": 64, "heads": 2, "vocab": vocab, "context": 8}
    config = Config.read({"model": model})
    schedule, job = settled(config, gpt(config), Mesh(0, 2, 1))
    assert schedule.policy == policy
    if layers == 8:
        assert job.cuts == (0, 3, 5, 7, 10), "four blocks a rank, with the ends on the first"


def test_latency_counts() -> None:
    near, far = chosen({})[0], chosen({}, Edge(latency=0.02))[0]
    assert far.step_s > near.step_s
    slow = chosen({}, Edge(bandwidth=1000 / 0.02))
    assert slow[0].step_s > near.step_s


class Counted(nn.Linear):
    """Counts how often it was built."""

    built = 0

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        Counted.built += 1


def generator() -> BorrowedGenerator:
    return BorrowedGenerator(7, torch.device("cpu"))


def test_layers_of_one_specification_are_measured_once_and_given_modules_stay_as_they_are() -> None:
    given = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 16))
    before = {name: value.clone() for name, value in given.state_dict().items()}
    layers: list[Any] = [
        given,
        *[axrt.LayerSpec(Counted, 16, 16) for _ in range(4)],
        nn.Linear(16, 5),
    ]
    costs = measure(
        axrt.PipelineModule(layers, functional.cross_entropy),
        7,
        BATCHES(0)[0],
        generator(),
        AS_THEY_ARE,
    )
    assert Counted.built == 1
    assert len(costs) == 6
    assert costs[3] == costs[2]
    assert all(one.forward_s > 0 and one.input_s > 0 for one in costs)
    assert [one.sent_bytes for one in costs] == [6 * 16 * 4] * 5 + [0]
    assert all(torch.equal(value, before[name]) for name, value in given.state_dict().items())
    assert type(given[1]) is nn.Linear
    assert all(parameter.grad is None for parameter in given.parameters())


def test_what_is_kept_for_the_backward_is_counted_without_weights() -> None:
    layers = [axrt.LayerSpec(nn.Linear, 16, 32), axrt.LayerSpec(nn.Linear, 32, 5)]
    first, _ = measure(
        axrt.PipelineModule(layers, functional.cross_entropy),
        7,
        BATCHES(0)[0],
        generator(),
        AS_THEY_ARE,
    )
    assert first.stash_bytes == 6 * 16 * 4  # its input
    assert first.weight_s > 0


def test_structured_values_pass_through_the_measurement() -> None:
    batches = random_batches((6, 12), classes=4, microbatches=1)
    assert len(measure(motley(), 7, batches(0)[0], generator(), AS_THEY_ARE)) == 8


def test_auto_trains_with_the_bits_of_plain_torch_and_says_what_it_chose() -> None:
    def rank_main(transport: Transport) -> tuple[Outcome, list[str], Any]:
        config = configured(MICROBATCHES, schedule={"policy": "auto"})
        engine = axrt.initialize(
            perceptron(),
            adamw,
            config=config,
            transport=transport,
            sample=BATCHES(0)[0] if transport.rank == 0 else None,
        )
        with engine:
            losses = [
                engine.train_batch(iter(BATCHES(step)) if engine.reads else None).loss
                for step in range(STEPS)
            ]
        mine: dict[str, Tensor] = {
            name: value.detach().clone() for name, value in engine.named_parameters()
        }
        return Outcome(losses, [], mine), engine.candidates, engine.schedule

    ranks = LocalWorld(2, 1).run(rank_main)
    reference = train_in_plain_torch(perceptron(), BATCHES, STEPS)
    assert together([outcome for outcome, _, _ in ranks]) == Outcome(
        reference.losses, [], reference.parameters
    )
    (_, candidates, schedule), (_, others, other) = ranks
    assert (candidates, schedule) == (others, other)
    assert candidates[0].startswith(f"{schedule.policy}")
    assert schedule.policy in NAMES
    assert all(re.search(r"ms a step expected, ranks busy \d+%", line) for line in candidates)


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_a_sample_auto_is_refused_on_every_rank(ranks: int) -> None:
    config = configured(MICROBATCHES, schedule={"policy": "auto"})
    with pytest.raises(
        axrt.ConfigError,
        match=r"none was given; expected axrt.initialize\(..., sample=\(inputs, targets\)\)",
    ):
        LocalWorld(ranks).run(
            lambda transport: axrt.initialize(perceptron(), config=config, transport=transport)
        )


def test_one_microbatch_more_than_a_candidate_can_take_leaves_it_out() -> None:
    settings = Config.read(configured(7))
    found = choose(
        replace(settings, schedule=replace(settings.schedule, microbatches=7)),
        perceptron(),
        4,
        ModelCosts(EQUAL, Edge()),
    )
    assert "interleaved-1f1b" not in {one.schedule.policy for one in found}


def test_a_model_with_fewer_layers_than_chunks_has_fewer_candidates() -> None:
    model = axrt.PipelineModule(
        [axrt.LayerSpec(Block, 16) for _ in range(4)], functional.cross_entropy
    )
    found = choose(Config.read(configured(8)), model, 4, ModelCosts(EQUAL[:4], Edge()))
    assert {"zb-v", "adaptive", "breadth-first"}.isdisjoint({one.schedule.policy for one in found})


@pytest.mark.parametrize(
    ("layers", "schedule", "policy"),
    [
        (8, {}, "adaptive"),
        (7, {}, "zb-h1"),
        (8, {"placement": "linear"}, "zb-h1"),
        (8, {"placement": "looped"}, "breadth-first"),
        (8, {"policy": "1f1b"}, "1f1b"),
        (8, {"policy": "adaptive", "max_held": 9}, "adaptive"),
        (8, {"max_held": 9}, "adaptive"),
    ],
)
def test_without_a_policy_the_first_that_the_model_has_layers_for_is_taken(
    layers: int, schedule: dict[str, Any], policy: str
) -> None:
    def rank_main(transport: Transport) -> tuple[str, str]:
        config = configured(MICROBATCHES, schedule=schedule)
        with axrt.initialize(
            perceptron(layers=layers), config=config, transport=transport
        ) as engine:
            return engine.schedule.policy, engine.config.schedule.policy

    assert LocalWorld(4).run(rank_main) == [(policy, schedule.get("policy", ""))] * 4


def test_one_rank_alone_has_one_stage() -> None:
    with axrt.initialize(
        perceptron(), config=configured(MICROBATCHES), transport=LocalWorld(1).alone()
    ) as engine:
        assert engine.schedule.policy == "1f1b"


def test_a_cap_below_what_a_policy_needs_is_refused() -> None:
    config = configured(MICROBATCHES, schedule={"policy": "adaptive", "max_held": 3})
    with pytest.raises(
        axrt.ConfigError,
        match=(
            r"\[schedule\] policy adaptive holds 4 chunks on 2 ranks; set max_held = 4 or more, "
            r"or 0"
        ),
    ):
        LocalWorld(2).run(
            lambda transport: axrt.initialize(perceptron(), config=config, transport=transport)
        )


def test_long_steps_are_foretold_from_shorter_ones() -> None:
    """With what a policy holds: all of a step's microbatches, under gpipe."""
    for m in (8, 64):
        found = {
            one.schedule.policy: one
            for one in choose(
                Config.read(configured(m)), perceptron(), 2, ModelCosts(EQUAL, Edge())
            )
        }
        assert found["gpipe"].held_mib == m * 4
        assert found["1f1b"].step_s == pytest.approx((m + 1) * 4 * 0.03, rel=0.03)


def scaled(module: nn.Module, value: Tensor) -> Tensor:
    return value * module.weight.mean()  # type: ignore[operator]


def test_layers_that_look_alike_and_are_not_are_told_apart() -> None:
    def wider(inputs: int, outputs: int) -> type[nn.Module]:
        class Layer(nn.Module):
            def __init__(self, dropout: float) -> None:
                super().__init__()
                self.linear = nn.Linear(inputs, outputs)

            def forward(self, value: Tensor) -> Tensor:
                out: Tensor = self.linear(value)
                return out

        return Layer

    layers = [axrt.LayerSpec(wider(16, 16), 0.1), axrt.LayerSpec(wider(16, 5), 0.1)]
    tied = [
        axrt.TiedLayerSpec("w", nn.Linear, 16, 16),
        axrt.TiedLayerSpec("w", nn.Linear, 16, 16, forward_fn=scaled),
    ]
    model = axrt.PipelineModule([*tied, *layers, nn.Identity()], functional.cross_entropy)
    assert [
        one.sent_bytes for one in measure(model, 7, BATCHES(0)[0], generator(), AS_THEY_ARE)
    ] == [
        384,
        384,
        384,
        120,
        0,
    ]


def test_measuring_changes_neither_the_sample_nor_the_loss() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen = 0

        def forward(self, value: Tensor, target: Tensor) -> Tensor:
            self.seen += 1
            return functional.cross_entropy(value, target)

    loss, sample = Loss(), BATCHES(0)[0]
    before = sample[0].clone()
    measure(
        axrt.PipelineModule([nn.ReLU(inplace=True), nn.Linear(16, 5)], loss),
        7,
        sample,
        generator(),
        AS_THEY_ARE,
    )
    assert loss.seen == 0
    assert torch.equal(sample[0], before)


def test_the_users_generator_is_where_it_was() -> None:
    users = torch.default_generator.get_state()
    config = configured(MICROBATCHES, schedule={"policy": "auto"})
    with axrt.initialize(
        perceptron(), config=config, transport=LocalWorld(1).alone(), sample=BATCHES(0)[0]
    ):
        assert torch.equal(users, torch.default_generator.get_state())


def test_a_model_whose_layers_share_weights_where_chunks_would_cut_it_keeps_one_stage_a_rank() -> (
    None
):
    shared = nn.Linear(16, 16)
    layers = [shared, shared, nn.Linear(16, 16), nn.Linear(16, 5)]

    def rank_main(transport: Transport) -> str:
        model = axrt.PipelineModule(layers, functional.cross_entropy)
        with axrt.initialize(model, config=configured(MICROBATCHES), transport=transport) as engine:
            return engine.schedule.policy

    assert LocalWorld(2).run(rank_main) == ["zb-h1"] * 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_where_replicas_share_only_policies_are_tried_under_which_they_can(
    deterministic: bool,
) -> None:
    """One that was chosen, and then refused by a name that nobody had asked for, ended a start."""
    settings = configured(
        8,
        parallel={"data": 2},
        schedule={"policy": "auto", "share": True},
        run={"deterministic": deterministic},
    )
    found = {one.schedule.policy for one in choose(Config.read(settings), perceptron(), 2, LATE)}
    assert "1f1b" in found
    assert not found & {"gpipe", "breadth-first", "chimera"}
    assert ("zb-h1" in found) is not deterministic
    if not deterministic:
        return

    def rank_main(transport: Transport) -> float:
        sample = BATCHES(0)[0]
        with axrt.initialize(
            perceptron(), adamw, config=settings, transport=transport, sample=sample
        ) as engine:
            assert engine.schedule.policy in found
            mine = [*BATCHES(engine.data_rank)] * 4
            return engine.train_batch(iter(mine) if engine.reads else None).loss

    assert len(set(LocalWorld(4).run(rank_main))) == 1
