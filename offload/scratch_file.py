"""An arena on a disk: one file of a rank, which has no name and ends with the process."""

# Bytes go past the page cache of the system (direct input and output), so what lies here takes up
# no memory. A file system that has no direct access keeps what passes in its cache; then each
# transfer waits for the disk and lets go of the cached pages behind it.
#
# What comes back is checked by a digest, and everything that a disk may do wrong ends in a
# `DiskError`.

import errno
import fcntl
import os
import tempfile
import weakref
from collections.abc import Callable
from ctypes import c_ubyte
from pathlib import Path

from torch import Tensor
from xxhash import xxh3_64_intdigest

from .arena import PAGE_BYTES, Stretch

_MOST_BYTES = 1 << 30  # of one call: Linux moves a little less than 2 GiB at most


class DiskError(OSError):
    """The disk has not done what it was asked for; the text says where, and what to do."""


# XXH3 replaced CRC-32 for scratch (9 to 24 and 2.0 to 3.4 GB/s on 200 MiB, this machine): the
# checksum of a disk of 1.5 GB/s took two thirds as long as the disk.
class ScratchFile:
    """A file in a directory that the user names.

    Its methods may be called on any thread, and leave Python's lock while the disk works. Stretches
    that are under way at the same time must not meet.

    Args:
        num_bytes: size, a multiple of `PAGE_BYTES`; it is taken from the disk at once.
        direct: False to go through the page cache, as where there is no other way.
    Attributes:
        is_direct: True if bytes go past the page cache.
        notes: what a person should know, in whole sentences.
    Raises:
        DiskError: there is no such directory, it cannot be written to, or it has no room.
    """

    def __init__(self, directory: Path, num_bytes: int, direct: bool = True) -> None:
        self._directory, self._num_bytes = directory, 0
        self._digests: dict[Stretch, int] = {}
        self.notes: list[str] = []
        self._file = _unnamed(directory)
        self._closing = weakref.finalize(self, os.close, self._file)
        try:
            self._take_room(0, num_bytes)
            self.is_direct = direct and self._go_direct()
        except BaseException:
            self.close()
            raise
        if not self.is_direct:
            self.notes.append(
                f"Scratch files in {directory} go through the system's page cache, which is "
                "slower; a local disk with ext4 or XFS has direct access."
            )
        if (kind := _kind_of(directory)) in ("tmpfs", "ramfs"):
            self.notes.append(
                f"{directory} is a {kind}: what is put there stays in memory. Name a directory on "
                "a disk."
            )

    def write(self, stretch: Stretch, of: Tensor) -> None:
        """Put bytes there, and wait until the disk has them.

        Args:
            stretch: where they go.
            of: as many bytes, uint8, on the host, from a page on.
        Raises:
            DiskError: they could not be written.
        """
        data = self._view(stretch, of)
        self._digests[stretch] = xxh3_64_intdigest(data)
        self._move(stretch, data, os.pwritev, "writing")
        self._let_go(stretch, after_writing=True)

    def read(self, stretch: Stretch, into: Tensor) -> None:
        """Bring back what was written to a stretch last.

        Args:
            stretch: one that was written to, as a whole.
            into: memory for as many bytes, uint8, on the host, from a page on.
        Raises:
            DiskError: the bytes could not be read, or are not those that were written.
        """
        data = self._view(stretch, into)
        self._check_whole()
        self._move(stretch, data, os.preadv, "reading")
        self._let_go(stretch, after_writing=False)
        if xxh3_64_intdigest(data) != self._digests.get(stretch):
            raise self._error(
                f"other bytes came back from bytes {stretch.start} to "
                f"{stretch.start + stretch.num_bytes} than were written; expected a disk that "
                "keeps them. Look at the system's log, and take another disk"
            )

    def extend(self, num_bytes: int) -> None:
        """Take more room from the disk, behind what there is.

        Args:
            num_bytes: number of bytes, a multiple of `PAGE_BYTES`.
        Raises:
            DiskError: the disk has no room.
        """
        self._take_room(self._num_bytes, num_bytes)

    def close(self) -> None:
        """Give the disk its room back."""
        self._file = -1
        self._closing()

    # Opening.

    def _take_room(self, start: int, num_bytes: int) -> None:
        if num_bytes:
            self._allocate(start, num_bytes)
        self._num_bytes = start + num_bytes
        self._is_whole = self._has_all_blocks(self._num_bytes)

    def _allocate(self, start: int, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self._file, start, num_bytes)
        except OSError as error:
            free = os.statvfs(self._directory)
            raise self._error(
                f"{num_bytes} bytes could not be taken from the disk, which has "
                f"{free.f_bavail * free.f_frsize} free ({error.strerror}); expected room for what "
                "is offloaded. Free some, or name another directory"
            ) from None

    def _go_direct(self) -> bool:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:
            return False
        return True

    # Moving.

    def _move(
        self,
        stretch: Stretch,
        data: memoryview,
        call: Callable[[int, list[memoryview], int], int],
        doing: str,
    ) -> None:
        done = 0
        while done < stretch.num_bytes:
            piece = data[done : done + _MOST_BYTES]
            try:
                moved = call(self._file, [piece], stretch.start + done)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._error(
                    f"{doing} {stretch} failed after {done} bytes ({error.strerror}); expected a "
                    "disk that works. Look at the system's log, and take another disk"
                ) from None
            # A rest that is no multiple of a block cannot go on directly: it is moved again.
            moved -= moved % PAGE_BYTES if done + moved < stretch.num_bytes else 0
            if moved <= 0:
                raise self._error(
                    f"{doing} {stretch} ended after {done} bytes; expected all of them. The file "
                    "has become shorter, or the disk is full"
                )
            done += moved

    def _let_go(self, stretch: Stretch, after_writing: bool) -> None:
        """Let the system forget what it has cached."""
        if self.is_direct:
            return
        try:
            if after_writing:
                os.fdatasync(self._file)
            os.posix_fadvise(self._file, stretch.start, stretch.num_bytes, os.POSIX_FADV_DONTNEED)
        except OSError as error:
            raise self._error(
                f"what was written to {stretch} did not reach the disk ({error.strerror}); "
                "expected a disk that works"
            ) from None

    def _check_whole(self) -> None:
        """Check that nobody else has shortened the file: what lay there would come back as
        zeros."""
        num_bytes = self._num_bytes  # before the look: another thread may extend the file meanwhile
        try:
            is_short = os.fstat(self._file).st_size < num_bytes
        except OSError as error:
            raise self._error(f"it cannot be looked at ({error.strerror})") from None
        if is_short or (self._is_whole and not self._has_all_blocks(num_bytes)):
            raise self._error(
                "somebody else has shortened it; expected to be the only one who has it open"
            )

    def _has_all_blocks(self, num_bytes: int) -> bool:
        """A file of that size has no holes; file systems that compress may say so of any file."""
        return os.fstat(self._file).st_blocks * 512 >= num_bytes

    def _view(self, stretch: Stretch, tensor: Tensor) -> memoryview:
        if tensor.nbytes != stretch.num_bytes or tensor.data_ptr() % PAGE_BYTES:
            raise ValueError(
                f"{tensor.nbytes} bytes at {tensor.data_ptr():#x} for {stretch}; expected as many "
                f"bytes, from a multiple of {PAGE_BYTES} on"
            )
        # Not as an array of numpy: torch would not resize memory again that such an array has seen.
        return memoryview((c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")

    def _error(self, text: str) -> DiskError:
        return DiskError(f"the scratch file in {self._directory}: {text}")


def _unnamed(directory: Path) -> int:
    """A new file without a name in a directory, as a descriptor."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise _cannot_be_made(directory, error) from None
    try:  # a file system that wants names: it has one for a moment
        descriptor, name = tempfile.mkstemp(prefix=".axrt-scratch-", dir=directory)
        os.unlink(name)
    except OSError as error:
        raise _cannot_be_made(directory, error) from None
    return descriptor


def _cannot_be_made(directory: Path, error: OSError) -> DiskError:
    return DiskError(
        f"no scratch file can be made in {directory} ({error.strerror}); expected a directory that "
        "exists and can be written to"
    )


def _kind_of(directory: Path) -> str:
    """The kind of file system that a directory is on, as the kernel names it; "" where it is not
    known."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for fields, _, rest in (line.partition(" - ") for line in mounts):
        if fields.split()[2] == wanted:
            return rest.split()[0]
    return ""
