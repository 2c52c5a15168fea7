"""One rank of one job: `python -m memory.job JSON STORE FOLDER`, started by mpirun.

    1. a tiny model is trained with the same setting, which loads all code, and compiles some
    2. the model is built, and the growth of the process counts from here
    3. a first step; a step in which storages are looked at; here the growth has been seen
    4. a step in which traffic is counted; another one; steps that are timed

Up to 3 freed memory goes back to the system at once, so that the growth is what was there at one
time. Then it stays with the process, as speed wants it. Rank 0 writes the row to FOLDER/row, and a
rank that fails writes the reason to FOLDER/reason. A job may be asked for the first point alone.
"""

import gc
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from peers.arena import join, settle, timed

from axrt.device.allocator import give_freed_memory_back, keep_freed_memory

from . import of_axrt, of_deepspeed, of_torch
from .contestant import Contestant
from .model import Sizes
from .process import Growth
from .settings import Setting
from .storages import Storages, looking


def made(setting: Setting, sizes: Sizes, scratch: str) -> Contestant:
    """The runtime of a row, ready to train."""
    ranks = dist.get_world_size()
    options = _options(setting, sizes, scratch)
    if setting.runtime == "axrt":
        config = of_axrt.settings_of(sizes, options, setting.pipe, ranks)
        return of_axrt.contestant(sizes, config)
    if setting.runtime == "torch":
        return of_torch.contestant(sizes, options)
    return of_deepspeed.contestant(sizes, options)


def measured(setting: Setting, sizes: Sizes, scratch: str) -> dict[str, Any]:
    """What this rank has found of a row."""
    give_freed_memory_back()
    _rehearse(setting, sizes.tiny, scratch)
    growth = Growth()
    contestant = made(setting, sizes, scratch)
    losses = [contestant.step()]
    storages = Storages(contestant.held)
    with looking(storages):
        losses.append(contestant.step())
    grown = growth.num_bytes()
    keep_freed_memory()
    with contestant.sending() as sent:
        losses.append(contestant.step())
        sent_bytes = sent.num_bytes
    losses.append(contestant.step())
    settle()
    took = timed(lambda: losses.append(contestant.step()), sizes.steps)
    contestant.close()
    return {
        "losses": losses,
        "counted_bytes": storages.most,
        "process_bytes": grown,
        "sent_bytes": sent_bytes,
        "tokens_per_s": sizes.steps * sizes.tokens / took.wall_s,
    }


def row_of(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of all ranks: memory of the fullest rank, and the mean of what they send."""
    losses = [
        [one for one in of if one is not None]
        for of in zip(*(r["losses"] for r in ranks), strict=True)
    ]
    return {
        **{key: max(of[key] for of in ranks) for key in ("counted_bytes", "process_bytes")},
        "sent_bytes": sum(of["sent_bytes"] for of in ranks) / len(ranks),
        "tokens_per_s": ranks[0]["tokens_per_s"],
        "losses": [sum(of) / len(of) for of in losses],
    }


def run(setting: Setting, sizes: Sizes, scratch: str, folder: Path) -> None:
    """Measure a row and write it down; every rank calls it."""
    mine = measured(setting, sizes, scratch)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        row = row_of(ranks)
        if setting.runtime == "axrt":
            options = _options(setting, sizes, scratch)
            config = of_axrt.settings_of(sizes, options, setting.pipe, len(ranks))
            row |= of_axrt.predicted(sizes, config, len(ranks))
        (folder / "row").write_text(json.dumps(row))
    dist.barrier()


def _options(setting: Setting, sizes: Sizes, scratch: str) -> Any:
    replicas = dist.get_world_size() // setting.pipe
    return setting.filled(
        scratch=scratch,
        microbatches=sizes.microbatches // replicas,
        chunks=sizes.layers // setting.pipe,
    )


def _rehearse(setting: Setting, sizes: Sizes, scratch: str) -> None:
    contestant = made(setting, sizes, scratch)
    contestant.step()
    contestant.step()
    contestant.close()
    del contestant
    gc.collect()


def main() -> None:
    asked, store, folder = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    try:
        join(store)
        setting, sizes = Setting(*asked["setting"]), Sizes(*asked["sizes"])
        if asked["rehearses"]:
            _rehearse(setting, sizes.tiny, asked["scratch"])
        else:
            run(setting, sizes, asked["scratch"], folder)
    except BaseException as error:
        traceback.print_exc()
        said = (str(error).splitlines() or [""])[0]
        (folder / "reason").write_text(f"{type(error).__name__}: {said}")
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(1)


if __name__ == "__main__":
    main()
