"""Private memory of a merge: what streaming needs, and a limit to which the system holds the process."""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from confide.errors import MergeError
from confide.merging.vectors import CHUNK

CHUNKS = (CHUNK, CHUNK >> 2, CHUNK >> 4)
"""Chunk sizes, in coordinates, from the fastest to the one that needs least memory."""

_BESIDE = 24 << 20  # stacks of threads, the report, what the allocator doesn't give back
_SAMPLE = 4 << 20
_TABLE = 9 << 18  # counts of the upper and of the lower bits of float32


def streaming(models: int, chunk: int, *, ranks: bool) -> int:
    """Bytes for chunks of every model, and for the sample or the tables of order statistics.

    Args:
        ranks: whether there are order statistics, at most two a model.
    """
    chunks = (3 * models + 12) * chunk * 8
    if not ranks:
        return _BESIDE + chunks
    tables = 2 * models * _TABLE
    return _BESIDE + chunks + (max(tables, (2 * models + 1) * _SAMPLE) if chunk == CHUNK else tables)


@contextmanager
def limited(size: int | None) -> Iterator[None]:
    """Hold this process to `size` bytes of private memory beyond what it has when the block begins.

    What mapped files take is not private: the system takes it back when it needs it. Only Linux counts all
    private memory; elsewhere nothing is enforced. The process is as before when the block ends.

    Args:
        size: None for no limit.

    Raises:
        MergeError: the block needed more.
    """
    now = _private()
    if size is None or now is None:
        yield
        return
    _load_libraries()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    allowed = (_private() or now) + size
    others = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min([allowed, *others]), hard))
    try:
        yield
    except Exception as error:
        if not _is_lack(error):
            raise
        raise MergeError(
            f"the merge needs more private memory than the {size / 1e6:.0f} MB that are allowed; nothing was "
            "written. Allow more with --memory, or leave it out"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _private() -> int | None:
    """Bytes of private memory that the system counts for this process; None where it doesn't say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:")), None)


def _load_libraries() -> None:
    """Let BLAS take its buffers now: it ends the process where it can't have them later."""
    from scipy.linalg import lapack

    some = np.eye(256)
    lapack.dpotrf(some @ some)
    np.linalg.eigh(some)


def _is_lack(error: BaseException | None) -> bool:
    """Whether memory was what lacked: numpy, the system and threads each say it in another way."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
            return True
        if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False
