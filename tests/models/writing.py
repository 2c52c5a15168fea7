"""Texts written by one rank or several, in this process."""

from collections.abc import Sequence

from torch import nn

from axrt.generation.generation import Choice, Stage
from axrt.generation.pipelined_generation import PipelinedGeneration
from axrt.transport import Transport
from axrt.transport.local import LocalWorld

Written = dict[int, list[int]]  # tokens by text


def written(
    stage: Stage,
    prompt: Sequence[int],
    number: int,
    context: int,
    choice: Choice,
    keeps: bool,
    seed: int = 0,
) -> list[int]:
    """The tokens behind a prompt, by one rank."""
    rank = PipelinedGeneration(LocalWorld(1).alone(), stage, choice, seed)
    found = list(rank.write([prompt], number, context, keeps, ends=()))
    assert found[-1] == (0, None)
    return [token for _, token in found if token is not None]


def written_by_ranks(
    stages: Sequence[nn.Module],
    prompts: Sequence[Sequence[int]],
    number: int,
    context: int,
    choice: Choice,
    end: int | None,
    seed: int,
) -> Written:
    """The tokens behind prompts, by a pipeline whose messages come in an order of the seed."""

    def rank_main(transport: Transport) -> Written:
        stage = Stage(stages[transport.rank], context)
        rank = PipelinedGeneration(transport, stage, choice, 5)
        found: Written = {}
        if transport.rank:
            rank.serve()
        else:
            for text, token in rank.write(
                prompts, number, context, True, () if end is None else (end,)
            ):
                of = found.setdefault(text, [])
                of += [] if token is None else [token]
        transport.close()
        return found

    return LocalWorld(len(stages), seed).run(rank_main)[0]
