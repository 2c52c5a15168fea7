"""Copies of all ranks' state in memory, each on its own host and on another one: what a job that is
started again goes on from, without a disk."""

#   keep     each rank writes its part into the memory of its host, and sends it to its partner
#   whole    when every part is on two hosts, the parts of earlier steps are removed
#   recall   a new job looks at what its hosts have, and each rank takes its own part; what a host
#            has lost comes from the partner, and another layout takes parts of several ranks
#
# A file in the folder of checkpoints names the run, so nothing of another one is taken. It is void
# once a run goes back to an older checkpoint.
#
# Files are written from where the rank's tensors are, while their buckets are lent. One coroutine
# sends them to the partner, one at a time, and another one takes those of whom this rank keeps. At
# any moment the parts of one step are whole on two hosts. Where a write or a read fails, on either
# side, the manifest does not fit or does not come, the copy before stands, and what there is of the
# new one is removed. The file `.memory` in the folder of checkpoints has the drawn name of the run
# and the mark of the job that keeps: parts of two jobs, which may have come to one step in two
# ways, never go together.
#
# A load asks all ranks what their hosts have, which layers and shards they hold now, and plans
# alike on each (`recall_plan.py`). Where all hold what they held, each takes its own part.
# Otherwise parts become a directory of whole layers, as a checkpoint has them (`joined.py`). Copies
# that fit no model or optimizer of this job are refused, not passed over: the next copy would take
# their place.

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from axrt.device.queues import NOW
from axrt.device.thread_queue import ThreadQueue
from axrt.errors import ConfigError
from axrt.runtime.coroutine import Coroutine, Steps, run_on
from axrt.runtime.exchange import Exchange
from axrt.store.local_model import LocalModel
from axrt.transport.control import MAIN, ControlMessage, Topic

from .host_memory import HostMemory, Part
from .layers import place_of
from .manifest import Manifest
from .memory_run import NAME, MemoryRun
from .partners import partners_of
from .pieces import cut_of
from .recall_plan import Offer, Plan, Wanted, plan_recall, transfers
from .transfer import Transfer, fault_of
from .writing import Records

_NO_RUN = "", "", 0


class Recalled(NamedTuple):
    """What a rank goes on from."""

    # directories of the parts, on this host; () where there is nothing
    parts: tuple[Path, ...] = ()
    # directory for what the parts come to together; None: there is one part, which is the
    # rank's own
    joined: Path | None = None
    text: str = ""  # what a person should know when that is taken, or why nothing is; "": nothing
    fault: str = ""  # what has gone wrong on its way here; "": nothing


