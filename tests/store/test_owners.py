"""Who steps which matrix."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import axrt
from axrt.model.matrices import trained_in
from axrt.models.registry import model_of
from axrt.scheduler.bucket import copies_by_pipe
from axrt.store.assign import BucketSpec
from axrt.store.flat import Layout
from axrt.store.owners import CostsWhole, by_owner, owned_by, owners_of, owners_of_stage
from axrt.store.presets import optimizer_factory
from axrt.store.shards import Cut

COSTS = st.dictionaries(st.text("ab.", max_size=5), st.sampled_from([0.0, 1.0, 2.5, 7.0, 40.0]))


@given(COSTS, st.integers(1, 9))
def test_nobody_had_less_when_an_owner_got_its_least(costs: dict[str, float], owners: int) -> None:
    """Which is what longest processing time means, and bounds the busiest by 4/3 of the best."""
    found = owners_of(costs, owners)
    assert set(found) == set(costs)
    assert set(found.values()) <= set(range(owners))
    of_owner = [[costs[name] for name in costs if found[name] == one] for one in range(owners)]
    for costs_of_one in of_owner:
        without_least = sum(costs_of_one) - min(costs_of_one, default=0.0)
        assert all(without_least <= sum(other) + 1e-9 for other in of_owner)
    assert owners_of(dict(reversed(costs.items())), owners) == found, "not by the order of a dict"


@pytest.mark.parametrize("name", ["muon", "soap", "kfac"])
@pytest.mark.parametrize("owners", [2, 4, 8])
def test_owners_of_the_built_in_model_have_as_much_to_do(owners: int, name: str) -> None:
    sizes = {"vocab": 50304, "width": 768, "heads": 12, "layers": 12, "context": 1024}
    config = axrt.Config.read({"model": sizes, "optimizer": {"name": name}})
    model = model_of(config)
    factory = optimizer_factory(config.optimizer, model)
    named = [one for place, layer in enumerate(model.layers) for one in trained_in(layer, place)]
    found = owners_of_stage(factory, model.layers, named, owners)
    assert isinstance(factory, CostsWhole)
    load = [one.operations for one in owned_by(factory, named, found, owners)]
    assert max(load) <= 1.05 * sum(load) / owners


def test_a_bucket_lists_what_an_owner_steps_side_by_side_and_each_type_by_itself() -> None:
    named = [(f"1.{name}", nn.Parameter(torch.empty(3, 7))) for name in "abcdef"]
    owners = {f"1.{name}": owner for name, owner in zip("abcdef", [2, 0, 2, 0, 3, 0], strict=True)}
    spec = BucketSpec(copies_by_pipe(0, 0, 4), named, [name for name, _ in named], True)
    listed, cut = by_owner(spec, Cut(4, 1, 3), owners)
    assert [name[-1] for name in listed.called] == [*"bdface"]
    assert cut is not None
    assert (cut.whole, cut.mine, cut.owners) == (True, 1, (0, 0, 0, 2, 2, 3))
    for places in (range(6), (0, 4, 5), (3,)):
        layout = Layout([listed.named[place][1] for place in places])
        of_type = cut.of_type(places)
        by_shard = [
            [places[piece.place] for piece in of_type._replace(pipe=pipe).pieces(layout)]
            for pipe in range(4)
        ]
        assert by_shard == [
            [place for place in places if cut.owners[place] == owner] for owner in range(4)
        ]
