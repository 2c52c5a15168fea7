"""This process as a rank of the job: its device, threads, transport, loop and exchange."""

# Settings of the process as a whole (the current device, the number of threads) are changed here
# and nowhere else.

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from axrt.config import Config, Memory
from axrt.device.device import CPU, agreed, identity
from axrt.device.queues import Inline
from axrt.device.threads import threads_of, usable_cores
from axrt.model.seeds import BorrowedGenerator
from axrt.observe.activity import Activity
from axrt.observe.diagnosis import WaitDiagnosis
from axrt.observe.inspection import Inspection
from axrt.observe.observer import Observer
from axrt.observe.trace import Trace
from axrt.scheduler.rules import OnDevice, Queue
from axrt.transport import Transport
from axrt.transport.collectives import CollectiveQueue
from axrt.transport.control import MAIN, ControlMessage, Topic
from axrt.world.mesh import Mesh
from axrt.world.world import World

from .compute import Compute, compute_on, copies_on, host_steps
from .exchange import Exchange
from .loop import Loop
from .user_tensors import UserTensors

_MANY = 1 << 30  # collectives of a rank may be under way
# Python's lock changes hands at most this often while tasks compute: a copy's thread that waits the
# usual 5 ms for it, several times a copy, leaves a disk idle.
_SWITCH_S = 5e-4


class Rank:
    """One rank, ready to run sessions.

    Args:
        transport: transport to the other ranks; None: the world's own.
    Attributes:
        number: rank of this process in the job, from 0.
        size: number of ranks of the job.
        mesh: coordinates of this rank.
        device: device that it computes on.
        generator: random numbers on that device.
        transport: transport to the other ranks.
        trace: record of the tasks and pauses in the steps that are traced.
        user_tensors: border between the user's tensors and those of tasks.
        collective_queue: queue of the library's collectives.
        loop: loop that runs sessions.
        exchange: control messages between ranks.
        hears: function that hears the control messages of a topic, by topic; the exchange hears
            all others.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        transport: Transport | None,
        observers: Sequence[Observer],
    ) -> None:
        self.number, self.size = (
            (transport.rank, transport.size) if transport else (world.rank, world.size)
        )
        self.mesh = Mesh.of(
            self.number,
            self.size,
            config.parallel.pipe,
            config.parallel.data,
            config.parallel.rank_order,
            config.parallel.tensor,
        )
        node = world.gathered_on_node(identity(world.device))
        self.device = agreed(world.device, node, config.run.device, config.run.share_gpu)
        world.check_alike({"run": {"device": self.device.type}})
        self._settle(world)
        self.generator = BorrowedGenerator(config.run.seed, self.device)
        self.transport = transport or world.transport(self.device, config.run.cuda_aware)
        row_of = self.mesh.row_of
        self.trace = Trace(row_of(self.number), row_of, config.run.trace_steps)
        self.hears: dict[Topic, Callable[[ControlMessage, Any], None]] = {}
        self._heartbeat = world.heartbeat(config.run.patience_s)
        activity = Activity()
        self.inspection = Inspection(self.number, self.size, activity, config.parallel.tensor)
        watching = (
            *observers,
            self.inspection,
            WaitDiagnosis(f"{self.number}{self.mesh.named_member}", activity),
            *((self.trace,) * (config.run.trace_steps > 0)),
        )
        compute = compute_on(self.device)
        self.collective_queue = CollectiveQueue(self.device)
        self.user_tensors = UserTensors(self.device, compute)
        self.loop = Loop(
            self.transport,
            {
                OnDevice.COMPUTE: compute,
                OnDevice.COLLECTIVES: Compute(self.collective_queue, _MANY),
                OnDevice.TICKETS: Compute(Inline()),
                **_copies(config.memory, self.device),
            },
            self.mesh,
            self._hear,
            self.user_tensors.taken,
            self._heartbeat,
            watching,
            activity,
        )
        self.exchange = Exchange(self.loop, self.number, self.size)

    def _settle(self, world: World) -> None:
        """Set the number of threads of the whole process."""
        if world.size > 1:
            usable = world.gathered_on_node(usable_cores())
            torch.set_num_threads(
                threads_of(torch.get_num_threads(), world.node_rank, usable, os.environ)
            )

    @property
    def is_main(self) -> bool:
        """True on the rank that prints, writes files and decides for all."""
        return self.number == MAIN

    def leave(self, calls: int) -> None:
        """Wait until every rank has made its last call, and release the heartbeat."""
        self.loop.leave(calls)
        self._heartbeat.free()

    def _hear(self, source: int, generation: int, control: ControlMessage, payload: Any) -> None:
        if control.topic in self.hears:
            self.hears[control.topic](control, payload)
        else:
            self.exchange.hear(source, generation, control, payload)


def _copies_apart(memory: Memory, device: torch.device) -> bool:
    """Copies to and from scratch have threads of their own, since they hold up who calls. Without
    an accelerator a copy of a gradient or of weights is a cast, which does so, too."""
    casts = memory.steps_on_host and device == CPU
    return bool(memory.scratch_directory or memory.scratch_gb_s or casts)


def _copies(memory: Memory, device: torch.device) -> dict[Queue, Compute]:
    """The engines that copy what is offloaded, one a direction, and the one of steps on the
    host."""
    if not memory.uses_scratch:
        return {}
    apart = _copies_apart(memory, device)
    if apart or memory.steps_on_host:
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
    directions = (OnDevice.COPIES_IN, OnDevice.COPIES_OUT)
    steps: dict[Queue, Compute] = {OnDevice.HOST: host_steps()} if memory.steps_on_host else {}
    return {one: copies_on(device, apart, one.value) for one in directions} | steps
