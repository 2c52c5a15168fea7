"""Which microbatch a slot has, where replicas share them: its number travels with its tensors."""

from typing import Any

from axrt.scheduler.task import Task


class SlotNumbers:
    """The numbers of the microbatches that the slots of this rank's stages have.

    A payload of the schedule is a pair (number, payload) then; an empty slot's number is None.

    Args:
        slots: number of slots of a step; 0: replicas do not share, slots have the numbers of their
            microbatches, and payloads travel alone.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._numbers: dict[tuple[int, int], int | None] = {}

    def unpack(self, stage: int, slot: int, payload: Any) -> Any:
        """The payload that has come for a slot, whose microbatch is known from now on."""
        if not self._slots:
            return payload
        self._numbers[stage, slot], payload = payload
        self._numbers.pop((stage, slot - self._slots), None)  # nothing is asked of a step before
        return payload

    def pack(self, stage: int, slot: int, payload: Any) -> Any:
        """The payload of a slot, as it travels on."""
        return (self._numbers[stage, slot], payload) if self._slots else payload

    def number_of(self, task: Task) -> int | None:
        """The running number of a task's microbatch; None: its slot is empty."""
        return self._numbers[task[1:3]] if self._slots else task.microbatch
