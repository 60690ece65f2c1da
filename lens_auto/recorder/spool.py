"""Where a node keeps the files that are being written, and how they are made so that no full disk can kill a rank."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import sys
import tempfile

from lens_auto.recorder.layout import RANKS_DIR, SEGMENT_BYTES

SHM = "/dev/shm"  # our folder in it is 0700 and checked
SHM_SHARE = 0.10
SEGMENTS_AT_ONCE = 4  # open, spare, and up to two closed ones on their way to the run directory


_ZEROS = bytes(1 << 20)
_MAP_FIXED = 0x10  # of Linux and macOS


class NoSpoolError(OSError):
    """No place for the spool; the message names what was tried and why each failed."""


def private_folder(path: str) -> str:
    """Make or check a folder that only this user can enter; links are not followed.

    Raises:
        OSError: it cannot be made, is a link or a file, or belongs to somebody else.
    """
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(errno.ENOTDIR, "not a folder (links are not followed)", path)
    if found.st_uid != os.getuid():
        raise OSError(errno.EPERM, f"belongs to user {found.st_uid}, not to {os.getuid()}", path)
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.chmod(path, 0o700)
    return path


def make_folders(path: str) -> str:
    """Make a folder and its missing parents, 0700."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    return path


def shm_has_room(local_ranks: int, shm: str = SHM) -> bool:
    """Whether all local ranks' segments fit into a tenth of what is free in the memory file system."""
    try:
        found = os.statvfs(shm)
    except OSError:
        return False
    return local_ranks * SEGMENTS_AT_ONCE * SEGMENT_BYTES <= SHM_SHARE * found.f_bavail * found.f_frsize


def spool_bases(configured: str | None, local_ranks: int) -> list[str]:
    """Folders to try for the spool, best first. The configured one is tried first, never alone."""
    bases = [configured] if configured else []
    if shm_has_room(local_ranks):
        bases.append(SHM)
    bases.append(tempfile.gettempdir())
    return bases


def user_folder(base: str) -> str:
    """Our folder of this user in a base."""
    return os.path.join(base, f"lens-auto-{os.getuid()}")


def make_writer_folder(configured: str | None, local_ranks: int, key: str, writer: str) -> tuple[str, list[str]]:
    """Make a writer's spool folder in the first base that takes it.

    Returns:
        The folder, and one line for each base that failed before it.

    Raises:
        NoSpoolError: none took it.
    """
    problems: list[str] = []
    for base in spool_bases(configured, local_ranks):
        try:
            if base == configured:
                make_folders(base)
            folder = private_folder(user_folder(base))
            for part in (key, RANKS_DIR, writer):
                folder = private_folder(os.path.join(folder, part))
            probe = os.path.join(folder, "probe")
            os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
            os.unlink(probe)
            return folder, problems
        except OSError as error:
            problems.append(f"{base!r} cannot be written ({error.strerror or error})")
    raise NoSpoolError(errno.ENOSPC, "; ".join(problems))


def create_mapped(path: str, size: int) -> mmap.mmap:
    """Create a file with its blocks allocated, and map it.

    The blocks are allocated first: writing through a map to a block that a full file system cannot give ends the
    process with SIGBUS, which nothing can catch. Zeros are written too, while other threads run: to map pages that are
    not there yet holds the interpreter for milliseconds (4 MiB in /dev/shm: 4 ms, and 0.5 once they are).

    Raises:
        OSError: it exists, cannot be made, or there is no room (the file is removed again).
    """
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size)
        for offset in range(0, size, len(_ZEROS)):
            os.pwrite(descriptor, _ZEROS[: size - offset], offset)
        return _map(descriptor, size)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> mmap.mmap:
    """Map a file, and keep no descriptor.

    `mmap.mmap` keeps a duplicate and closes its number in the end. The program may have closed it before (daemonizing
    code closes all that it finds), and have a file of its own there by then. Before Python 3.13, which can do without,
    the file takes the place of an anonymous map.
    """
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    if sys.version_info >= (3, 13):
        return mmap.mmap(descriptor, size, flags=flags, trackfd=False)
    import ctypes  # takes longer than all else here, and a program that does not train does without

    buffer = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_long,
    )
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(address, size, access, flags | _MAP_FIXED, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer


def write_atomically(path: str, data: bytes) -> None:
    """Replace a small file in one step; the new one is 0600."""
    temporary = f"{path}.{os.getpid()}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