class JobMemory:
    """The copies that this job keeps and recalls; every rank calls alike.

    Args:
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
        self._under_way: Coroutine[str] | None = None
        self._is_alone = False  # all ranks that are left are on one host
        self._run = ""  # of the copies that this job keeps
        self._mark = ""  # of this job
        self._recalled: tuple[Path, str] | None = None  # whose copies were taken: folder and run
        self._transfer = Transfer(exchange, rank, lambda: self._queue)

    def _hosts(self) -> list[str]:
        """The host of each rank; every rank calls it."""
        if not self._known_hosts:
            self._known_hosts = list(self._exchange.broadcast(self._exchange.gathered(self._host)))
        return self._known_hosts

    @cached_property
    def _queue(self) -> ThreadQueue:
        return ThreadQueue("axrt memory")

    def _on_host(self, run: str, mark: str) -> HostMemory:
        return HostMemory(self._directory, run, self._host, mark)

    def check(self, must: bool = True) -> None:
        """Check that copies can be kept; every rank calls it.

        Args:
            must: False where other ranks are lost: if those that are left are on one host, nothing
                is kept from now on, and a line says so.
        Raises:
            ConfigError: all ranks are on one host, or some host has no such directory; raised on
                every rank.
        """
        try:
            partners_of(self._hosts())
        except ConfigError as error:
            if must:
                raise
            self._is_alone = True
            if self._rank == MAIN:
                self._say(f"no copies are kept in memory from here on: {error}")
        self._exchange.made_by_all(self._check_directory)

    def _check_directory(self) -> None:
        if not (self._directory.is_dir() and os.access(self._directory, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"checkpoint.memory_dir = {str(self._directory)!r} is no directory that can be "
                f"written to on {self._host}; expected one in memory, such as /dev/shm"
            )

    # Keeping.

    # A copy in memory waits for the one before. Leaving it out was tried: with a copy a step, which
    # is there to lose none, a dozen short steps went by while one was under way.
    def keep(
        self,
        folder: Path,
        cut: str,
        make_manifest: Callable[[], Manifest],
        write: Callable[[Path, ThreadQueue], Steps[Records]],
    ) -> None:
        """Begin to keep the state of now, which goes on beside what comes; after the end of the
        copy before, so that no more than two intervals are ever lost. Where `check` has found the
        ranks that are left on one host, nothing is kept.

        Args:
            make_manifest: function that makes the manifest of a part, without files.
            write: function that begins to write the layers of this rank into a directory on a
                queue; its steps come to the records of the files.
        Raises:
            ConfigError: all ranks are on one host; raised on every rank.
        """
        if self._is_alone:
            return
        self.finish()
        partners = partners_of(self._hosts())

        def begun() -> tuple[str, str, str]:
            goes_on = self._recalled is not None and self._recalled[0] == folder.resolve()
            run = self._run or (self._recalled[1] if self._recalled and goes_on else "")
            said = None if run else MemoryRun.read(folder)
            mark = self._mark or secrets.token_hex(4)
            return run or secrets.token_hex(6), mark, said.run if said else ""

        self._run, self._mark, left = self._exchange.agreed(begun)
        self._keeps += 1
        manifest, here = make_manifest(), self._on_host(self._run, self._mark)
        for source in range(self._size):
            if partners[source] == self._rank:
                self._exchange.begin(self._transfer.receiving(self._keeps, source, here, source))
        part = Part(manifest.step, self._rank, self._size, cut)
        steps = self._writing(part, manifest, write, here)
        self._under_way = self._exchange.begin(
            self._keeping(self._keeps, folder, part, steps, partners[self._rank], here, left)
        )

    # A part in memory is written from where tensors are, while their buckets are lent. A snapshot
    # before would be a second copy on the same host.
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
        part: Part,
        steps: Steps[None],
        partner: int,
        here: HostMemory,
        left: str,
    ) -> Steps[str]:
        fault = yield from fault_of(steps)
        path = None if fault else here.path_of(part)
        fault = (yield from self._transfer.sending(number, part, partner, path)) or fault
        self._exchange.tell(MAIN, ControlMessage(Topic.KEPT, self._rank, number), fault)
        if self._rank == MAIN:
            kept = self._exchange.claim(Topic.KEPT, number, range(self._size))
            yield kept
            fault = next(filter(None, kept.in_order()), "")
            if not fault:
                fault = yield from self._noted(folder, part.step)
            for rank in range(self._size):
                self._exchange.tell(rank, ControlMessage(Topic.ALL_KEPT, MAIN, number), fault)
        all_kept = self._exchange.claim(Topic.ALL_KEPT, number, [MAIN])
        yield all_kept
        fault = str(all_kept.in_order()[0])
        yield from run_on(self._queue.put, partial(self._drop_rest, here, part.step, fault, left))
        if fault and self._rank == MAIN:
            self._say(f"step {part.step}: no copy in memory: {fault}")
        return fault

    def _drop_rest(self, here: HostMemory, step: int, fault: str, left: str) -> None:
        """Remove what a whole copy takes the place of, or what there is of one that failed.

        Args:
            fault: what has gone wrong; "" where the copy is whole.
            left: a run from which this job has not gone on; "": there is none.
        """
        if fault:
            here.drop_step(step)
            return
        here.drop_older(step)
        if left:
            self._on_host(left, "").drop()

    def _noted(self, folder: Path, step: int) -> Steps[str]:
        """Name the run in the folder of checkpoints."""

        def note() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            MemoryRun(self._run, self._mark, step).write(folder)

        return (yield from fault_of(run_on(self._queue.put, note)))

    def finish(self) -> None:
        """Wait for the end of what is under way; every rank calls it."""
        coroutine, self._under_way = self._under_way, None
        if coroutine is not None:
            self._exchange.finish(coroutine, "the end of a copy in memory")

    # Recalling.

    def recall(self, folder: Path, newer_than: int, model: LocalModel) -> Recalled:
        """Have the newest copies of which there is enough for every rank, on the rank's own host.

        Args:
            newer_than: step of the newest checkpoint on the disk; older copies are left.
        """
        self.finish()
        run, mark, step = self._exchange.agreed(lambda: _run_of(folder))
        if not run:
            return Recalled()
        here, hosts = self._on_host(run, mark), self._hosts()
        plan = self._plan(here, hosts, newer_than, model)
        fault = self._bring(transfers(plan, hosts), here)
        if not plan.taken:
            return Recalled(text=plan.text or (_all_lost(step) if step > newer_than else ""))
        mine = [one.part for one in plan.taken[self._rank]]
        return Recalled(
            tuple(here.path_of(part) for part in mine),
            here.joined(mine[0].step, self._rank) if not plan.are_own else None,
            plan.text,
            fault,
        )

    def _plan(self, here: HostMemory, hosts: list[str], newer_than: int, model: LocalModel) -> Plan:
        """What ranks take, which every rank plans from what all of them have."""
        on_host = [rank for rank, host in enumerate(hosts) if host == self._host]
        offers = _offers(here, on_host.index(self._rank), len(on_host))
        mine = [(tuple(offer.part), offer.places) for offer in offers]
        places = tuple(sorted(place for place, _ in model.layers()))
        found = self._exchange.broadcast(self._exchange.gathered((places, cut_of(model), mine)))
        offered = [[Offer(Part(*part), of) for part, of in of_rank] for *_, of_rank in found]
        wanted = Wanted([of for of, *_ in found], [cut for _, cut, _ in found], hosts, newer_than)
        return plan_recall(offered, wanted)

    def _bring(self, moves: Sequence[tuple[Part, int, int]], here: HostMemory) -> str:
        """Have parts where they are taken; every rank calls it.

        Returns:
            What has gone wrong on some rank; "" where nothing has.
        """
        coroutines: list[Coroutine[str]] = []
        for part, sender, to in moves:
            self._keeps += 1
            if self._rank == sender:
                path = here.path_of(part)
                coroutines.append(
                    self._exchange.begin(self._transfer.sending(self._keeps, part, to, path))
                )
            if self._rank == to:
                coming = self._transfer.receiving(self._keeps, part.rank, here, sender)
                coroutines.append(self._exchange.begin(coming))
        faults = [
            self._exchange.finish(coroutine, "parts in memory of other hosts")
            for coroutine in coroutines
        ]
        # A rank may take what has come to another one of its host, so each waits for all.
        everyones = self._exchange.gathered("; ".join(filter(None, faults)))
        return str(self._exchange.broadcast("; ".join(filter(None, everyones or ()))))

    def go_on(self, folder: Path) -> None:
        """Note that this job goes on from what the folder's run has kept. It keeps its copies
        beside that if they are of the same folder; another run leaves them alone."""
        self._recalled = folder.resolve(), _run_of(folder)[0]

    def void(self, folder: Path) -> None:
        """Let no later job take copies that this one has not gone on from; on the main rank.

        Raises:
            OSError: the folder cannot be written to.
        """
        said = MemoryRun.read(folder)
        if said is None or said.is_void:
            return
        is_gone_on_from = (folder.resolve(), said.run) == self._recalled or said.run == self._run
        if not is_gone_on_from:
            said._replace(is_void=True).write(folder)

    def drop(self, folder: Path) -> None:
        """Remove all copies of the run; every rank calls it."""
        self.finish()
        run, mark, _ = self._exchange.agreed(lambda: _run_of(folder, void_too=True))
        if run:
            self._on_host(run, mark).drop()
            if self._rank == MAIN:
                (folder / NAME).unlink(missing_ok=True)


def to_stderr(text: str) -> None:
    """Print a line for a person."""
    print(f"axrt: {text}", file=sys.stderr, flush=True)


def _failed(error: OSError) -> Steps[None]:
    """Steps that end in an error."""
    yield NOW
    raise error


def _run_of(folder: Path, void_too: bool = False) -> tuple[str, str, int]:
    """The run whose copies a folder names, the mark of the job and the newest step; "", "" and 0
    where there is none."""
    said = MemoryRun.read(folder)
    return (said.run, said.mark, said.step) if said and (void_too or not said.is_void) else _NO_RUN


def _all_lost(step: int) -> str:
    return (
        f"not taken from memory: all copies of step {step} are gone. What there is on a disk is "
        "taken"
    )


def _offers(here: HostMemory, share: int, of: int) -> Iterator[Offer]:
    """What is on a host, of one share of it."""
    for part in here.whole(share, of):
        names = Manifest.read(here.path_of(part)).files
        yield Offer(part, tuple(sorted(set(map(place_of, names)))))
