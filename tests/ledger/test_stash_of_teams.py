"""What a member keeps of a layer depends on how it runs it."""

from dataclasses import replace

import torch
from torch import nn

from axrt.config import Config
from axrt.ledger.activations import Stashes
from axrt.ledger.skeleton import Skeletons
from axrt.model.joints import Team
from axrt.model.layers import LayerSpec
from axrt.model.team_layers import TeamLayers
from axrt.scheduler.simulation.schedules import build_schedule


def test_equal_layers_of_which_one_sees_its_own_tokens_alone_keep_other_amounts() -> None:
    layers = [LayerSpec(nn.Linear, 8, 8) for _ in range(4)]
    plan, team = {"1": "token"}, Team(0, 2)
    sample = torch.ones(1, 4, 8), torch.ones(1, 4, 8)
    skeletons = Skeletons(layers).of_team(plan, team)
    stashes = Stashes(skeletons, nn.functional.mse_loss, sample, TeamLayers(plan, team))
    job = replace(build_schedule("1f1b", 4, 4), cuts=(0, 1, 2, 3, 4), team=2)
    found = stashes.of_stages(Config(), job)
    own_tokens, all_tokens = found[1].kept, found[2].kept
    assert own_tokens * 2 == all_tokens == 4 * 8 * 4
