"""A forward in progress: attention inside blocks goes to the plan, everything else is whole or row by row."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from seqpar.comm.entry import uncompiled
from seqpar.foreign.wrap import replaced
from seqpar.integrations.diffusers.attend import Sharing, attend
from seqpar.integrations.rows import RankRows, local, written
from seqpar.integrations.sdpa.fused import in_flex_attention
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.ops.core.regions import known_regions, run_again_inside, under_way
from seqpar.private import torch as torch_private
from seqpar.private.torch import tree_map_only
from seqpar.trial.finding import READS, Attended, AttentionCall, Finding, value_of
from seqpar.trial.randomness import draws
from seqpar.trial.segments import RowPlace, held


class OtherValues(BaseException):
    """A block reads other values than in its trial. No code of a model catches it."""


@dataclass
class BlockCall:
    """A block that runs on this rank's rows. calls, reads: of attention, and of values of tensors, so far."""

    name: str
    finding: Finding
    calls: int = 0
    reads: int = 0

    def read(self, value: Any) -> Any:
        """A value that the block reads. Raises: OtherValues."""
        if self.finding.reads[self.reads : self.reads + 1] != (value_of(value),):
            raise OtherValues
        self.reads += 1
        return value

    def attended(self, call: AttentionCall | None, rank: int, size: int) -> Attended | None:
        """What the trial found of the next call of attention, None at the block's end.

        Raises: NotImplementedError if the trial made another call, or none.
        """
        found = next(iter(self.finding.attends[self.calls : self.calls + 1]), None)
        rows = None if found is None else (*(held(x, rank, size) for x in found[:2]), found.mask is not None)
        made = None if call is None else (call.query.shape[-2], call.key.shape[-2], call.attn_mask is not None)
        if made != rows:
            raise NotImplementedError(
                f"diffusers: {self.name} makes other calls of attention than in its trial: number {self.calls} has "
                f"(queries, keys, whether a mask) {made}, expected {rows}; give whole= the name of its list"
            )
        self.calls += 1
        return found


class SharedForward(TorchFunctionMode):
    """A forward in progress, or a checkpoint's recomputation of it.

    model: the handle's, or a copy of it. kinds: what each block runs, by its name. calls: name, module, attribute and
    plain value of each compiled call. block: the one that runs. given: the places of the first block's arguments in a
    recomputation. cuts: how often a whole tensor was cut, or used by rows. tries, compiled: whether the block is.
    copies, stale: memory of gathered tensors -> of their rows, and of rows into whose gathered tensor something was
    written.
    """

    def __init__(
        self, model: nn.Module, sharing: Sharing, kinds: Mapping[str, int],
        calls: Sequence[tuple[str, nn.Module, str, Any]], block: BlockCall | None = None,
        given: Sequence[RowPlace | None] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.sharing, self.comm, self.kinds, self.calls = model, sharing, sharing.comm, kinds, calls
        self.block, self.cuts, self.outside, self.given = block, 0, under_way(), given
        self.tries = self.compiled = False
        self.stack = ExitStack()
        self.copies, self.stale = dict[StorageWeakRef, StorageWeakRef](), set[StorageWeakRef]()

    def __enter__(self) -> SharedForward:
        super().__enter__()
        self.outer, _running.innermost = _running.innermost, self
        # a compiler would trace what a rank does with messages
        self.compiled_calls = {path: vars(module).get(name) for path, module, name, _ in self.calls}
        for _, module, name, plain in self.calls:
            self.stack.enter_context(replaced(module, {name: plain}))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self.stack.close()
        _running.innermost = self.outer
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception) and in_flex_attention(trace):
            self.refuse("flex_attention is not rerouted; call F.scaled_dot_product_attention")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.block is not None:  # whose trial drew no numbers
            if func is F.scaled_dot_product_attention:
                return self._attend(*args, **kwargs)
            if self.compiled:  # compilers do not trace `super()` in methods of Tensor
                return (torch.unflatten if func is Tensor.unflatten else func)(*args, **kwargs)
            return self.block.read(func(*args, **kwargs)) if func in READS else func(*args, **kwargs)
        if self.tries:
            return func(*args, **kwargs)
        if draws(func, args, kwargs):
            self.refuse(f"{func.__name__} in a forward would draw other random numbers on each rank than in one "
                         "process; draw them before the forward, or do without")  # fmt: skip
        self.sharing.attended |= func is F.scaled_dot_product_attention
        x = written(func, args, kwargs) if self.copies else None
        if type(x) is Tensor and (rows := self.copies.get(StorageWeakRef(x.untyped_storage()))):
            self.stale.add(rows)
        return func(*args, **kwargs)

    def check_use(self, rows: Tensor) -> None:
        """Raise NotImplementedError for rows outside of a forward, or that do not have what was written."""
        if _running.innermost is None:
            raise NotImplementedError(
                "diffusers: a tensor of which each rank holds its rows is used outside of the forward that made it, "
                "where its gradient would be wrong; return it from the model's forward, in a tuple, list or dict"
            )
        if self.stale and StorageWeakRef(rows.as_subclass(Tensor).untyped_storage()) in self.stale:
            self.refuse(
                "code between blocks writes into a view of a tensor of which each rank holds its rows; give whole= the "
                "list of blocks before it, or make another tensor"
            )

    @uncompiled
    def refuse(self, told: str) -> None:
        """Raise NotImplementedError on every rank."""
        with torch_private.DisableTorchFunction(), errors_on_all_ranks("diffusers", self.comm):
            raise NotImplementedError(f"diffusers: {told}")

    @uncompiled
    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """`F.scaled_dot_product_attention` in a block."""
        call, block = AttentionCall(*args, **kwargs), self.block
        assert block is not None
        with torch_private.DisableTorchFunction():
            before = replace(block)
            with errors_on_all_ranks("diffusers", self.comm):
                attended = block.attended(call, self.comm.rank, self.comm.size)
                self.run_again(before)
            assert attended is not None
            self.sharing.attended = True
            return attend(self.sharing, self, attended, call)

    def run_again(self, block: BlockCall | None, given: Sequence[RowPlace | None] = ()) -> None:
        """Make checkpoints around the caller recompute inside a forward like this one, at this place of a block."""

        @contextmanager
        def again() -> Iterator[None]:
            handle = self.sharing.handle
            parallel = handle.reactivated() if self.model is handle.model else nullcontext()
            with parallel, SharedForward(self.model, self.sharing, self.kinds, self.calls, block, given) as run:
                run.compiled_calls.clear()  # a checkpoint keeps the tensors of an uncompiled block
                yield

        run_again_inside(again, self, self.outside)
        for region in known_regions():  # a reentrant one compares shapes with those of gradients
            if region not in self.outside:
                region.returned = partial(tree_map_only, RankRows, local)


class _Running(threading.local):
    """The innermost forward of this thread."""

    innermost: SharedForward | None = None


_running = _Running()


def current() -> SharedForward:
    """This thread's innermost forward. Raises: RuntimeError outside of one."""
    if _running.innermost is None:
        raise RuntimeError(
            "diffusers: a part of a parallelized model runs outside its forward, where nothing says which tokens it "
            "has, such as in the backward of a forward inside local(); call the model, checkpoint with "
            "torch.utils.checkpoint, and run such a backward inside local() too"
        )
    return _running.innermost
