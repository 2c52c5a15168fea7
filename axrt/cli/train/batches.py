"""The microbatches that a rank reads, to train and to validate on."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from axrt.data.blend import blended
from axrt.data.corpus import load
from axrt.data.loader import microbatches
from axrt.data.order import Share
from axrt.data.windows import Samples, Windows
from axrt.engine import Engine

from .interrupt import Interrupt


@dataclass(frozen=True, slots=True)
class Batches:
    """The data of a rank that reads."""

    training: Iterator[Any]  # microbatches to train on, without end until an end is asked for
    held_out: Samples | None  # samples to validate on; None where there are none
    engine: Engine  # engine of the run

    @classmethod
    def load(cls, engine: Engine, interrupt: Interrupt) -> "Batches":
        config, size = engine.config, engine.config.schedule
        corpus = load(config.data, config.model.context, config.model.vocab)
        of_row = partial(
            Windows,
            context=config.model.context,
            seed=config.run.seed,
            vocab=config.model.vocab,
            document_end=config.data.document_end,
            masked=config.data.masked,
        )
        training, held_out = (
            blended([of_row(row) for row in rows], config.data.weights, config.run.seed)
            for rows in (corpus.training, corpus.held_out)
        )
        share = Share(engine.data_rank, engine.data_size, size.microbatches, size.microbatch_size)
        stream = microbatches(
            training, size.microbatch_size, share.first_samples(engine.samples), config.data.workers
        )
        if engine.is_main:
            stream = interrupt.until(stream, size.microbatches)
        return cls(stream, held_out if config.data.validates else None, engine)

    def validation(self) -> Iterator[Any]:
        """This replica's share of the microbatches to validate on."""
        assert self.held_out is not None
        run, engine = self.engine.config.run, self.engine
        items = self.held_out.evenly(run.eval_microbatches, engine.config.schedule.microbatch_size)
        return (
            item
            for number, item in enumerate(items)
            if number % engine.data_size == engine.data_rank
        )
