"""Microbatches by number, made here or in worker processes, in the same order."""

import signal
from collections.abc import Iterable, Iterator

from torch.utils.data import DataLoader, Dataset

from .windows import Item, Windows


class Microbatches(Dataset[Item]):
    """The microbatch that begins with a sample.

    Args:
        windows: the samples.
        size: of a microbatch.
    """

    def __init__(self, windows: Windows, size: int) -> None:
        self._windows, self._size = windows, size

    def __getitem__(self, first: int) -> Item:
        return self._windows.microbatch(first, self._size)


def microbatches(
    windows: Windows, size: int, first_samples: Iterable[int], workers: int
) -> Iterator[Item]:
    """The microbatches that begin with these samples.

    Args:
        windows: the samples; each worker gets a copy, of memory-mapped tokens only the name of the
            file.
        size: of a microbatch.
        first_samples: of each, without end.
        workers: processes that make them ahead of time; 0: made here when they are wanted. They are
            begun by a server of
            their own: a process that has started MPI must not be forked.
    """
    dataset = Microbatches(windows, size)
    if not workers:
        return map(dataset.__getitem__, first_samples)
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=first_samples,
        num_workers=workers,
        multiprocessing_context="forkserver",
        worker_init_fn=_ignore_interrupts,
    )
    # Signals go to whole groups of processes, and who reads decides when to end. The server and its
    # workers inherit what is blocked now; what comes meanwhile is delivered here afterwards.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


def _ignore_interrupts(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
