"""The memory of one host in which copies of ranks' state outlive the job: files of a file system in
memory."""

#   /dev/shm/axrt-7d31c6f09a44/      one run, by a name that is drawn
#     node-3/                        one host: there may be several on one machine, in tests
#       1f77a0c2/                    one job of the run, by a mark that is drawn
#         step-00000040/
#           rank-2-of-8/             manifest.json and the files of rank 2's layers
#           rank-6-of-8.partial/     being written, or left over
#           joined-0/                what rank 0 of a job with another layout takes
#
# A part is written as `.partial` and renamed, so one that stands under its own name is whole. Its
# manifest has the digest of each file. The directory of the run is this user's alone: what another
# user has put there is neither read nor removed.

import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from axrt.errors import DamagedError

from .layers import fault_in_files
from .manifest import Manifest
from .private import make_private, why_not_private

_PARTIAL = ".partial"
_STEP, _MARK = re.compile(r"step-(\d+)"), re.compile("[0-9a-f]{8}")


class Part(NamedTuple):
    """What there is of a rank."""

    step: int  # number of steps that were done
    rank: int  # rank in the job whose state it is
    size: int  # number of ranks of that job
    # digest of which shards and parts it has of its layers, see `cut_of`; "": it has whole layers
    cut: str = ""

    @property
    def name(self) -> str:
        """The name of its directory."""
        return f"rank-{self.rank}-of-{self.size}" + (f"-{self.cut}" if self.cut else "")

    @classmethod
    def at(cls, path: Path) -> "Part | None":
        """The part that has such a path; None: none has."""
        of_step = _STEP.fullmatch(path.parent.name)
        of_rank = re.fullmatch(r"rank-(\d+)-of-(\d+)(?:-([0-9a-f]{8}))?", path.name)
        if of_step is None or of_rank is None:
            return None
        rank, size, cut = of_rank.groups(default="")
        return cls(int(of_step[1]), int(rank), int(size), cut)


# Copies in memory are files in a file system in memory, and not segments of shared memory: a part
# is whole or not there by its name, the same code writes, checks and takes it, and a person can
# look at it.
class HostMemory:
    """The parts of one job that are kept on this host."""

    def __init__(self, directory: Path, run: str, host: str, mark: str) -> None:
        self._run = directory / f"axrt-{run}"
        self._of_host = self._run / re.sub(r"[^\w.-]", "_", host)
        self._root = self._of_host / mark

    def path_of(self, part: Part) -> Path:
        """The directory of a part, once it is whole."""
        return self._root / f"step-{part.step:08}" / part.name

    def joined(self, step: int, rank: int) -> Path:
        """A directory for what a rank of this job takes of several parts."""
        return self._root / f"step-{step:08}" / f"joined-{rank}"

    def begin(self, part: Part) -> Path:
        """Make an empty directory in which a part is written.

        Raises:
            OSError: it cannot be made.
        """
        make_private(self._run)
        path = self.path_of(part).with_name(part.name + _PARTIAL)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def end(self, directory: Path, part: Part) -> None:
        """Let a directory that `begin` has made be the part.

        Raises:
            OSError: it cannot be renamed.
        """
        path = self.path_of(part)
        path.parent.mkdir(exist_ok=True)
        shutil.rmtree(path, ignore_errors=True)
        directory.rename(path)

    def whole(self, share: int, of: int) -> Iterator[Part]:
        """The parts whose files are what they were, of those in one share.

        Args:
            share, of: index of the share of this rank, and number of ranks that share the look.
        """
        if why_not_private(self._run):
            return
        for path in self._root.glob("step-*/rank-*"):
            part = Part.at(path)
            # By its name alone: another rank may see other parts, while some are removed.
            is_mine = zlib.crc32(f"{path.parent.name}/{path.name}".encode()) % of == share
            if is_mine and part is not None and not _fault_in(path):
                yield part

    def drop_older(self, step: int) -> None:
        """Remove the parts of earlier steps, and those of other jobs; another rank may be writing
        one of a later step."""
        if why_not_private(self._run):
            return
        for path in self._root.glob("step-*"):
            if (of := _STEP.fullmatch(path.name)) and int(of[1]) < step:
                shutil.rmtree(path, ignore_errors=True)
        for path in self._of_host.glob("*"):
            if path != self._root and _MARK.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def drop_step(self, step: int) -> None:
        """Remove what there is of a step, whole or not."""
        if not why_not_private(self._run):
            shutil.rmtree(self._root / f"step-{step:08}", ignore_errors=True)

    def drop(self) -> None:
        """Remove all parts of the run on this host, those of other jobs included."""
        if why_not_private(self._run):
            return
        for path in self._of_host.glob("*"):
            if _MARK.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # other hosts of a test are there, or what is not ours
            self._of_host.rmdir()
            self._run.rmdir()


def _fault_in(part: Path) -> str:
    try:
        return fault_in_files(part, Manifest.read(part))
    except DamagedError as error:
        return str(error)
