"""`[memory]`: what stays on the device, and what leaves it."""

from collections.abc import Iterator
from dataclasses import dataclass

from axrt.scheduler.planning.recompute import most_recomputed

from .section import Section, key


@dataclass(frozen=True, slots=True)
class Memory(Section):
    """The cut of memory into buckets, recomputation (activation checkpointing), and offload of the
    optimizer's state and of activations."""

    activations_mb: float = key(
        0.0, "MiB of activations that a rank may hold, for policy auto to keep to; 0 = any", least=0
    )
    bucket_mb: float = key(
        25.0,
        "MiB of parameters that are reduced and stepped as one; 0 = each parameter by itself",
        least=0,
    )
    recompute: str | int = key(
        "none",
        "what of a stage runs forward again before its backward instead of being kept: 'none'; "
        "'full' = all; a number = so many of its "
        "layers; 'stage-aware:SHARE' = SHARE of its layers (a half where it is left out) on the "
        "rank that holds most microbatches, less on "
        "the others. A rank that holds at most one recomputes nothing",
    )
    offload: str = key(
        "none",
        "where the optimizer's state lives: 'none' = on the device; 'stream' = in memory.scratch "
        "(masters and moments), and each bucket comes to the device for its step; 'cpu' = in the "
        "host's memory, where the optimizer steps, too",
        choices=("none", "stream", "cpu"),
    )
    offload_activations: int = key(
        0,
        "number of microbatches, each of one stage, whose activations a rank may have on the "
        "device at a time; what it holds beyond that is in memory.scratch until its backward; "
        "0 = all stay on the device",
        least=0,
    )
    offload_parameters: bool = key(
        False,
        "with offload = 'stream': weights are in memory.scratch, too; those of a stage come to the "
        "device for the tasks that read them, so many stages at a time as memory.gathered says",
    )
    scratch: str = key(
        "host",
        "what holds all that is offloaded: 'host' = CPU memory; 'disk:DIR' = one unnamed file a "
        "rank in that directory, which exists",
        is_path=True,
    )
    scratch_gb: float = key(
        0.0, "GB of scratch that a rank may use (10^9 bytes); 0 = any number", least=0
    )
    scratch_gb_s: float = key(
        0.0,
        "GB a second that a rank copies in each direction at most, to leave a shared disk to "
        "others; 0 = no bound",
        least=0,
    )
    zero: int = key(
        0,
        "what the replicas of a bucket share out (ZeRO): 0 = nothing; 1 = masters and the "
        "optimizer's state; 2 = gradients, too; 3 = weights, too",
        least=0,
        most=3,
    )
    gathered: int = key(
        2,
        "with zero = 3 or offload_parameters: number of stages whose weights a rank may have whole "
        "at a time; 1 brings none ahead",
        least=1,
    )
    reductions: int = key(
        0,
        "with zero = 2 or 3: number of times that a step adds a gradient up over replicas, and "
        "lets go of it; 0 = as often as the schedule leaves a stage for another",
        least=0,
    )
    device_gb: float = key(
        0.0,
        "GB that a rank may have on its device (10^9 bytes; without an accelerator, in its own "
        "memory): what needs more by prediction is refused before training; 0 = not checked",
        least=0,
    )

    @property
    def uses_scratch(self) -> bool:
        """Something may be offloaded."""
        return self.offload != "none" or self.offload_activations > 0

    @property
    def scratch_directory(self) -> str | None:
        """The directory of a scratch disk; None for the host's memory."""
        kind, colon, directory = self.scratch.partition(":")
        return directory if kind == "disk" and colon else None

    @property
    def comes_to_device(self) -> bool:
        """The optimizer's state is off the device, and comes there for its step."""
        return self.offload == "stream"

    @property
    def steps_on_host(self) -> bool:
        """The optimizer's state is in the host's memory, and steps there."""
        return self.offload == "cpu"

    def _of_all(self) -> Iterator[str]:
        if self.steps_on_host and (self.scratch != "host" or self.scratch_gb_s):
            key, none = ("scratch_gb_s", 0.0) if self.scratch == "host" else ("scratch", "host")
            yield (
                f"memory.{key} = {getattr(self, key)!r} and memory.offload = {self.offload!r}, "
                "which steps state where it is, in the host's memory; expected "
                f"memory.{key} = {none!r}, or memory.offload = 'stream'"
            )
        if self.offload_parameters and self.offload != "stream":
            yield (
                f"memory.offload_parameters with memory.offload = {self.offload!r}: weights leave "
                "the device along with the state that they are stepped from; expected "
                "memory.offload = 'stream'"
            )
        if self.offload_parameters and self.zero in (1, 2):
            yield (
                f"memory.offload_parameters with memory.zero = {self.zero}, which keeps whole "
                "weights on every rank; expected memory.zero = 3, or 0"
            )
        try:
            most_recomputed(self.recompute)
        except ValueError as error:
            yield f"memory.recompute = {error}; or a number of layers"
        if self.scratch != "host" and not self.scratch_directory:
            yield (
                f"memory.scratch = {self.scratch!r}; expected 'host', or 'disk:DIR' with a "
                "directory that exists"
            )
