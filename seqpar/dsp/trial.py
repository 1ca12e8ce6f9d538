"""A trial of a stage in its first forward: do rows that its spec keeps apart look at each other?

A spec lists the dimensions that a stage mixes, and ranks share one of the others. A wrong list would give each rank its
own, wrong result. So after its first call a stage is called again, without gradients: on the same rows, and on rows
where some are replaced by their neighbours. What comes out for the other rows must be the same::

    rows of t     x0  x1  x2  x3         x1  x1  x2  x2
    a stage       y0  y1  y2  y3         ..  y1  y2  ..      where it mixes other dimensions alone

Then all rows are moved by one place, and results must move with them. At last the first rows are given again behind the
others, as if they were those of the next rank, and results must be the same in both places. A stage that numbers or
counts its rows by itself fails here: it would count those of a rank. A single row gets others on both sides. These
calls are left out for stages with tables of rows, which stay as they are, and for stages that remember tensors of
earlier calls, which may be of rows; more rows also where attention or adapters know their number, and where a rank
could let others wait. What a stage remembers of its own call is forgotten in the trial.

Weights that are zero, as gates and last layers are at the start of training, hide what they will multiply later, and so
does rounding; in the trial weights are random, in 32 bits (`seqpar.trial.weights`). Arguments that are zero have other
values too, and so have rows of the stream that are all alike, as those of still clips: nothing would change if they
were replaced by each other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from seqpar.comm import PeerError
from seqpar.dsp.checks import collective_modules
from seqpar.dsp.form import form_of
from seqpar.dsp.grid import Grid
from seqpar.dsp.space import Sharding
from seqpar.dsp.spec import Block
from seqpar.ops.core.compared import version_of
from seqpar.trial.compare import close
from seqpar.trial.protect import OF_MODULES, SavedState, eager, held, saved
from seqpar.trial.weights import coarse, drawn, is_plain, widened

log = logging.getLogger("seqpar.dsp")
ENOUGH = 16  # rows; a stage that was tried on fewer is tried again on more
NEAR_ZERO = 1e-3  # an argument whose elements are all below this may hide an effect
# Changes of rows: those of one parity replaced by rows of the other; all moved by one place; the first given again;
# other rows given on both sides of them.
EVEN, ODD, MOVED, MORE, OTHERS = range(5)
MIXES, COUNTS = "mixes", "counts the rows of"
TABLES = "_seqpar_tables"  # an attribute of stages
Arguments = dict[str, Any]
CallStage = Callable[[Arguments], Sequence[Tensor]]


def to_try(block: Block, grid: Grid, inside: Sharding) -> dict[str, int]:
    """The sharded dimensions along which a stage must treat rows one by one, and the rows of the rank that has most."""
    read = {*block.whole, *(dim for _, dims in block.gathers.values() for dim in dims)}
    most = dict[str, int]()
    for dim, space in ((inside, grid.outer), (grid.held, grid.inner)):
        if dim is not None and space is not None and dim not in read:
            rows = max(space.shares(dim))
            most[dim] = min(rows, most.get(dim, rows))
    # of a single row others show something only where a rank may take more of them
    least = 2 if block.attention or block.gathers or block.core else 1
    return {dim: rows for dim, rows in most.items() if rows >= least}


class Trial:
    """A trial of one call: it copies what the stage gets, which the stage may write to; `judge` follows the call."""

    def __init__(
        self, module: nn.Module, block: Block, grid: Grid, inside: Sharding, dims: Sequence[str], arguments: Arguments
    ) -> None:
        self.module, self.block, self.grid, self.inside, self.dims = module, block, grid, inside, dims
        self.forms = {**block.rows, **block.stream}
        self.given = {name: self._telling(name, x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        others = [x for name, x in arguments.items() if isinstance(x, Tensor) and name not in self.forms]
        self.fixed = [*module.parameters(), *others]
        self.versions = [version_of(x) for x in self.fixed]
        self.before, self.remembers, self.random = SavedState(module), _remembers(module), True

    def judge(self, outs: Sequence[Tensor], call: CallStage) -> dict[str, str]:
        """The dimensions along which rows depend on each other, on this rank, and how. All ranks with rows take part.

        outs: what the stage gave. call: the stage once more. A stage that writes to its weights, fails, or gives other
        results when it is called again, is not judged.
        """
        if [version_of(x) for x in self.fixed] != self.versions:
            return {}
        kept = [x.detach().clone() for x in outs]
        try:
            with saved(self.module):
                afresh = not self.before.would_write()
                if afresh:  # what the stage keeps of its rows comes again from changed ones
                    self.before.restore()
                told = afresh or not _remembers(self.module)
                for self.random in (True, False):  # it may not take other weights, or other dtypes
                    try:
                        return {dim: how for dim, how in self._mixed(call).items() if told or how != COUNTS}
                    except PeerError:
                        raise
                    except Exception as error:
                        log.info("a stage of %s was not tried: %s: %s", self.block.modules, type(error).__name__, error)
            return {}
        finally:  # a stage may return the same memory in every call
            for x, y in zip(outs, kept, strict=True):
                if not torch.equal(x.detach(), y):
                    x.data.copy_(y)

    def _mixed(self, call: CallStage) -> dict[str, str]:
        # as many calls on every rank, since a stage may wait for others inside
        block, first = self.block, self._outs(call, self._rows())
        tables = {dim for form in block.buffers.values() for dim in form_of(form).names}
        free = [] if self.remembers else [dim for dim in self.dims if dim not in tables]
        ways = [(dim, way) for dim in self.dims for way in (EVEN, ODD)] + [(dim, MOVED) for dim in free]
        found = [(dim, way, self._outs(call, self._rows(dim, way))) for dim, way in ways]
        # a rank that cannot take more rows fails on its own, where others would wait for its weights
        alone = not (block.attention or block.gathers or block.core or collective_modules(self.module))
        counted = {dim: COUNTS for dim in free if alone and self._counts(call, first, dim, MORE)}
        single = [dim for dim in free if alone and self.grid.outer.local(self.inside)[dim] == 1]
        counted |= {dim: MIXES for dim in single if self._counts(call, first, dim, OTHERS)}
        if self._apart(first, self._outs(call, self._rows())):
            return {}
        apart = [(dim, way) for dim, way, outs in found if self._apart(first, outs, dim, way)]
        # rows that are mixed change in every way
        counted |= {dim: COUNTS for dim, way in apart if way == MOVED}
        return counted | {dim: MIXES for dim, way in apart if way != MOVED}

    def _counts(self, call: CallStage, first: Sequence[Tensor], dim: str, way: int) -> bool:
        """Whether results change with more rows; not if the stage wants as many rows as it got."""
        try:
            return self._apart(first, self._outs(call, self._rows(dim, way)), dim, way)
        except PeerError:
            raise
        except Exception as error:
            log.info("a stage of %s takes no more rows: %s: %s", self.block.modules, type(error).__name__, error)
            return False

    def _outs(self, call: CallStage, arguments: Arguments) -> list[Tensor]:
        if self.random:
            arguments = {name: widened(x) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        weights = drawn(self.module) if self.random else nullcontext()
        with torch.no_grad(), _copied(self.module), saved(self.module, arguments.values()), eager(self.module), weights:
            return [x.detach().clone() for x in call(arguments)]

    def _rows(self, dim: str = "", way: int = EVEN) -> Arguments:
        """The arguments in new memory, with the rows of a dimension changed in this way."""
        return {
            name: self._changed(x, name, dim, way) if isinstance(x, Tensor) and name in self.forms else x
            for name, x in self.given.items()
        }

    def _telling(self, name: str, x: Tensor) -> Tensor:
        """An argument, in new memory if it has rows, and with other values if its own would hide what a stage does."""
        if name not in self.block.stream:
            if is_plain(x) and bool((x.detach().abs() <= NEAR_ZERO).all()):
                values = torch.linspace(0.1, 1.0, x.numel(), device=x.device, dtype=torch.float32)
                return values.view(x.shape).to(x.dtype)
            return x.detach().clone() if name in self.forms else x
        x, dims = x.detach().clone(), [dim for dim in self.dims if dim in form_of(self.forms[name]).names]
        still = any(all(torch.equal(x, self._changed(x, name, dim, way)) for way in (EVEN, ODD)) for dim in dims)
        return _varied(x) if still and is_plain(x) else x

    def _changed(self, x: Tensor, name: str, dim: str, way: int) -> Tensor:
        form = form_of(self.forms[name])
        if dim not in form.names:
            return x.clone()
        rows = self.grid.outer.unfold(x, self.forms[name], self.inside)
        at = form.index(dim)
        index = torch.arange(rows.shape[at], device=x.device)
        if way <= ODD and len(index) > 1:  # by the last one before, or the first one: none of this parity is left
            index = torch.where(_parity(index) == way, 1 - way, index).cummax(0).values
        elif way == OTHERS:
            other = _varied(rows) if is_plain(rows) else rows
            return form.fold(torch.cat([other, rows, other], at))
        elif way > ODD:
            index = _placed(index, way)
        return form.fold(rows.index_select(at, index))

    def _apart(self, a: Sequence[Tensor], b: Sequence[Tensor], dim: str = "", way: int = EVEN) -> bool:
        """Whether results differ by more than rounding: of rows that a change does not concern, or anywhere."""
        rounds = coarse(self.module, random=self.random)
        return any(
            not close(*self._of_same_rows(x, y, form, dim, way), rounds)
            for x, y, form in zip(a, b, self.block.stream.values(), strict=True)
        )

    def _of_same_rows(self, x: Tensor, y: Tensor, text: str, dim: str, way: int) -> tuple[Tensor, Tensor]:
        """The results of the same rows, before a change and after it."""
        form = form_of(text)
        if dim not in form.names:
            return x, y
        sizes = self.grid.outer.local(self.inside)
        rows, at = self.grid.outer.unfold(x, text, self.inside), form.index(dim)
        index = torch.arange(rows.shape[at], device=x.device)
        if way == OTHERS:
            return rows, form.unfold(y, sizes | {dim: 3 * len(index)}).narrow(at, len(index), len(index))
        placed = index if way <= ODD else _placed(index, way)
        others = form.unfold(y, sizes | {dim: len(placed)})
        if way <= ODD:
            stayed = index[_parity(index) != way]
            return rows.index_select(at, stayed), others.index_select(at, stayed)
        return rows.index_select(at, placed), others


def _placed(index: Tensor, way: int) -> Tensor:
    """The rows in the order in which they are given."""
    return index.roll(-1) if way == MOVED else torch.cat([index, index[:ENOUGH]])


def _parity(index: Tensor) -> Tensor:
    """0 or 1 for each row, without a period: 0 1 1 0 1 0 0 1 ..., the parity of the ones in its number."""
    bits = torch.zeros_like(index)
    while bool((index > 0).any()):
        bits, index = bits ^ (index & 1), index >> 1
    return bits


class HeldTensors:
    """The tensors that a module holds, other than parameters and buffers, before it is called on shares."""

    def __init__(self, module: nn.Module) -> None:
        self.noted = [(x, version_of(x)) for x in _tensors_in(module)]

    def __contains__(self, x: Tensor) -> bool:
        return any(x is y and version_of(x) == version for y, version in self.noted)


def _remembers(module: nn.Module) -> bool:
    """Whether a module holds tensors of an earlier call, which may be of its rows."""
    tables = getattr(module, TABLES, ())
    return any(x not in tables for x in _tensors_in(module))


def _tensors_in(module: nn.Module) -> Iterator[Tensor]:
    own = (x for part in module.modules() for name, x in part.__dict__.items() if name not in OF_MODULES)
    return (x for x in held(own) if isinstance(x, Tensor))


@contextmanager
def _copied(module: nn.Module) -> Iterator[None]:
    """The module with copies of its buffers: the graph of the stage's own call may need them as they are."""
    own = [(part, dict(part._buffers)) for part in module.modules()]
    try:
        for part, buffers in own:
            part._buffers.update({name: None if x is None else x.clone() for name, x in buffers.items()})
        yield
    finally:
        for part, buffers in own:
            part._buffers.update(buffers)


def _varied(x: Tensor) -> Tensor:
    """A tensor with random numbers of its scale added, the same on all ranks; the state of no generator changes."""
    drawn = np.random.default_rng(0).random(tuple(x.shape), dtype=np.float32)
    scale = x.nan_to_num(0.0, 0.0, 0.0).abs().max()
    return x + torch.from_numpy(drawn).to(x) * torch.where(scale > 0, scale, 1)
