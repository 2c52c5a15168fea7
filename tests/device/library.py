"""A library of collectives for the simulated accelerator, as NCCL is for GPUs: each group issues
its operations on a stream of its own, behind what the caller's stream has launched, and returns at
once.

The bytes go by gloo. The checker sees who touches the tensors, and when.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axrt.device.queues import current_stream
from axrt.device.thread_queue import ThreadQueue

from .simulated import NAME, accelerator


def install() -> None:
    """Let torch name this library for the device."""
    dist.Backend.register_backend(NAME, SimulatedGroup, devices=[NAME])
    setattr(dist, f"ProcessGroup{NAME.upper()}", SimulatedGroup)


class SimulatedGroup:
    """The part of a process group that axrt uses.

    Args:
        store, rank, size, options: as torch gives them.
    """

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._stream = torch.Stream(NAME)
        self._waiting = ThreadQueue("simulated library")

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._gloo._set_default_timeout(timeout)

    def shutdown(self) -> None:
        self._gloo.shutdown()

    def allreduce(self, tensors: list[Tensor]) -> "_Work":
        return self._issue([], tensors, lambda: self._gloo.allreduce(_seen(tensors)))

    def reduce_scatter(self, mine: list[Tensor], shards: list[list[Tensor]]) -> "_Work":
        return self._issue(
            shards[0], mine, lambda: self._gloo.reduce_scatter(_seen(mine), [_seen(shards[0])])
        )

    def allgather(self, shards: list[list[Tensor]], mine: list[Tensor]) -> "_Work":
        return self._issue(
            mine, shards[0], lambda: self._gloo.allgather([_seen(shards[0])], _seen(mine))
        )

    def send(self, tensors: list[Tensor], to: int, tag: int) -> "_Work":
        return self._issue(tensors, [], lambda: self._gloo.send(_seen(tensors), to, tag))

    def recv(self, tensors: list[Tensor], of: int, tag: int) -> "_Work":
        return self._issue([], tensors, lambda: self._gloo.recv(_seen(tensors), of, tag))

    def _issue(
        self, reads: list[Tensor], writes: list[Tensor], operation: Callable[[], Any]
    ) -> "_Work":
        self._stream.wait_stream(current_stream(self._stream.device))
        accelerator().launch_on(self._stream.stream_id, reads, writes)
        end = torch.Event(NAME)
        end.record(self._stream)
        return _Work(self._waiting.put(operation().wait), end, [*reads, *writes])


class _Work:
    """An operation under way; it holds its tensors."""

    def __init__(self, bytes_moved: Any, end: torch.Event, tensors: list[Tensor]) -> None:
        self._bytes_moved, self._end, self._tensors = bytes_moved, end, tensors

    def is_completed(self) -> bool:
        return self._bytes_moved.passed() and self._end.query()

    def wait(self) -> None:
        """Let the current stream wait, and not the host."""
        current_stream(self._end.device).wait_event(self._end)


def _seen(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.ops.simulated.alias(tensor) for tensor in tensors]
