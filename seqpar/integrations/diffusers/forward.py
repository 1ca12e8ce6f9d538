"""A forward in progress: attention inside blocks goes to the plan, everything else is whole or row by row."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from seqpar.comm.entry import uncompiled
from seqpar.integrations.diffusers.attend import Sharing, attend
from seqpar.integrations.rows import RankRows, local, rows_of, written
from seqpar.integrations.sdpa.fused import attends, in_flex_attention
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.ops.core.regions import known_regions, run_again_inside, under_way
from seqpar.private import torch as torch_private
from seqpar.private.torch import tree_map_only
from seqpar.trial.blocks import READS, Finding, value_of
from seqpar.trial.randomness import draws
from seqpar.trial.segments import RowPlace, held


class OtherValues(BaseException):
    """A block reads other values than in its trial. No code of a model catches it."""


class BlockCall:
    """A block that runs on this rank's rows. calls, reads: of attention, and of values of tensors, so far."""

    def __init__(self, name: str, finding: Finding, calls: int = 0, reads: int = 0) -> None:
        self.name, self.finding, self.calls, self.reads = name, finding, calls, reads

    def read(self, value: Any) -> Any:
        """A value that the block reads. Raises: OtherValues."""
        if self.reads >= len(self.finding.reads) or self.finding.reads[self.reads] != value_of(value):
            raise OtherValues
        self.reads += 1
        return value

    def check_over(self) -> None:
        """Raise NotImplementedError if a block called attention less often than in its trial."""
        if self.calls != len(self.finding.attends):
            raise self.differs(f"calls attention {self.calls} times")

    def differs(self, how: str) -> NotImplementedError:
        """The error for a block that does something else than in its trial."""
        return NotImplementedError(
            f"diffusers: {self.name} {how}, and in its trial it called it {len(self.finding.attends)} times, "
            f"on rows {[each[:2] for each in self.finding.attends]!r:.300}; give whole= the name of its list"
        )


class SharedForward(TorchFunctionMode):
    """A forward in progress, or a checkpoint's recomputation of it.

    model: the handle's, or a copy of it. block: the one that runs. cuts: how often a whole tensor was cut, or used by
    rows. kinds: what each block runs, by its name. tries: whether a block is tried. given: the places of the first
    block's arguments in a recomputation. attended: whether any attention was called. copies, stale: memory of gathered
    tensors -> of their rows, and of rows into whose gathered tensor something was written.
    """

    def __init__(
        self, model: nn.Module, sharing: Sharing, kinds: Mapping[str, int], block: BlockCall | None = None,
        given: Sequence[RowPlace | None] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.sharing, self.comm, self.kinds, self.block = model, sharing, sharing.comm, kinds, block
        self.cuts, self.outside, self.tries, self.given = 0, under_way(), False, given
        self.attended = False
        self.copies, self.stale = dict[StorageWeakRef, StorageWeakRef](), set[StorageWeakRef]()

    def __enter__(self) -> SharedForward:
        super().__enter__()
        _forwards().append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        _forwards().pop()
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception) and in_flex_attention(trace):
            self.refuse("flex_attention is not rerouted; call F.scaled_dot_product_attention")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.tries:
            return func(*args, **kwargs)
        if draws(func, args, kwargs):
            self.refuse(f"{func.__name__} in a forward would draw other random numbers on each rank than in one "
                         "process; draw them before the forward, or do without")  # fmt: skip
        self.attended |= func is F.scaled_dot_product_attention
        if self.block is not None:
            if func in READS:
                return self.block.read(func(*args, **kwargs))
            if func is F.scaled_dot_product_attention:
                return self._attend(*args, **kwargs)
            if attends(func):
                self.refuse(f"{func} in {self.block.name} is not rerouted; call F.scaled_dot_product_attention")
        elif (
            self.copies
            and type(x := written(func, args, kwargs)) is Tensor
            and (rows := self.copies.get(StorageWeakRef(x.untyped_storage())))
        ):
            self.stale.add(rows)
        return func(*args, **kwargs)

    def check_use(self, rows: Tensor) -> None:
        """Raise NotImplementedError for rows outside of a forward, or that do not have what was written."""
        if not _forwards():
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
    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """`F.scaled_dot_product_attention`, with its signature."""
        with torch_private.DisableTorchFunction():
            block: Any = self.block
            with errors_on_all_ranks("diffusers", self.comm):
                if block.calls >= len(block.finding.attends):
                    raise block.differs("calls attention once more")
                attended = block.finding.attends[block.calls]
                rank, size = self.comm.rank, self.comm.size
                rows = [held(some, rank, size) for some in attended[:2]]
                if [query.shape[-2], key.shape[-2]] != rows or (attn_mask is None) != (attended.mask is None):
                    how = f"attends from {query.shape[-2]} rows to {key.shape[-2]}, mask {attn_mask is not None}"
                    raise block.differs(f"{how}, expected {rows}")
                self.run_again(BlockCall(block.name, block.finding, block.calls, block.reads))
            block.calls += 1
            return attend(
                self.sharing, self, attended, query, key, value, attn_mask, is_causal, scale, enable_gqa
            )  # fmt: skip

    def rows_among(self, flat: list[Any]) -> list[Any]:
        """A block's arguments; those that were rows in the forward, and that a reentrant checkpoint saved, as such."""
        given, self.given = self.given or [None] * len(flat), ()
        return [rows_of(x, at, self) if type(x) is Tensor and at is not None else x for x, at in zip(flat, given)]

    def run_again(self, block: BlockCall | None, given: Sequence[RowPlace | None] = ()) -> None:
        """Make checkpoints around the caller recompute inside a forward like this one, at this place of a block."""

        @contextmanager
        def again() -> Iterator[None]:
            handle = self.sharing.handle
            parallel = handle.reactivated() if self.model is handle.model else nullcontext()
            with parallel, SharedForward(self.model, self.sharing, self.kinds, block, given):
                yield

        run_again_inside(again, self, self.outside)
        for region in known_regions():  # a reentrant one compares shapes with those of gradients
            if region not in self.outside:
                region.returned = partial(tree_map_only, RankRows, local)


_local = threading.local()


def _forwards() -> list[SharedForward]:
    if not hasattr(_local, "runs"):
        _local.runs = []
    return _local.runs  # type: ignore[no-any-return]


def current() -> SharedForward:
    """This thread's innermost forward. Raises: RuntimeError outside of one."""
    if not _forwards():
        raise RuntimeError(
            "diffusers: a part of a parallelized model runs outside its forward, where nothing says which tokens it "
            "has, such as in the backward of a forward inside local(); call the model, checkpoint with "
            "torch.utils.checkpoint, and run such a backward inside local() too"
        )
    return _forwards()[-1]
