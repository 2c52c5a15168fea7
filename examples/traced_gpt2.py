"""GPT-2 of transformers, as it is, for `axrt train`; it needs `pip install transformers`.

mpirun -n 2 axrt train examples/quickstart.toml model.factory=examples.traced_gpt2:model
"""

import torch
import transformers
from torch import Tensor, nn

import axrt


def untraced(config: axrt.Config) -> nn.Module:
    """The model in the sizes of `[model]`, with weights that the seed of the run decides."""
    sizes = config.model
    torch.manual_seed(config.run.seed)
    of_gpt2 = transformers.GPT2Config(
        n_layer=sizes.layers,
        n_embd=sizes.width,
        n_head=sizes.heads,
        n_positions=sizes.context,
        vocab_size=sizes.vocab,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(of_gpt2)


def loss(outputs: transformers.utils.ModelOutput, targets: Tensor) -> Tensor:
    """The mean cross-entropy of what the model says of the tokens that follow."""
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())


def model(config: axrt.Config) -> axrt.PipelineModule:
    """The model as a pipeline."""
    shape = config.schedule.microbatch_size, config.model.context
    tokens = torch.zeros(shape, dtype=torch.int64)
    return axrt.traced(untraced(config), (tokens, tokens), loss)
