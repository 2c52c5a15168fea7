"""The steps of a run, with what is due after each."""

from axrt.engine import Engine
from axrt.errors import NonFiniteLossError
from axrt.scheduler.plural import plural

from .batches import Batches
from .interrupt import Interrupt
from .record import Record
from .saves import Saves

_MOST_SKIPPED = 20


class _Drawing:
    """Writes the timeline of the traced steps, once; every rank takes part."""

    def __init__(self, engine: Engine, record: Record | None) -> None:
        self._engine, self._record, self._done = engine, record, False

    def after_step(self) -> None:
        if self._engine.traced and not self._done:
            self._done, line = True, self._engine.timeline()
            if self._record and line:
                self._record.timeline(line)


class StopRequest:
    """Passes on to the main rank that somebody has asked this rank for an end: a signal may be sent
    to any of them.
    """

    def __init__(self, engine: Engine, interrupt: Interrupt) -> None:
        self._engine, self._interrupt = engine, interrupt
        self._is_told = engine.is_main
        if engine.is_main:
            engine.when_asked_to_stop(interrupt.ask)

    def after_step(self) -> None:
        """Tell the main rank, once."""
        if self._interrupt.asked and not self._is_told:
            self._is_told = True
            self._engine.ask_to_stop()


def train_steps(
    engine: Engine,
    data: Batches | None,
    record: Record | None,
    saves: Saves,
    stop_request: StopRequest,
) -> None:
    run, validates = engine.config.run, engine.config.data.validates

    def validate(done: int) -> None:
        loss = engine.eval_batch(data.validation() if data else None).loss
        if record:
            record.validation(done, loss)

    if validates and engine.step == 0:
        validate(0)
    skipped, drawing = 0, _Drawing(engine, record)
    while engine.step < run.steps:
        try:
            result = engine.train_batch(data.training if data else None)
        except StopIteration:  # the stream is endless: an end was asked for
            break
        if record:
            record.step(result)
        drawing.after_step()
        stop_request.after_step()
        done = engine.step
        falls = result.loss_scale and engine.config.precision.loss_scale_interval
        skipped = skipped + 1 if result.skipped and not falls else 0  # a scale ends at its floor
        if skipped == _MOST_SKIPPED:
            raise NonFiniteLossError(
                f"the norm of the gradients was no finite number in {plural(skipped, 'step')} in a "
                f"row, the last {done - 1}; expected that to pass. Lower optimizer.lr or lengthen "
                "optimizer.warmup_steps, and go on from a checkpoint"
            )
        if validates and (done == run.steps or (run.eval_every and done % run.eval_every == 0)):
            validate(done)
        if done < run.steps:
            saves.after(done, last=False)
    saves.after(engine.step, last=True)
