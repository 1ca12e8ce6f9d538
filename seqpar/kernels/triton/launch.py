"""Launches of attention kernels, prepared once for a step and tensors of one kind.

Triton looks at every argument of a launch to find the binary for it. What it looks at follows from the step and from
`kinds_of` the tensors, so it is done once: later launches hand their arguments to the binary. A kernel's other variants
are compiled together with the first one. A later batch may need any of them, and all ranks would wait for the rank that
compiles.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from seqpar.kernels.protocol import Score
from seqpar.kernels.triton.arguments import Bounds, EndingBounds, PerRow, Scalars, TensorKind, TileLoads, kinds_of

Variants = Iterable[Mapping[str, Any]]  # the arguments by name in which a variant differs

_compiled: set[Hashable] = set()  # kernels with the kinds of their arguments whose variants are compiled


def kind_of_score(score: Score) -> Hashable:
    """The part of a score that arguments follow from; each launch is given its slopes and its seed."""
    slopes = None if score.slopes is None else kinds_of(score.slopes)
    return score.scale, score.softcap, score.dropout_p, score.first_head, slopes, _is_narrow(score.dropout_seed)


def _is_narrow(seed: int) -> bool:
    """Whether a seed fits the 32 bits that Triton then passes it in."""
    return -(1 << 31) <= seed < 1 << 31


@dataclass(eq=False)
class Launch:
    """A kernel's launches with arguments of one kind.

    constants: its last arguments, compiled into it. options: of the compilation. variants: to compile with it. others:
    launches of other kernels, each with arguments, to compile with it too.
    """

    kernel: Any
    programs: int
    constants: tuple[Any, ...]
    options: dict[str, Any]
    variants: Variants = ()
    others: tuple[tuple[Launch, tuple[Any, ...]], ...] = ()
    launch: Any = field(default=None, init=False)  # of the binary, once there is one

    def __call__(self, *arguments: Any) -> None:
        """Launch the kernel with all arguments but the constants."""
        if self.launch is None:
            self._compile(arguments)
            grid = self.programs, 1, 1
            binary = self.kernel[grid](*arguments, *self.constants, **self.options)
            self.launch = None if binary is None else binary[grid]  # Triton's interpreter has no binaries
        else:
            self.launch(*arguments, *self.constants)

    def _compile(self, arguments: tuple[Any, ...]) -> None:
        """Compile the kernel and its variants, all at the same time; one that fails raises when it is launched."""
        changes, self.variants = list(self.variants), ()
        if not changes:
            return
        from triton import AsyncCompileMode

        kinds = tuple(map(_kind_of_argument, arguments))
        key = self.kernel.__name__, arguments[0].data.device, kinds, self.constants, *self.options.items()
        if key in _compiled:
            return
        names = self.kernel.arg_names
        named = dict(zip(names, (*arguments, *self.constants), strict=True))
        count = len(changes) + 1 + len(self.others)
        with ThreadPoolExecutor(count) as threads, AsyncCompileMode(threads, ignore_errors=True):
            for variant in (named, *({**named, **change} for change in changes)):
                self.kernel.warmup(*(variant[name] for name in names), grid=(1, 1, 1), **self.options)
            for other, given in self.others:
                other.kernel.warmup(*given, *other.constants, grid=(1, 1, 1), **other.options)
        _compiled.add(key)


class Joined(NamedTuple):
    """The launch that adds the parts of cut key tiles to dk and dv. rows: of all parts. counts: its last arguments."""

    launch: Launch
    rows: int
    counts: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Prepared:
    """All of a launch but its tensors.

    loads: of the two tensors whose tiles are loaded one after another. tables: of the step's tiles. counts: the last
    arguments before the constants. joined: None unless key tiles are cut.
    """

    launch: Launch
    loads: tuple[TileLoads, TileLoads]
    bounds: Bounds | EndingBounds
    tables: tuple[Tensor, ...]
    counts: tuple[int, ...]
    scalars: Scalars
    joined: Joined | None = None


class Both(NamedTuple):
    """The two launches of a backward, and the arguments that both take: the same tensors, and of the score."""

    dq: Prepared
    dkdv: Prepared
    q: PerRow
    k: PerRow
    v: PerRow
    dout: PerRow
    grad: PerRow  # of q
    kinds: tuple[TensorKind, ...]  # of dk and dv
    sums: tuple[Any, ...]  # lse and delta
    scores: tuple[Scalars, int]


def _kind_of_argument(x: Any) -> Hashable:
    """What Triton looks at of an argument, unless it is a constant."""
    if isinstance(x, tuple):
        return tuple(map(_kind_of_argument, x))
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return x == 1, x % 16 == 0
    return type(x).__name__
