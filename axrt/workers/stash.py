"""Takes what microbatches keep for far backwards off the device, and brings it back."""

# The task only puts copies on their queue. When it ends the copies have been made, and memory of
# the device is let go, or the graph has its tensors again. What the graph keeps is taken from
# `model/saved.py`, and scratch gives a stretch for each stash (`store/scratch_stash.py`).

from collections.abc import Mapping

from axrt.model.saved import SavedTensors
from axrt.model.stage import Stage
from axrt.scheduler.task import Kind, Task
from axrt.store.scratch_stash import ScratchStash

from .slot_numbers import SlotNumbers
from .worker import Made, Worker, nothing


class StashWorker(Worker):
    """Copies between scratch and the device.

    Args:
        stages: stages of this rank, by number.
    """

    kinds = (Kind.OFFLOAD, Kind.RELOAD)

    def __init__(
        self, stages: Mapping[int, Stage], stash: ScratchStash, slots: SlotNumbers
    ) -> None:
        self._stages, self._stash, self._slots = stages, stash, slots

    def run(self, task: Task) -> Made:
        kind, stage, *_ = task
        number = self._slots.number_of(task)
        if number is None:
            return nothing
        if kind is Kind.OFFLOAD:
            self._stash.take_down(stage, number, self._saved(stage, number))
        else:
            self._stash.bring_back(stage, number)
        return nothing

    def _saved(self, stage: int, number: int) -> SavedTensors:
        """What autograd has saved of a microbatch, which may leave the device."""
        saved = self._stages[stage].open(number).saved
        assert saved is not None, "this stage keeps what autograd saves"
        return saved

    def complete(self, task: Task, made: Made) -> Made:
        kind, stage, *_ = task
        number = self._slots.number_of(task)
        if number is None:
            return made
        saved = self._saved(stage, number)
        if kind is Kind.OFFLOAD:
            self._stash.has_gone(stage, number, saved)
        else:
            self._stash.has_come(stage, number, saved)
        return made
