"""Values: immutable, equal by a digest, with cached derivations; and checks of their arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]

MOST = (1 << 62) - 1  # tokens of a batch: positions, and sums of two positions, fit into 64 bits


def digest_of(*parts: object) -> str:
    """A hash of values and arrays, equal in every process and on every platform."""
    h = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            h.update(str(part.shape).encode())
            h.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
        else:
            h.update(repr(part).encode())
        h.update(b"|")
    return h.hexdigest()


def integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """The value, checked to be an integer from ``least`` to ``most``; 3.0 is refused."""
    if not is_integer(value) or value < least:  # type: ignore[operator]
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    if most is not None and value > most:  # type: ignore[operator]
        raise ValueError(f"{name} must be an integer of at most {most}, got {value!r}")
    return int(value)  # type: ignore[call-overload]


def is_integer(value: object) -> bool:
    """Whether a value is an integer of Python or numpy; a bool is not."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def int64_of(name: str, values: NDArray[Any]) -> Ints:
    """Integers as int64. Raises ValueError if one is too large."""
    if values.dtype == np.uint64 and values.size and int(values.max()) >= 1 << 63:
        raise ValueError(f"{name} must be integers below 2**63, got {int(values.max())}")
    return values.astype(np.int64)


def positions_of(positions: ArrayLike, tokens: int) -> Ints:
    """Positions of queries as int64. Raises ValueError for others than -1, of a pad, to tokens - 1."""
    at = np.asarray(positions)
    if at.size and at.dtype.kind not in "iu":
        raise ValueError(f"positions must be integers, got {at.dtype}")
    at = int64_of("positions", at) if at.dtype == np.uint64 else at.astype(np.int64, copy=False)
    if at.size and (at.max() >= tokens or at.min() < -1):
        raise ValueError(f"positions run from {at.min()} to {at.max()}, the mask has {tokens} queries")
    return at


def lengths_of(name: str, values: ArrayLike, *, empty: bool = False) -> Ints:
    """A checked, read-only copy of document lengths, without those of 0 unless ``empty``: these hold no row."""
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # bfloat16 or gradients, unknown to numpy; lists of unequal lengths
        array = np.zeros((0, 0))
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be a non-empty sequence of integers, got {values!r:.200}")
    if array.min() < 0:
        at = int(np.flatnonzero(array < 0)[0])
        raise ValueError(f"{name} must be at least 0, got {int(array[at])} for document {at}")
    if len(array) > 1 and array[0] == 0 and (array[1:] > array[:-1]).all():
        raise ValueError(f"{name} ascend from 0 like cu_seqlens, got {values!r:.99}; give differences, x.diff()")
    if not array.any():
        raise ValueError(f"{name} must hold at least one token, got {values!r:.99}")
    if float(array.sum(dtype=np.float64)) >= 2.0**62:
        raise ValueError(f"{name} sum to {float(array.sum(dtype=np.float64)):.3g} tokens, more than 64 bits can number")
    return frozen((array if empty else array[array > 0]).astype(np.int64))


def frozen(array: NDArray[Any]) -> Any:
    """The array, read-only: all layers and ranks of a batch share facts."""
    array.flags.writeable = False
    return array


def _freeze(value: object) -> None:
    """Make all arrays of nested tuples read-only."""
    if isinstance(value, np.ndarray):
        frozen(value)
    elif isinstance(value, tuple):
        for part in value:
            _freeze(part)


P = ParamSpec("P")
R = TypeVar("R")
_UNKNOWN = object()


class Memo:
    """Caches derivations of a value, once per batch, as long as the value lives."""

    _memo: dict[Any, Any]

    def memo(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, called once; concurrent callers all get the result that was stored first."""
        found = self._memo.get(key, _UNKNOWN)  # one look: a key may be long
        return self._memo.setdefault(key, make()) if found is _UNKNOWN else found

    def known(self, key: Any) -> Any:
        """The result of an earlier `memo`, or None."""
        return self._memo.get(key)


def cached(function: Callable[P, R]) -> Callable[P, R]:
    """A function, or a method, whose first argument keeps its results in its memo, by the other arguments."""
    name = f"{function.__module__}.{function.__qualname__}"

    @wraps(function)
    def call(of: Any, *key: Any, **named: Any) -> Any:
        return of.memo((name, *key, *named.items()), lambda: function(of, *key, **named))

    return cast(Callable[P, R], call)


class Fact(Memo):
    """A value: immutable, equal by its digest, pickled without its caches."""

    def _fill(self, **values: object) -> None:
        self.__dict__.update(values, _memo={})

    def digest(self) -> str:
        """A hash that is equal for equal values on every rank; cached."""
        return self.memo("digest", self._made_digest)

    def _made_digest(self) -> str:
        raise NotImplementedError

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable; make a new one instead of setting {name}")

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_memo"}

    def __setstate__(self, state: dict[str, object]) -> None:
        _freeze(tuple(state.values()))  # pickle loses the read-only flag
        self._fill(**state)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())
