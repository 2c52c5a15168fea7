"""Copies of all ranks' state in memory, each on its own host and on another one: what a job that is
started again goes on from, without a disk.

    keep     each rank writes its part into the memory of its host, and sends it to its keeper
    whole    when every part is on two hosts, the parts of earlier steps are removed
    recall   a new job looks at what its hosts have, and each rank takes its own part; what a host
             has lost comes from the keeper

A file in the folder of checkpoints names the run, so nothing of another one is taken. It is void
once a run goes back to an older checkpoint.
"""

import os
import secrets
import sys
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axrt.errand import Errand, Steps, run_on
from axrt.errors import ConfigError, SaveError
from axrt.exchange import Exchange
from axrt.note import MAIN, Note, Topic
from axrt.queues import NOW
from axrt.thread_queue import ThreadQueue

from .durable import digits_of
from .host_memory import HostMemory, Part
from .keepers import keepers_of
from .manifest import MANIFEST, Manifest
from .memory_run import NAME, MemoryRun
from .writing import Records

_MANY = 1 << 20  # files of a part


class JobMemory:
    """The copies that this job keeps and recalls; every rank calls alike.

    Args:
        exchange: exchange of notes with the other ranks.
        rank: rank of this process in the job.
        size: number of ranks of the job.
        host: name of this rank's host.
        directory: directory in memory, such as /dev/shm.
        say: function that tells a person a text, on the main rank; None: print it to stderr.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank: int,
        size: int,
        host: str,
        directory: Path,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._exchange, self._rank, self._size = exchange, rank, size
        self._directory, self._host = directory, host
        self._say = say or to_stderr
        self._known_hosts: list[str] = []
        self._keeps = 0
        self._under_way: Errand[str] | None = None
        self._run = ""  # of the copies that this job keeps
        self._recalled = ""  # the run whose copies were recalled last

    def _hosts(self) -> list[str]:
        """The host of each rank; every rank calls it."""
        if not self._known_hosts:
            self._known_hosts = list(self._exchange.broadcast(self._exchange.gathered(self._host)))
        return self._known_hosts

    @cached_property
    def _queue(self) -> ThreadQueue:
        return ThreadQueue("axrt memory")

    def _on_host(self, run: str) -> HostMemory:
        return HostMemory(self._directory, run, self._host)

    def check(self) -> None:
        """Check that copies can be kept; every rank calls it.

        Raises:
            ConfigError: all ranks are on one host, or some host has no such directory; raised on
                every rank.
        """
        keepers_of(self._hosts())
        self._exchange.made_by_all(self._check_directory)

    def _check_directory(self) -> None:
        if not (self._directory.is_dir() and os.access(self._directory, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"checkpoint.memory_dir = {str(self._directory)!r} is no directory that can be "
                f"written to on {self._host}; expected one in memory, such as /dev/shm"
            )

    # Keeping.

    def keep(
        self,
        folder: Path,
        make_manifest: Callable[[], Manifest],
        write: Callable[[Path, ThreadQueue], Steps[Records]],
    ) -> bool:
        """Begin to keep the state of now, which goes on beside what comes.

        Args:
            folder: folder of the checkpoints of the run.
            make_manifest: function that makes the manifest of a part, without files.
            write: function that begins to write the layers of this rank into a directory on a
                queue; its steps come to the records of the files.
        Returns:
            False where the copy before is still under way. Then nothing is kept.
        Raises:
            ConfigError: all ranks are on one host; raised on every rank.
        """
        keepers = keepers_of(self._hosts())

        def begun() -> tuple[bool, str, str]:
            may = self._under_way is None or self._under_way.done
            said = None if self._run else MemoryRun.read(folder)
            return may, self._run or secrets.token_hex(6), said.run if said else ""

        goes, self._run, left = self._exchange.agreed(begun)
        if left:  # this job has not gone on from there
            self._on_host(left).drop()
        if not goes:
            return False
        self._keeps += 1
        manifest, here = make_manifest(), self._on_host(self._run)
        for source in range(self._size):
            if keepers[source] == self._rank:
                self._exchange.begin(self._receiving(self._keeps, source, here))
        steps = self._writing(Part(manifest.step, self._rank), manifest, write, here)
        self._under_way = self._exchange.begin(
            self._keeping(self._keeps, folder, manifest.step, steps, keepers[self._rank], here)
        )
        return True

    def _writing(
        self,
        part: Part,
        manifest: Manifest,
        write: Callable[[Path, ThreadQueue], Steps[Records]],
        here: HostMemory,
    ) -> Steps[None]:
        """The steps that write the own part, which has begun when this returns.

        Raises:
            OSError, SaveError: something cannot be written; raised by the steps, since other ranks
                wait for this one.
        """
        try:
            directory = here.begin(part)
        except OSError as error:
            return _failed(error)
        return self._ending(part, manifest, write(directory, self._queue), directory, here)

    def _ending(
        self,
        part: Part,
        manifest: Manifest,
        records: Steps[Records],
        directory: Path,
        here: HostMemory,
    ) -> Steps[None]:
        files = yield from records
        whole = replace(manifest, files={name: asdict(of) for name, of in files.items()})

        def end() -> None:
            whole.write(directory)
            here.end(directory, part)

        yield from run_on(self._queue.put, end)

    def _keeping(
        self,
        number: int,
        folder: Path,
        step: int,
        steps: Steps[None],
        keeper: int,
        here: HostMemory,
    ) -> Steps[str]:
        fault = yield from _fault_of(steps)
        path = here.path_of(Part(step, self._rank))
        fault = (
            yield from self._sending(number, self._rank, keeper, step, None if fault else path)
        ) or fault
        self._exchange.tell(MAIN, Note(Topic.KEPT, self._rank, number), fault)
        if self._rank == MAIN:
            kept = self._exchange.claim(Topic.KEPT, number, range(self._size))
            yield kept
            fault = next(filter(None, kept.in_order()), "")
            if not fault:
                fault = yield from self._noted(folder, step)
            for rank in range(self._size):
                self._exchange.tell(rank, Note(Topic.ALL_KEPT, MAIN, number), fault)
        all_kept = self._exchange.claim(Topic.ALL_KEPT, number, [MAIN])
        yield all_kept
        fault = str(all_kept.in_order()[0])
        if not fault:
            yield from run_on(self._queue.put, partial(here.drop_older, step))
        elif self._rank == MAIN:
            self._say(f"step {step}: no copy in memory: {fault}")
        return fault

    def _noted(self, folder: Path, step: int) -> Steps[str]:
        """Name the run in the folder of checkpoints."""

        def note() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            MemoryRun(self._run, step).write(folder)

        return (yield from _fault_of(run_on(self._queue.put, note)))

    def _sending(self, number: int, of: int, to: int, step: int, path: Path | None) -> Steps[str]:
        """Send a part, file by file; the next one leaves when the one before is written there.

        Returns:
            What has gone wrong there; "" where nothing has.
        """
        names = _names(path) if path else []
        self._exchange.tell(to, Note(Topic.PART, of, _key(number, of, 0)), (step, names))
        fault = ""
        for index, name in enumerate(names, 1):
            assert path is not None
            data = yield from run_on(self._queue.put, partial(_read, path / name))
            key = _key(number, of, index)
            self._exchange.tell(to, Note(Topic.PART, of, key), data)
            taken = self._exchange.claim(Topic.PART_TAKEN, key, [to])
            yield taken
            fault = fault or str(taken.in_order()[0])
        return fault

    def _receiving(
        self, number: int, of: int, here: HostMemory, sender: int | None = None
    ) -> Steps[None]:
        """Take a part of another rank, and keep it on this host if it is whole.

        Args:
            number: number of the exchange.
            of: rank whose state it is.
            here: memory of this host.
            sender: rank that sends it; None: that rank itself.
        """
        sender = of if sender is None else sender
        head = self._exchange.claim(Topic.PART, _key(number, of, 0), [sender])
        yield head
        step, names = head.in_order()[0]
        taking = _Taking(here, Part(step, of))
        for index, name in enumerate(names, 1):
            key = _key(number, of, index)
            come = self._exchange.claim(Topic.PART, key, [sender])
            yield come
            take = partial(taking.take, name, come.in_order()[0])
            fault = yield from _fault_of(run_on(self._queue.put, take))
            self._exchange.tell(sender, Note(Topic.PART_TAKEN, self._rank, key), fault)

    def finish(self) -> None:
        """Wait for the end of what is under way; every rank calls it."""
        errand, self._under_way = self._under_way, None
        if errand is not None:
            self._exchange.finish(errand, "the end of a copy in memory")

    # Recalling.

    def recall(self, folder: Path, newer_than: int) -> Path | None:
        """Have the newest copies of which every rank's is somewhere, each on the rank's own host.

        Args:
            folder: folder of the checkpoints of the run.
            newer_than: step of the newest checkpoint on the disk; older copies are left.
        Returns:
            This rank's part; None where there are none.
        """
        self.finish()
        run = self._exchange.agreed(lambda: _run_of(folder))
        if not run:
            return None
        here, hosts = self._on_host(run), self._hosts()
        on_host = [rank for rank, host in enumerate(hosts) if host == self._host]
        mine = list(here.whole(on_host.index(self._rank), len(on_host)))
        offered = self._exchange.gathered([tuple(part) for part in mine])
        plan = _plan(offered, hosts, newer_than) if offered is not None else None
        step, holders, text = self._exchange.broadcast(plan)
        if self._rank == MAIN and text:
            self._say(text)
        if not holders:
            return None
        self._recalled = run
        self._keeps += 1
        errands = [
            self._exchange.begin(
                self._sending(self._keeps, of, of, step, here.path_of(Part(step, of)))
            )
            for of, holder in enumerate(holders)
            if holder == self._rank and hosts[of] != self._host
        ]
        own = Part(step, self._rank)
        if hosts[holders[self._rank]] != self._host:
            coming = self._receiving(self._keeps, self._rank, here, holders[self._rank])
            self._exchange.finish(self._exchange.begin(coming), "the own part from its keeper")
        for errand in errands:
            self._exchange.finish(errand, "the end of a part that another rank lacks")
        return here.path_of(own)

    def go_on(self) -> None:
        """Note that this job goes on from what was recalled, and keeps its copies beside that."""
        self._run = self._recalled

    def void(self, folder: Path) -> None:
        """Let no later job take copies that this one has not gone on from; on the main rank.

        Raises:
            OSError: the folder cannot be written to.
        """
        said = MemoryRun.read(folder)
        if said and not said.is_void and said.run != self._run:
            said._replace(is_void=True).write(folder)

    def drop(self, folder: Path) -> None:
        """Remove all copies of the run; every rank calls it."""
        self.finish()
        run = self._exchange.agreed(lambda: _run_of(folder, void_too=True))
        if run:
            self._on_host(run).drop()
            if self._rank == MAIN:
                (folder / NAME).unlink(missing_ok=True)


class _Taking:
    """A part on its way in.

    Args:
        here: memory of this host.
        of: rank whose state it is.
        step: number of steps that were done.
    """

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


def to_stderr(text: str) -> None:
    """Print a line for a person."""
    print(f"axrt: {text}", file=sys.stderr, flush=True)


def _names(part: Path) -> list[str]:
    """The files of a part, the manifest last."""
    return [*sorted(file.name for file in part.glob("*") if file.name != MANIFEST), MANIFEST]


def _read(file: Path) -> Tensor:
    """The bytes of a file, uint8; none if it cannot be read, so that the manifest does not fit."""
    try:
        return torch.from_numpy(np.fromfile(file, dtype=np.uint8))
    except OSError:
        return torch.empty(0, dtype=torch.uint8)


def _failed(error: OSError) -> Steps[None]:
    """Steps that end in an error."""
    yield NOW
    raise error


def _key(number: int, of: int, index: int) -> int:
    return (number * _MANY + of) * _MANY + index


def _fault_of(steps: Steps[Any]) -> Steps[str]:
    """The text of what has gone wrong; "" where nothing has."""
    try:
        yield from steps
    except (SaveError, ConfigError, OSError) as error:
        return str(error)
    return ""


def _run_of(folder: Path, void_too: bool = False) -> str:
    said = MemoryRun.read(folder)
    return said.run if said and (void_too or not said.is_void) else ""


def _plan(
    offered: Sequence[Any], hosts: Sequence[str], newer_than: int
) -> tuple[int, list[int], str]:
    """The newest step of which every rank's part is somewhere, and a rank on whose host it is, for
    each; no ranks where there is no such step. And a text for a person."""
    found: dict[int, dict[int, list[int]]] = {}  # by step and by rank whose part it is
    for holder, parts in enumerate(offered):
        for step, of in parts:
            found.setdefault(step, {}).setdefault(of, []).append(holder)
    ranks = range(len(hosts))
    for step in sorted(found, reverse=True):
        if step <= newer_than:
            break
        if all(of in found[step] for of in ranks):
            holders = [_nearest(found[step][of], of, hosts) for of in ranks]
            lacking = [of for of in ranks if hosts[holders[of]] != hosts[of]]
            who = f", those of ranks {_listed(lacking)} from their keepers" if lacking else ""
            return step, holders, f"taken from memory: the copies of step {step}{who}"
    newest = max(found, default=-1)
    if newest <= newer_than:
        return 0, [], ""
    lost = [of for of in ranks if of not in found[newest]]
    return (
        0,
        [],
        f"not taken from memory: of step {newest} both copies of ranks {_listed(lost)} are gone or "
        "damaged. Taken is the newest checkpoint on the disk",
    )


def _nearest(holders: Sequence[int], of: int, hosts: Sequence[str]) -> int:
    """A rank on the host of the rank whose part it is, if there is one."""
    return next((one for one in holders if hosts[one] == hosts[of]), holders[0])


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
