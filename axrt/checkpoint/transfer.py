"""A part of what a rank keeps in memory goes to another host, file by file, while both train."""

# Files go one at a time, and the next leaves when the one before is written: so a host needs memory
# for one file more than it keeps, and a slow receiver holds no more of the sender's. The manifest
# comes last. With it the receiver knows whether every file is what was sent, and only then the part
# gets its name. A file that cannot be read is sent empty: the manifest does not fit then, and both
# sides know.

import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axrt.device.thread_queue import ThreadQueue
from axrt.errors import ConfigError, SaveError
from axrt.runtime.coroutine import Steps, run_on
from axrt.runtime.exchange import Exchange
from axrt.scheduler.regular_file import opened
from axrt.transport.control import ControlMessage, Topic

from .durable import digits_of
from .host_memory import HostMemory, Part
from .manifest import MANIFEST, Manifest

_MANY = 1 << 20  # ranks, and files of a part


class Transfer:
    """Sends parts to ranks of other hosts, and takes theirs.

    Args:
        queue: function that gives the queue on which files are read and written.
    """

    def __init__(self, exchange: Exchange, rank: int, queue: Callable[[], ThreadQueue]) -> None:
        self._exchange, self._rank, self._queue = exchange, rank, queue

    def sending(self, number: int, part: Part, to: int, path: Path | None) -> Steps[str]:
        """Send a part; the next file leaves when the one before is written there.

        Args:
            path: its directory; None: there is none, which that rank is told.
        Returns:
            What has gone wrong there; "" where nothing has.
        """
        names = _names(path) if path else []
        head = ControlMessage(Topic.PART, part.rank, _key(number, part.rank, 0))
        self._exchange.tell(to, head, (tuple(part), names))
        fault = ""
        for index, name in enumerate(names, 1):
            assert path is not None
            data = yield from run_on(self._queue().put, partial(_read, path / name))
            key = _key(number, part.rank, index)
            self._exchange.tell(to, ControlMessage(Topic.PART, part.rank, key), data)
            taken = self._exchange.claim(Topic.PART_TAKEN, key, [to])
            yield taken
            fault = fault or str(taken.in_order()[0])
        return fault

    def receiving(self, number: int, of: int, here: HostMemory, sender: int) -> Steps[str]:
        """Take a part, and keep it on this host if it is whole.

        Returns:
            What has gone wrong; "" where nothing has.
        """
        first_fault = ""
        head = self._exchange.claim(Topic.PART, _key(number, of, 0), [sender])
        yield head
        part, names = head.in_order()[0]
        taking = _Taking(here, Part(*part))
        for index, name in enumerate(names, 1):
            key = _key(number, of, index)
            come = self._exchange.claim(Topic.PART, key, [sender])
            yield come
            take = partial(taking.take, name, come.in_order()[0])
            fault = yield from fault_of(run_on(self._queue().put, take))
            self._exchange.tell(sender, ControlMessage(Topic.PART_TAKEN, self._rank, key), fault)
            first_fault = first_fault or fault
        return first_fault


class _Taking:
    """A part on its way in."""

    def __init__(self, here: HostMemory, part: Part) -> None:
        self._here, self._part = here, part
        self._directory: Path | None = None
        self._crcs: dict[str, str] = {}

    def take(self, name: str, data: Tensor) -> None:
        """Write a file; with the last one, the manifest, the part is whole.

        Raises:
            SaveError: something cannot be written, or is not what was sent.
        """
        directory = self._directory = self._directory or self._here.begin(self._part)
        memory = data.numpy().data
        (directory / name).write_bytes(memory)
        self._crcs[name] = digits_of(zlib.crc32(memory))
        if name == MANIFEST:
            said = Manifest.read(directory).files
            if any(self._crcs.get(file) != of["crc32"] for file, of in said.items()):
                raise SaveError(f"the state of rank {self._part.rank} has changed on its way")
            self._here.end(directory, self._part)


def fault_of(steps: Steps[Any]) -> Steps[str]:
    """The text of what has gone wrong; "" where nothing has."""
    try:
        yield from steps
    except (SaveError, ConfigError, OSError) as error:
        return str(error)
    return ""


def _names(part: Path) -> list[str]:
    """The files of a part, the manifest last."""
    return [*sorted(file.name for file in part.glob("*") if file.name != MANIFEST), MANIFEST]


def _read(file: Path) -> Tensor:
    """The bytes of a file, uint8; none if it cannot be read, so that the manifest does not fit."""
    try:
        with opened(file) as its:
            return torch.from_numpy(np.fromfile(its, dtype=np.uint8))
    except OSError:
        return torch.empty(0, dtype=torch.uint8)


def _key(number: int, of: int, index: int) -> int:
    return (number * _MANY + of) * _MANY + index
