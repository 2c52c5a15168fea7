"""The table of settings: one row is a runtime with its options.

Options may have three words in braces. `{scratch}` is a directory on a disk, `{microbatches}` is
the number of microbatches of a replica, and `{chunks}` that of the blocks of a rank.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A row.

    Args:
        runtime: "axrt", "torch" or "DeepSpeed".
        name: text that tells the row from the others of the runtime.
        options: of axrt overrides `section.key=value`; of torch the arguments of `of_torch.WAYS`;
            of DeepSpeed its section `zero_optimization`.
        least: smallest number of ranks on which the row makes sense.
        pipe: ranks of a pipeline.
        most: largest number of ranks on which the row makes sense; 0 = any number.
    """

    runtime: str
    name: str
    options: Any
    least: int = 2
    pipe: int = 1
    most: int = 0

    @property
    def label(self) -> str:
        """The name of the row."""
        return f"{self.runtime}, {self.name}"

    def fits(self, ranks: int) -> bool:
        """The row makes sense on so many ranks."""
        return self.least <= ranks <= (self.most or ranks) and ranks % self.pipe == 0

    def filled(self, **words: object) -> Any:
        """The options with values in the place of words in braces."""
        text = json.dumps(self.options)
        for word, value in words.items():
            text = text.replace(f"{{{word}}}", str(value))
        return json.loads(text)


def ours(name: str, *overrides: str, least: int = 2, pipe: int = 1) -> Setting:
    """A row of axrt; every further key of the configuration is one more override."""
    return Setting("axrt", name, list(overrides), least, pipe)


def from_text(text: str) -> Setting:
    """A row of axrt from what a user has typed, such as "parallel.pipe=2 memory.zero=2"."""
    words = text.split()
    pipes = [int(word.partition("=")[2]) for word in words if word.startswith("parallel.pipe=")]
    pipe = pipes[-1] if pipes else 1
    return ours(text, *words, least=pipe, pipe=pipe)


_DISK = ("memory.offload=stream", "memory.scratch=disk:{scratch}")
_ON_HOST = ("memory.offload=cpu",)
_WEIGHTS_TOO = (*_DISK, "memory.offload_parameters=true")
_EACH = ("memory.zero=2", "memory.reductions={microbatches}")
# All microbatches go through a block before the next one does: each is gathered once a pass.
_BY_BLOCK = ("schedule.policy=breadth-first", "schedule.chunks={chunks}")
# A microbatch goes through all blocks and back before the next one does: the least activations.
_BY_MICROBATCH = ("schedule.policy=interleaved-1f1b", "schedule.chunks={chunks}")
REFERENCE = Setting("torch", "one process", {"way": "plain"}, least=1, most=1)
SETTINGS: Sequence[Setting] = (
    REFERENCE,
    ours("replicas", "memory.zero=0", least=1),
    ours("zero 1", "memory.zero=1"),
    ours("zero 2", "memory.zero=2"),
    ours("zero 2, reduced often", *_EACH),
    ours("zero 2, block by block", "memory.zero=2", *_BY_BLOCK),
    ours("zero 3, block by block", "memory.zero=3", *_BY_BLOCK),
    ours("zero 3, block by block, none ahead", "memory.zero=3", "memory.gathered=1", *_BY_BLOCK),
    ours("zero 3, microbatch by microbatch", "memory.zero=3", *_BY_MICROBATCH),
    ours("replicas, disk", *_DISK, least=1),
    ours("zero 1, disk", "memory.zero=1", *_DISK),
    ours("zero 2, reduced often, disk", *_EACH, *_DISK),
    ours("zero 3, block by block, disk", "memory.zero=3", *_BY_BLOCK, *_DISK),
    ours("replicas, steps on the host", *_ON_HOST, least=1),
    ours("zero 2, steps on the host", "memory.zero=2", *_ON_HOST),
    ours("block by block, weights on the disk", *_WEIGHTS_TOO, *_BY_BLOCK, least=1),
    ours("zero 3, block by block, weights on the disk", "memory.zero=3", *_WEIGHTS_TOO, *_BY_BLOCK),
    ours("2 stages", "memory.zero=0", pipe=2),
    ours("2 stages, zero 1", "memory.zero=1", least=4, pipe=2),
    ours("2 stages, zero 2", "memory.zero=2", least=4, pipe=2),
    ours("2 stages, zero 2, reduced often", *_EACH, least=4, pipe=2),
    ours("2 stages, zero 3, block by block", "memory.zero=3", *_BY_BLOCK, least=4, pipe=2),
    ours("2 stages, disk", *_DISK, pipe=2),
    ours("2 stages, zero 2, reduced often, disk", *_EACH, *_DISK, least=4, pipe=2),
    ours("2 stages, zero 2, steps on the host", "memory.zero=2", *_ON_HOST, least=4, pipe=2),
    ours("2 stages, block by block, weights on the disk", *_WEIGHTS_TOO, *_BY_BLOCK, pipe=2),
    ours(
        "2 stages, zero 3, block by block, weights on the disk",
        "memory.zero=3",
        *_WEIGHTS_TOO,
        *_BY_BLOCK,
        least=4,
        pipe=2,
    ),
    Setting("torch", "DDP", {"way": "ddp"}),
    Setting("torch", "DDP, ZeroRedundancyOptimizer", {"way": "ddp", "zero": True}),
    Setting("torch", "FSDP2, gathers once", {"way": "fsdp", "reshard": False}),
    Setting("torch", "FSDP2, gathers again", {"way": "fsdp", "reshard": True}),
    Setting(
        "torch",
        "FSDP2, gathers again, reduced once",
        {"way": "fsdp", "reshard": True, "accumulates": True},
    ),
    Setting(
        "torch",
        "FSDP2, CPUOffloadPolicy",
        {"way": "fsdp", "reshard": True, "offloads": True},
        least=1,
    ),
    Setting("DeepSpeed", "ZeRO 1", {"stage": 1}),
    Setting("DeepSpeed", "ZeRO 2", {"stage": 2}),
    Setting("DeepSpeed", "ZeRO 3", {"stage": 3}),
    Setting(
        "DeepSpeed",
        "ZeRO-Offload",
        {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        least=1,
    ),
    Setting(
        "DeepSpeed",
        "ZeRO-Infinity",
        {
            "stage": 3,
            "offload_optimizer": {"device": "nvme", "nvme_path": "{scratch}"},
            "offload_param": {"device": "nvme", "nvme_path": "{scratch}"},
        },
        least=1,
    ),
)
