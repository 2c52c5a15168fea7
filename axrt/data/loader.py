"""Microbatches by number, made here or in worker processes, in the same order."""

import signal
from collections import deque
from collections.abc import Iterable, Iterator

from torch.utils.data import DataLoader, Dataset

from .windows import Item, Samples

_AHEAD = 8  # microbatches that are read from disk before they are wanted


class Microbatches(Dataset[Item]):
    """Data set of microbatches, indexed by their first sample."""

    def __init__(self, samples: Samples, size: int) -> None:
        self._samples, self._size = samples, size

    def __getitem__(self, first: int) -> Item:
        return self._samples.microbatch(first, self._size)


def microbatches(
    samples: Samples, size: int, first_samples: Iterable[int], workers: int
) -> Iterator[Item]:
    """The microbatches that begin with these samples, in their order.

    Args:
        samples: samples to cut microbatches from. Each worker gets a copy; of memory-mapped tokens
            it gets only the name of the file.
        first_samples: number of the first sample of each microbatch, without end.
        workers: number of processes that make microbatches ahead of time; 0: they are made here
            when they are wanted. Workers are begun by a server of their own: a process that has
            started MPI must not be forked.
    """
    dataset = Microbatches(samples, size)
    if not workers:
        return map(dataset.__getitem__, _fetched(samples, size, first_samples))
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=first_samples,
        num_workers=workers,
        multiprocessing_context="forkserver",
        worker_init_fn=_ignore_interrupts,
    )
    # Signals go to whole groups of processes, and the rank that reads decides when to end. The
    # server and its workers inherit the signals that are blocked now; a signal that comes meanwhile
    # is delivered here afterwards.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def _fetched(samples: Samples, size: int, first_samples: Iterable[int]) -> Iterator[int]:
    """The same numbers, a few behind those whose samples the system has begun to read."""
    coming = deque[int]()
    for first in first_samples:
        for sample in range(first, first + size):
            samples.fetch(sample)
        coming.append(first)
        if len(coming) > _AHEAD:
            yield coming.popleft()
    yield from coming


def _ignore_interrupts(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
