"""Where layers are cut into stages."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import axrt
from axrt.model.layers import num_parameters
from axrt.model.partition import boundaries

LAYERS = [nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()]


def test_uniform_gives_every_stage_as_many_layers() -> None:
    assert boundaries(LAYERS, 3, "uniform") == [0, 2, 4, 6]
    assert boundaries(LAYERS, 4, "uniform") == [0, 1, 2, 4, 6]


def test_parameters_gives_every_stage_as_many_parameters() -> None:
    assert boundaries(LAYERS, 2, "parameters") == [0, 1, 6]


def test_operations_leave_out_what_is_looked_up() -> None:
    layers = [nn.Embedding(100, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    assert boundaries(layers, 2, "parameters") == [0, 1, 4]
    assert boundaries(layers, 2, "operations") == [0, 2, 4]


def test_operations_count_those_of_a_rank() -> None:
    """On a vee of two ranks the first one holds the embedding and the head."""
    embedding, block, head = nn.Embedding(9, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 2)
    layers = [embedding, *[block] * 6, head]
    vee = [(0, 3), (1, 2)]
    assert boundaries(layers, 4, "operations", vee) == [0, 3, 4, 6, 8]
    assert boundaries(layers, 4, "uniform", vee) == [0, 2, 4, 6, 8]


def test_type_counts_the_layers_whose_class_matches() -> None:
    assert boundaries(LAYERS, 3, "type:linear") == [0, 1, 3, 6]


def test_boundaries_may_be_given_and_may_leave_a_stage_empty() -> None:
    assert boundaries(LAYERS, 3, [0, 2, 2, 6]) == [0, 2, 2, 6]


@pytest.mark.parametrize(
    ("method", "stages", "text"),
    [
        ("uniform", 7, "6 layers cannot fill 7 stages"),
        ("type:conv", 2, "finds nothing to balance"),
        ("type:(", 2, "which is no regular expression"),
        ("fair", 2, "expected 'uniform', 'parameters', 'operations', 'type:REGEX' or a list"),
        ([0, 4, 2, 6], 3, "expected 4 rising numbers from 0 to 6"),
        ([0, 6], 2, "does not cut 6 layers into 2 stages"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(method: object, stages: int, text: str) -> None:
    with pytest.raises(axrt.ConfigError, match=text):
        boundaries(LAYERS, stages, method)  # type: ignore[arg-type]


def test_parameters_of_a_specification_are_counted_without_building_it() -> None:
    assert num_parameters(axrt.LayerSpec(nn.Linear, 10**5, 10**5)) == 10**10 + 10**5


def spec_of(anything: Any, *args: Any) -> axrt.LayerSpec:
    return axrt.LayerSpec(anything, *args)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"layers": []}, "at least one layer"),
        ({"layers": [3]}, "layer 0 is 3; expected a module"),
        (
            {"layers": None},
            "layers is None; expected an nn.Sequential or a list of modules, LayerSpecs and "
            "functions",
        ),
        ({"layers": nn.Linear(2, 2)}, r"layers is Linear\(.*; expected an nn.Sequential or a list"),
        ({"layers": [nn.ReLU(), None]}, "layer 1 is None; expected a module"),
        (
            {"layers": [nn.ReLU(), spec_of(None)]},
            r"layer 1 is LayerSpec\(None\); expected a subclass of torch.nn.Module first",
        ),
        (
            {"layers": [spec_of(functional.relu, 3)]},
            r"layer 0 is LayerSpec\(relu, 3\); expected a subclass of torch.nn.Module first: plain "
            r"functions need no LayerSpec",
        ),
        (
            {"layers": [spec_of(nn.ReLU())]},
            r"layer 0 is LayerSpec\(ReLU\(\)\); expected a subclass of torch.nn.Module first",
        ),
        (
            {"layers": [nn.ReLU(), axrt.LayerSpec(nn.Linear, 3)]},
            r"layer 1 is LayerSpec\(Linear, 3\): missing a required argument: 'out_features'; "
            r"expected what Linear takes",
        ),
        (
            {"layers": [axrt.TiedLayerSpec("key", nn.Linear, 3, 3, widht=3)]},
            r"layer 0 is LayerSpec\(Linear, 3, 3, widht=3\): got an unexpected keyword argument "
            r"'widht'; expected what Linear takes",
        ),
        ({"topology": object()}, "topology is not taken: set \\[parallel\\]"),
        (
            {"activation_checkpoint_interval": 1},
            "activation_checkpoint_interval = 1 is not taken: set memory.recompute in the "
            "configuration",
        ),
        ({"seed_layers": False}, "expected True"),
    ],
)
def test_what_a_pipeline_module_does_not_do_is_refused(
    arguments: dict[str, object], text: str
) -> None:
    with pytest.raises(axrt.ConfigError, match=text):
        axrt.PipelineModule(**{"layers": LAYERS, "loss_fn": functional.mse_loss, **arguments})  # type: ignore[arg-type]


def test_num_stages_is_checked_against_the_ranks() -> None:
    model = axrt.PipelineModule(LAYERS, functional.mse_loss, num_stages=2)
    assert model.boundaries(2) == [0, 3, 6]
    with pytest.raises(axrt.ConfigError, match="the run's pipeline has 3 stages"):
        model.boundaries(3)


def test_a_sequential_is_taken_apart() -> None:
    assert len(axrt.PipelineModule(nn.Sequential(*LAYERS), functional.mse_loss).layers) == 6


def test_a_layer_that_cannot_be_built_is_named() -> None:
    model = axrt.PipelineModule([nn.ReLU(), axrt.LayerSpec(nn.Linear, 3, -3)], functional.mse_loss)
    with pytest.raises(RuntimeError) as caught:
        model.sequential(0)
    assert caught.value.__notes__ == [
        "while layer 1 of the model was built, LayerSpec(Linear, 3, -3)"
    ]


@pytest.mark.parametrize(
    "call", ["parameters", "named_parameters", "state_dict", "to", "cuda", "train", "eval"]
)
def test_what_a_module_has_and_a_pipeline_module_has_not_is_told_with_what_there_is(
    call: str,
) -> None:
    model = axrt.PipelineModule(LAYERS, functional.mse_loss)
    with pytest.raises(
        AttributeError, match=f"a PipelineModule has no {call}.*; .*axrt.initialize"
    ) as caught:
        getattr(model, call)()
    assert "\n" not in str(caught.value)
    assert not hasattr(model, "nonsense")
    assert copy.deepcopy(model).layers


def test_an_optimizer_made_of_parameters_is_answered_with_the_function_that_makes_one() -> None:
    model = axrt.PipelineModule(LAYERS, functional.mse_loss)
    with pytest.raises(AttributeError, match="optimizer=lambda named: torch.optim.AdamW"):
        torch.optim.Adam(model.parameters())  # type: ignore[attr-defined]


def test_the_weights_of_a_specification_depend_on_seed_and_place_alone() -> None:
    one = (
        axrt.PipelineModule([axrt.LayerSpec(nn.Linear, 2, 2)] * 2, functional.mse_loss)
        .sequential(3)
        .state_dict()
    )
    other = (
        axrt.PipelineModule([nn.ReLU(), axrt.LayerSpec(nn.Linear, 2, 2)], functional.mse_loss)
        .sequential(3)
        .state_dict()
    )
    assert one["1.weight"].tolist() == other["1.weight"].tolist()
    assert one["0.weight"].tolist() != one["1.weight"].tolist()


def test_seeds_are_the_same_on_every_machine() -> None:
    assert axrt.seed_of(0, 0, 0, 0) == 5809880761037817570
    assert (
        len(
            {
                axrt.seed_of(s, t, k, layer)
                for s in range(3)
                for t in range(3)
                for k in range(3)
                for layer in range(3)
            }
        )
        == 81
    )
