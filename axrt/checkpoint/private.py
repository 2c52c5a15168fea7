"""A directory of this user alone, in a place where all users of a host may write, such as
/dev/shm."""

# Whoever may write there can make a directory, or a link, of any name first. So the directory
# itself is opened, not what a link leads to, and its owner is looked at before anything below it is
# read, written or removed. Nobody else can change what is below: it is this user's, with mode 0700,
# and where others may write above it, that is root's and has the sticky bit, so no other directory
# comes in its place.
#
# Other directories of a run may be shared. There a link of another user's is refused, at least.

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from axrt.errors import ConfigError

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def make_private(path: Path) -> None:
    """Make a directory for this user alone, or find it to be one.

    Args:
        path: path of the directory; the one above it exists.
    Raises:
        OSError: it cannot be made, or is not this user's alone.
    """
    with suppress(FileExistsError):
        path.mkdir(0o700)
    if why := why_not_private(path):
        raise PermissionError(errno.EPERM, why, str(path))


# A directory in /dev/shm is looked at once, at its top. It is opened without following links, and
# is the user's own with mode 0700 below a directory with the sticky bit. So nobody else can change
# what is below, and nothing else there needs descriptors.
def why_not_private(path: Path) -> str:
    """Why a directory is not this user's alone; "" where it is. One that others may read or write
    to is closed to them.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return error.strerror or str(error)
    try:
        found, me = os.fstat(file), os.geteuid()
        if found.st_uid != me:
            return f"it belongs to user {found.st_uid}, and this process to user {me}"
        above = path.parent.stat()
        if above.st_uid not in (0, me):
            return f"user {above.st_uid}, whose {path.parent} is, may put another one in its place"
        if above.st_mode & _OTHERS_WRITE and not above.st_mode & stat.S_ISVTX:
            return (
                f"others may put another one in its place, since they may write to {path.parent}, "
                "which has no sticky bit"
            )
        if stat.S_IMODE(found.st_mode) != 0o700:
            os.fchmod(file, 0o700)
    finally:
        os.close(file)
    return ""


def check_own_link(path: Path) -> None:
    """Check that no link of another user's leads from a run to files that are not the run's: they
    would be taken for its own, and removed in time.

    Raises:
        ConfigError: the path is such a link.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return
    if stat.S_ISLNK(found.st_mode) and found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} is a link that user {found.st_uid} has made; expected a directory, or a link "
            "of your own"
        )
