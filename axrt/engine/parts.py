"""Builds what an engine is made of, in an order that all ranks share: first what they agree on,
then this rank's part of the model."""

# The order is part of the protocol: each step in which ranks exchange something comes at the same
# place on every rank, and whatever may be refused is refused before memory is taken or written to.
#
#     the schedule      agreed on; the layers are measured where settings leave it open
#     what must fit     predicted before anything is built
#     what was given    weights of layers that the user has built are shared out
#     the local model   layers, buckets, optimizers; scratch is cut
#     the trainer       workers, and the groups of the library's ranks

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from axrt.checkpoint.savable import check_savable
from axrt.config import Config, Schedule
from axrt.ledger.advice import check_fits
from axrt.ledger.peak import Peak
from axrt.ledger.prediction import Predictor
from axrt.model.compiler import Compiler
from axrt.model.hidden import check_loss_stays_with_its_stage
from axrt.model.layers import TiedLayerSpec
from axrt.model.precompile import precompile
from axrt.model.preflight import (
    check_kept,
    check_optimizers,
    check_tied,
    checked_sample,
    digests_of_tied,
)
from axrt.planning.autoschedule import resolve
from axrt.runtime.groups import neighbours
from axrt.runtime.initial_weights import share_initial_weights
from axrt.runtime.rank import Rank
from axrt.runtime.shard_exchange import ShardExchange
from axrt.runtime.trainer import Trainer, Wait
from axrt.scheduler.job import Job
from axrt.store.build_model import build_model
from axrt.store.local_model import LocalModel
from axrt.store.recipe import Recipe
from axrt.store.scratch import scratch_tier


@dataclass(frozen=True)
class EngineParts:
    """What an engine is made of, on this rank."""

    config: Config
    rank: Rank
    schedule: Schedule  # with the policy that was chosen where settings leave it open
    job: Job
    # schedules that were simulated, one text each, the chosen one first
    candidates: list[str]
    peak: Peak  # the most memory since just before the layers were built
    model: LocalModel
    shards: ShardExchange
    trainer: Trainer
    notes: Sequence[str]  # texts for the user

    @property
    def trains_nothing(self) -> bool | None:
        """No rank trains a parameter; the main rank knows. Every rank asks."""
        trained = self.rank.exchange.gathered(bool(self.model.named_parameters()))
        return trained is not None and not any(trained)


def build_parts(
    recipe: Recipe, config: Config, rank: Rank, compiler: Compiler | None, wait: Wait
) -> EngineParts:
    """Build the parts of an engine; every rank calls it alike.

    Args:
        compiler: compiler that runs the layers; None: they run as they are.
        wait: function that waits for a result which is read after its call has returned.
    Raises:
        ConfigError: a setting cannot work with this model on these ranks.
        ModelError: the model cannot be cut as the settings say.
    """
    model, exchange = recipe.model, rank.exchange
    resolved = resolve(config, model, rank, recipe.sample, compiler)
    schedule, job = resolved.schedule, resolved.job
    if config.memory.device_gb or config.memory.scratch_gb:
        settings = replace(config, schedule=schedule)
        # Made within, on the main rank alone, and let go: it has copies of what modules keep.
        exchange.agreed(
            lambda: check_fits(Predictor(model, recipe.factory, recipe.sample), settings, rank.size)
        )
    peak = Peak(rank.device)
    if job.pipes > 1:
        share_initial_weights(rank, job, model.layers)
    if any(isinstance(layer, TiedLayerSpec) for layer in model.layers):
        of_ranks = exchange.gathered(digests_of_tied(model.layers))
        exchange.agreed(lambda: check_tied(of_ranks or ()))
    check_loss_stays_with_its_stage(model.loss_fn, model.layers, job.cuts[job.last_stage])
    build = partial(_local_model, recipe, config, rank, job, compiler)
    local = exchange.made_by_all(build) if config.memory.uses_scratch else build()
    check_savable(local)
    shards = ShardExchange(exchange, job, rank.mesh, local.pipes)
    if config.parallel.activations == "library":
        rank.transport.open_lines(rank.device, neighbours(rank, job))
    trainer = Trainer(rank, job, local, config.optimizer, shards, wait)
    of_main = resolved.notes if rank.is_main else ()
    notes = [*of_main, *local.notes(config.memory)]
    candidates = list(resolved.candidates)
    return EngineParts(config, rank, schedule, job, candidates, peak, local, shards, trainer, notes)


def _local_model(
    recipe: Recipe, config: Config, rank: Rank, job: Job, compiler: Compiler | None
) -> LocalModel:
    memory = config.memory
    needs_scratch = memory.offload != "none" or job.offloads_stash(rank.mesh.pipe_rank)
    scratch = scratch_tier(memory, rank.device) if needs_scratch else None
    return build_model(recipe, job, rank.mesh, config, rank.generator, compiler, scratch)


def tell_once(rank: Rank, notes: Sequence[str]) -> None:
    """Print what ranks have to say, each text once; every rank calls it."""
    told = rank.exchange.gathered(list(notes)) or ()
    for text in dict.fromkeys(text for of_rank in told for text in of_rank):
        print(f"axrt: {text}", file=sys.stderr, flush=True)


def check_alike(parts: EngineParts) -> None:
    """Check what only all ranks together can tell; every rank calls it.

    Raises:
        ConfigError: `precision.keep` names no module of any rank, or ranks have made other
            optimizers for the same layers.
    """
    exchange, keep = parts.rank.exchange, parts.config.precision.keep
    if parts.model.narrow is not None and keep:
        found = exchange.gathered(sorted(parts.model.narrow.classes))
        classes = {name for of_rank in found or () for name in of_rank}
        exchange.agreed(lambda: check_kept(keep, classes))
    if parts.job.replicas > 1 or parts.job.pipes > 1:
        optimizers = exchange.gathered(parts.model.optimizers())
        exchange.agreed(lambda: check_optimizers(optimizers or ()))


def compile_layers(parts: EngineParts, recipe: Recipe) -> None:
    """Compile the layers before the first step; every rank calls it.

    Raises:
        ConfigError: there is no sample, or a layer cannot be compiled.
    """
    rank, compiler = parts.rank, parts.config.run.compile
    purpose = f"run.compile = {compiler!r} compiles before the first step"
    sample = rank.exchange.agreed(lambda: checked_sample(recipe.sample, purpose))
    if rank.is_main:
        print(f"axrt: compiling layers with {compiler} ...", file=sys.stderr, flush=True)
    with rank.loop.computing(), rank.generator.borrowed():
        precompile(parts.model, recipe.model, parts.config, sample, rank.generator)
    # The main rank alone waits here: the speed that it shows for the first step should not include
    # the time that others compile.
    rank.exchange.gathered(None)
