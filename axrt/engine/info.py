"""What an engine says of its place in the job."""

import torch

from axrt.config import Config, Schedule
from axrt.ledger.ledger import Tier
from axrt.ledger.measured import in_scratch
from axrt.ledger.peak import Peak
from axrt.planning.schedule import described
from axrt.runtime.rank import Rank
from axrt.scheduler.job import Job
from axrt.scheduler.policies import AlongPlan
from axrt.scheduler.simulation.timeline import Timeline
from axrt.store.local_model import LocalModel
from axrt.world.world import World


class EngineInfo:
    """Where this rank is in the job, and what it holds."""

    _world: World
    _rank: Rank
    _job: Job
    _schedule: Schedule
    _model: LocalModel
    _peak: Peak
    config: Config

    @property
    def rank(self) -> int:
        """This process's rank in the job, 0 <= rank < number of ranks."""
        return self._rank.number

    @property
    def schedule(self) -> Schedule:
        """The settings of the schedule, with the policy that was chosen where they left it open."""
        return self._schedule

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""
        return self._rank.device

    @property
    def is_main(self) -> bool:
        """True on one rank of the job: the one to print and write files."""
        return self._rank.is_main

    @property
    def reads(self) -> bool:
        """True if this rank draws the batches of its replica; the other ranks ignore them."""
        mesh = self._rank.mesh
        return mesh.member == 0 and mesh.pipe_rank == self._job.placement.rank_of(0)

    @property
    def num_trained(self) -> int:
        """Number of elements of the parameters that this rank's buckets train."""
        buckets = self._model.all_buckets
        return sum(one.numel() for bucket in buckets for _, one in bucket.named)

    @property
    def pipe_rank(self) -> int:
        """Index of this rank in its pipeline."""
        return self._rank.mesh.pipe_rank

    @property
    def computes_loss(self) -> bool:
        """True if this rank computes the loss of its replica; the last stage may be on any."""
        return self._job.last_stage in self._job.placement.stages_of(self._rank.mesh.pipe_rank)

    @property
    def pipe_size(self) -> int:
        """Number of ranks of a pipeline."""
        return self._job.ranks

    @property
    def data_rank(self) -> int:
        """Index of this rank's replica, and so of the part of the data that it reads."""
        return self._rank.mesh.data_rank

    @property
    def data_size(self) -> int:
        """Number of replicas of the pipeline (data parallelism)."""
        return self._job.replicas

    @property
    def team_size(self) -> int:
        """Number of members that hold each stage together (tensor parallelism)."""
        return self._job.team

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        return self.pipe_size * self.team_size * self.data_size

    @property
    def launch_command(self) -> str:
        """The beginning of a command line that starts such a job, such as "mpirun -n 4 ", a space
        at its end; "" for one process alone."""
        return self._world.command

    @property
    def along_a_plan(self) -> bool:
        """The schedule follows a plan that was made from costs."""
        return isinstance(self._job.policy, AlongPlan)

    @property
    def fill(self) -> str:
        """What a rank of a team does while a task waits for slices, "always" or "never" fill: what
        `schedule.fill` came to."""
        return "always" if self._job.fills else "never"

    @property
    def placement(self) -> str:
        """The name of the placement of stages on ranks."""
        return self._job.placement.name

    @property
    def cuts(self) -> tuple[int, ...]:
        """The indices of the layers at which stages begin, then the number of layers."""
        return tuple(self._job.cuts)

    @property
    def traced(self) -> bool:
        """True once the steps of `run.trace_steps` have been trained."""
        return self.config.run.trace_steps > 0 and self._rank.trace.whole

    def memory_bytes(self) -> dict[str, int]:
        """The memory of this rank: at most so far on its device, see `peak_bytes`; and now in
        scratch, by tier ("host", "disk"). Tiers without any are left away."""
        found = {Tier.DEVICE.value: self._peak.num_bytes()}
        for _, tier, size in in_scratch(self._model):
            found[tier.value] = found.get(tier.value, 0) + size
        return {tier: size for tier, size in found.items() if size}

    def _measured_timeline(self) -> Timeline:
        """The timeline of this rank."""
        return Timeline(
            self.size,
            self._job.microbatches,
            unit="s",
            title=f"measured: {self._job}",
            schedule=described(self.schedule, self._job, self.config.memory),
            reductions=self._job.reductions,
            residencies=self._job.residencies_a_step,
            team=self._job.team,
            spans=self._rank.trace.spans,
            pauses=self._rank.trace.pauses,
            messages=self._rank.trace.messages,
        )
