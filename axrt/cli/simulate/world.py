"""The world of a simulation: what a study varies now and then, as keys of a file or of the command
line. What most calls say is an option of `axrt simulate`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from axrt.config.reading import apply, built, parse_file, unknown
from axrt.config.section import Mistakes, Section, key
from axrt.scheduler.linger import LINGER
from axrt.scheduler.policies import is_own, policy_by_name


@dataclass(frozen=True, slots=True)
class World(Section):
    """Costs, links, offload and what replicas share; times are in the unit of `--costs`."""

    transfer: float = key(
        0.0,
        "what an activation or gradient takes on an edge, before the latency; with --cluster its "
        "bytes",
        least=0,
    )
    task_cost: float = key(0.0, "added to every task", least=0)
    step_cost: float = key(0.0, "of the optimizer, a bucket; with --zero that of a shard", least=0)
    buckets: int = key(1, "of a rank and chunk, each with a step and a sum of its own", least=1)
    slots: int = key(
        0,
        "buckets whose offloaded state a rank has on the device at a time, in a run at least 3; "
        "0 = state stays there",
        least=0,
    )
    copy_costs: tuple[float, ...] = key(
        (0.0, 0.0),
        "bringing a bucket's state to the device, and taking it back; with host_slots: bringing "
        "its weights, and taking its gradient to the host",
        least=0,
    )
    host_slots: int = key(
        0,
        "optimizer steps on the host: buckets whose gradient a rank has there at a time; 0 = steps "
        "are on the device",
        least=0,
    )
    bring_cost: float = key(
        0.0,
        "as memory.offload_parameters: bringing the weights of a stage from scratch; 0 = they stay "
        "on the device",
        least=0,
    )
    offload_activations: int = key(
        0,
        "as memory.offload_activations: chunks whose activations a rank may have on the device; 0 "
        "= all stay there",
        least=0,
    )
    stash_costs: tuple[float, ...] = key(
        (0.0, 0.0),
        "bringing back what a microbatch keeps on a rank, and taking it out; a chunk's is 1/v",
        least=0,
    )
    share: bool = key(
        False, "replicas share the microbatches of a step: whichever has room takes one"
    )
    reductions: int = key(
        0,
        "as memory.reductions: times that a step with --zero 2 adds a bucket up over replicas; 0 = "
        "as often as the schedule leaves a stage for another",
        least=0,
    )
    gathered: int = key(
        0,
        "as memory.gathered: stages whose weights a rank may have whole at a time; 0 = 2",
        least=0,
    )
    group: int = key(
        0,
        "replicas that add gradients up among themselves before groups do, as parallel.group, and "
        "share out among themselves, as parallel.group; 0 = all",
        least=0,
    )
    reduce_cost: float = key(0.0, "of adding up gradients of replicas, a bucket", least=0)
    reduce_transfer: float = key(
        0.0, "what the gradient of a bucket takes on an edge; its bytes with --cluster", least=0
    )
    message_cost: float = key(
        0.0, "for which a rank is busy sending any message, besides its tasks", least=0
    )
    node: tuple[float, ...] = key(
        (),
        "ranks of a node, and how many times as long sizes take between nodes, where the messages "
        "of a rank take turns; () = one node",
        least=0,
    )
    stragglers: tuple[float, ...] = key(
        (), "a factor on what the tasks of each rank take, replica by replica; () = 1", least=0
    )
    hiccups: tuple[float, ...] = key(
        (0.0, 1.0), "so large a share of all tasks takes so many times as long", least=0
    )
    lengths: float = key(
        -1.0,
        "sigma of a lognormal factor on what a microbatch takes, the same on all stages; -1 = what "
        "a file of --costs says, else 0",
        least=-1,
        most=3,
    )
    pieces: int = key(0, "of a weight gradient; 0 = what a file of --costs says, else 4", least=0)
    linger: float = key(
        LINGER,
        "how long a rank waits before a weight gradient that is early, as a share of it; acts with "
        "pieces = 1",
        least=0,
        most=10,
    )
    barrier: bool = key(False, "a step begins when all ranks have done the one before")
    clip: bool = key(
        False, "steps wait for the norm of all gradients, as for clipping and a loss scale"
    )
    fill: str = key(
        "auto",
        "as schedule.fill, at joints of --joints: 'always' = other work runs while a task waits "
        "for slices, 'never' = the rank waits, 'auto' = the faster of both in this world",
        choices=("auto", "always", "never"),
    )
    also: tuple[str, ...] = key(
        (), "with --policy all or --search: policies of your own, 'package.module:Class'"
    )
    samples: int = key(
        0, "in a microbatch, where a file of --costs has several; 0 = the fewest", least=0
    )
    seed: int = key(0, "of what varies", least=0)
    held_mib: float = key(0.0, "MiB that a microbatch holds on a rank; a chunk holds 1/v", least=0)

    @classmethod
    def read(cls, file: Path | None, overrides: Sequence[str]) -> "World":
        """The keys of section [world] of a file, and overrides such as world.slots=3.

        Raises:
            ConfigError: the file is no TOML, or keys are unknown or out of their range; all of them
                are named.
        """
        tree = parse_file(file) if file else {}
        mistakes = [text for override in overrides for text in apply(override, tree)]
        mistakes += unknown(tree, {"world": cls})
        world = built(cls, _with_lists(tree.get("world", {})), mistakes)
        if mistakes:
            raise Mistakes(mistakes)
        assert isinstance(world, cls)
        return world

    def as_options(self) -> dict[str, Any]:
        """The keys by name, as the simulation reads them."""
        found = asdict(self)
        found["lengths"] = None if self.lengths < 0 else self.lengths
        return found

    def _of_all(self) -> Iterator[str]:
        for name in ("copy_costs", "stash_costs", "hiccups", "node"):
            found = getattr(self, name)
            if len(found) != 2 and not (name == "node" and not found):
                yield f"world.{name} = {list(found)}; expected two numbers, such as 1,1.5"
        if self.hiccups[:1] > (1,):
            yield (
                f"world.hiccups = {list(self.hiccups)}: the first is a share of all tasks; "
                "expected at most 1"
            )
        if 0 in self.node:
            yield (
                f"world.node = {list(self.node)}; expected at least one rank and a factor above 0"
            )
        yield from self._of_offload()
        for name in self.also:
            try:
                if not is_own(name):
                    raise ValueError(f"{name!r}; expected 'package.module:Class'")
                policy_by_name(name)
            except ValueError as error:
                yield f"world.also: {error}"

    def _of_offload(self) -> Iterator[str]:
        if any(self.copy_costs) and not (self.slots or self.host_slots):
            yield (
                "world.copy_costs are of state that is offloaded, and without world.slots it stays "
                "on the device; expected world.slots=3, or another number of buckets; or "
                "world.host_slots"
            )
        if self.slots and self.host_slots:
            yield (
                f"world.slots = {self.slots} with world.host_slots = {self.host_slots}: buckets "
                "step on the device or on the host; expected one of the two"
            )
        if any(self.stash_costs) and not self.offload_activations:
            yield (
                "world.stash_costs are of activations that are offloaded; expected "
                "world.offload_activations, too, with a number of chunks that stay on the device"
            )
        if self.slots and not any(self.copy_costs):
            yield (
                "world.slots alone changes nothing, since copies that take no time are never "
                "waited for; expected world.copy_costs too, such as 1,1.5"
            )


def instead_of(option: str) -> str:
    """What to write in place of a former option of the command; "" for one that never was."""
    if option == "--straggler":
        return "expected a factor for each rank, such as world.stragglers=1,1.3"
    name = option.removeprefix("--").replace("-", "_")
    if is_key(name):
        return f"expected world.{name}=..., or that key in the file of --world"
    return ""


def is_key(name: str) -> bool:
    """A key of [world] has that name."""
    return any(item.name == name for item in fields(World))


def _with_lists(keys: Any) -> Any:
    """Lists that are written as in 1,1.5, which no shell takes for something else."""
    if not isinstance(keys, Mapping):
        return keys
    are_lists = {item.name for item in fields(World) if isinstance(item.default, tuple)}
    return {name: _list_of(value) if name in are_lists else value for name, value in keys.items()}


def _list_of(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return [value]
    if not isinstance(value, str):
        return value
    try:
        return [float(word) for word in value.split(",")]
    except ValueError:
        return value.split(",")
