"""One rank of one part: `python -m peers.job JSON STORE OUT`, started by mpirun; rank 0 writes the
rows to OUT."""

import json
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from . import empty, messages, real, sharing, synthetic, varied
from .arena import join


def rows_of(asked: dict[str, Any]) -> list[dict[str, Any]]:
    """What the part measured."""
    part, rounds = asked["part"], asked["rounds"]
    if part == "synthetic":
        return synthetic.run(synthetic.Case(**asked["case"]), rounds)
    if part == "varied":
        return varied.run(varied.Case(**asked["case"]), rounds)
    parts = {"real": real.run, "empty": empty.run, "messages": messages.run, "sharing": sharing.run}
    return parts[part](rounds)


def main() -> None:
    asked, store, out = sys.argv[1:]
    join(store)
    rows = rows_of(json.loads(asked))
    if rows:
        Path(out).write_text(json.dumps(rows))
    dist.barrier()


if __name__ == "__main__":
    main()
