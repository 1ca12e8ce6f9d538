"""A forward in progress: attention under the plan of its sizes, and this rank's rows of whole tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm.entry import uncompiled
from seqpar.integrations.diffusers.tokens import Sharing, Streams, TokenCounts
from seqpar.integrations.sdpa.reroute import Rerouting
from seqpar.ops.core.regions import run_again_inside
from seqpar.private import torch as torch_private
from seqpar.trial.randomness import draws


class SharedForward(Rerouting):
    """A forward in progress, or a checkpoint's recomputation of it.

    model: the handle's, or a copy of it. whole: the arguments of the forward. masked: whether the model makes a mask
    of its rows, which the plan replaces.
    """

    def __init__(
        self, model: nn.Module, sharing: Sharing, sizes: TokenCounts, joint: Streams, *,
        whole: Mapping[str, Any] = MappingProxyType({}), masked: bool = False, again: bool = False,
    ) -> None:  # fmt: skip
        # its recipe knows the model: no trial
        super().__init__(
            sharing.plan(sizes, joint, joint), sharing.comm, lambda query, key: self.cross > 0, None, sharing.numerics,
            again=again, tries=False,
        )  # fmt: skip
        self.model, self.sharing, self.sizes, self.whole, self.masked = model, sharing, sizes, whole, masked
        self.joint, self.over, self.cross = joint, (joint, joint), 0

    def __enter__(self) -> SharedForward:
        super().__enter__()
        _forwards().append(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        _forwards().pop()
        super().__exit__(kind, error, trace)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            self._refuse_draw(func.__name__)
        return super().__torch_function__(func, types, args, kwargs)

    @uncompiled
    def _refuse_draw(self, name: str) -> None:
        with torch_private.DisableTorchFunction(), self._refusals():
            raise NotImplementedError(
                f"diffusers: {name} in a forward would draw other random numbers on each rank than in one process; "
                "draw them before the forward, or do without"
            )

    def _again(self, first: int) -> Callable[[], AbstractContextManager[None]]:  # type: ignore[override]
        return self._recomputing

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        handle = self.sharing.handle
        parallel = handle.reactivated() if self.model is handle.model else nullcontext()
        again = SharedForward(
            self.model, self.sharing, self.sizes, self.joint, whole=self.whole, masked=self.masked, again=True
        )
        with parallel, again:
            yield

    @contextmanager
    def attending(self, queries: Streams, keys: Streams) -> Iterator[None]:
        """Inside, attention is from this rank's tokens of some streams to all ranks' tokens of some."""
        before = self.plan, self.over
        self.plan, self.over = self.sharing.plan(self.sizes, queries, keys), (queries, keys)
        try:
            yield
        finally:
            self.plan, self.over = before

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Inside, attention is over tensors that every rank has whole, and sends nothing."""
        self._stay_again()
        self.cross += 1
        try:
            yield
        finally:
            self.cross -= 1

    @uncompiled
    def _stay_again(self) -> None:
        with self._refusals():
            run_again_inside(self._again(self.calls), self, self.outside)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool,
        scale: float | None, samples: int = 1,
    ) -> Tensor:  # fmt: skip
        kept = [self.sharing.kept(self.sizes, streams) for streams in self.over]
        if any(flags is not None and len(flags) != len(x) for flags, x in zip(kept, (q, k))):
            return super()._attend(q, k, v, mask, dropout_p, is_causal, scale, samples)
        at, keys = (None if flags is None else flags.nonzero()[:, 0].to(q.device) for flags in kept)
        if keys is not None:
            k, v = k[keys], v[keys]
        if at is None:
            return super()._attend(q, k, v, mask, dropout_p, is_causal, scale, samples if keys is None else 1)
        out = super()._attend(q[at], k, v, mask, dropout_p, is_causal, scale)
        return out.new_zeros(len(q), *out.shape[1:]).index_copy(0, at, out)

    def _scaled_dot_product(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
    ) -> Tensor:
        with self._refusals():
            if attn_mask is not None and not self.masked:
                raise NotImplementedError(f"diffusers: attention was given a mask of its own, {list(attn_mask.shape)}")
        return super()._scaled_dot_product(query, key, value, None, *rest, **named)

    def _compare_keys(self, k: Tensor) -> None:
        """Nothing: the recipe knows which keys are shares."""

    def _check_meaning(self, is_causal: bool) -> None:
        if is_causal:
            raise NotImplementedError("diffusers: causal attention is not supported")

    def rows(self, x: Tensor, dim: int, *streams: str) -> Tensor:
        """This rank's rows of a whole tensor, stream after stream; one unused row for a stream without rows.

        Models expect some.
        """
        counts = self.sizes.of(streams)
        if x.shape[dim] != sum(counts):
            raise ValueError(
                f"diffusers: {list(x.shape)} at dim {dim}, expected {sum(counts)} tokens of the {' and '.join(streams)}"
            )
        parts = [self.sharing.part(count, self.comm.rank) for count in counts]
        own = [
            whole.narrow(dim, part.start, len(part)) if part or not count else whole.narrow(dim, 0, 1)
            for whole, part, count in zip(x.split(counts, dim), parts, counts)
        ]
        return own[0] if len(own) == 1 else torch.cat(own, dim)

    def held(self, stream: str) -> int:
        """How many rows of a stream this rank has in each sample, an unused one included."""
        (count,) = self.sizes.of((stream,))
        return len(self.sharing.part(count, self.comm.rank)) or min(count, 1)


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
