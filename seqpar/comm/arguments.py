"""Checks of the arguments that all comm constructors share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

# seconds that a comm waits by default: above torch's own 600 for NCCL, since a rank may evaluate or write meanwhile
PATIENCE = 1800.0
MOST_BYTES = 1 << 62  # of a pool: the sum with the rest of its memory has 63 bits
LONGEST = 1e9  # seconds: about the longest wait that the system can count


def check_timeout(name: str, timeout: Any) -> None:
    """Raise ValueError, beginning with `name`, for a timeout that is not a positive number of seconds."""
    if not is_timeout(timeout):
        raise ValueError(f"{name}: timeout={timeout!r}, expected seconds > 0, at most {LONGEST:g}")


def is_timeout(timeout: Any) -> bool:
    """Whether a wait can last this long."""
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        return False
    return 0 < float(timeout) <= LONGEST


def check_arguments(name: str, timeout: Any, check: Any) -> None:
    """Raise ValueError, beginning with `name`, for an invalid timeout or check."""
    if not isinstance(check, str) or check not in ("batch", "call"):
        raise ValueError(f'{name}: check={check!r}, expected "batch" or "call"')
    check_timeout(name, timeout)


def check_pool(name: str, pool_bytes: Any) -> None:
    """Raise ValueError, beginning with `name`, for a pool size that is not a positive integer, or above any memory."""
    if isinstance(pool_bytes, bool) or not isinstance(pool_bytes, Integral) or not 1 <= int(pool_bytes) <= MOST_BYTES:
        raise ValueError(f"{name}: pool_bytes={pool_bytes!r}, expected an integer from 1 to 2**62")


def check_descriptors(name: str, count: int) -> None:
    """Raise RuntimeError, beginning with `name`, if this process cannot open `count` more files."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise RuntimeError(
            f"{name}: this process can open {len(opened)} more files, a comm takes up to {count} "
            f"({error.strerror}); raise `ulimit -n` or close some"
        ) from None
    finally:
        for file in opened:
            os.close(file)


def subset(rank: int, size: int, ranks: Sequence[int]) -> list[int]:
    """The ranks of `Comm.sub`, checked.

    Raises: ValueError unless ranks are distinct ranks of the comm with the calling one among them.
    """
    ranks = list(ranks)
    if len(set(ranks)) != len(ranks) or rank not in ranks or not all(0 <= r < size for r in ranks):
        raise ValueError(f"sub: rank {rank} of {size} got ranks {ranks}; expected distinct ranks, itself among them")
    return ranks
