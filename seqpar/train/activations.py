"""Less memory for activations: modules in tiles of rows, and blocks that backward computes again.

Of a block that is recomputed, a step keeps the input alone, so memory is largest while a block is computed again. There
an MLP holds several times the block's input, and norms hold copies in fp32. Both work on each row alone, so they can be
computed a tile of rows at a time::

    tile        rows 0 to r     module, checkpointed ─┐
                rows r to 2r    module, checkpointed ─┼─► concatenated
                ...                                  ─┘
    recompute   forward         x ──► block ──► y             keeps x, on the device or on the host
                backward        x ──► block ──► gradients

Without a checkpoint all tiles would stay until backward. Both are torch's checkpoint that is not reentrant. Tiles have
no collective, so ranks may have different numbers of them, and each parameter still gets one gradient in a backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from seqpar.comm.entry import uncompiled
from seqpar.foreign import name_of
from seqpar.foreign.wrap import places_of
from seqpar.nn import save_attention as keeping_attention
from seqpar.train.wrappers import gathered
from seqpar.trial.alone import in_a_trial, never_alone
from seqpar.trial.record import under_trial

CACHES = "cache", "past_key_values", "layer_past"  # by which transformers gives layers their caches of keys
_trying = threading.RLock()  # ranks that are threads may share a module, whose weights a trial replaces
_last = threading.local()  # its `packed` is the input that this thread moved to the host last


def tile(module: nn.Module, rows: int) -> ReplacedForward:
    """Compute a module in tiles of so many rows, in forward and in backward; returns a handle with ``undo()``.

    module: takes one tensor [..., T, C] and returns one with the same rows [..., T, C'], each of which follows from its
    row alone, as MLPs and norms do. Arguments that are no tensors go to every tile. rows: of a tile; a call with no
    more rows runs the module as it is. Ranks may have different numbers of rows and of tiles.

    Each tile is an activation checkpoint. Results and gradients are the same up to rounding, but dropout draws other
    numbers. Inside a block that `recompute` was called for, tiles bound what its recomputation holds.

    The module's ``forward`` is replaced, in copies too; its hooks run once a call. Call it before or after
    `seqpar.parallelize`, and before `fully_shard` of this module. The first call, in training and in evaluation, tries
    the module with a few random rows, and leaves it as it was. A compiled graph ends there once; with
    ``torch.compile(fullgraph=True)``, call the module once before.

    Raises: TypeError unless module is a module; ValueError for rows that are not a positive integer, a module that is
    tiled already, and one that gathers its weights, as FSDP's units: each tile would; NotImplementedError for a module
    that cannot be tiled, here or from its first call, by name: its rows depend on each other, it returns other than one
    tensor, it keeps a state between calls or writes to its input, or transformers records its router logits. TypeError
    from a call with other than one tensor.
    """
    who = _checked("tile", module, _Tiled, f", rows={rows!r}")
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise ValueError(f"{who}: rows must be a positive integer, the most rows of a tile, such as 2048")
    _check(who, [module], never_alone(module))
    return _Tiled(module, who, rows)


def recompute(block: nn.Module, *, save_attention: bool = False, offload: bool = False) -> ReplacedForward:
    """Keep only a block's input, and compute the block again in backward; returns a handle with ``undo()``.

    block: a layer of a model. Its input is its first tensor of floating point; other arguments stay as they are.
    save_attention: keep the results of attention too, of seqpar or torch, so that backward repeats neither its work nor
    its exchanges; only one backward is possible then. offload: keep an input on a CUDA device in pinned memory of the
    host. It is copied while the device computes, and back during the backward of the block after it.

    Random numbers are drawn again, and results and gradients are the same. What a call writes, such as running means,
    is written again, and backward needs the weights of forward. The block's ``forward`` is replaced, in copies too; its
    hooks, as FSDP2's, run once a call. Call it before or after `seqpar.parallelize` and `fully_shard`.

    Raises: TypeError unless block is a module; ValueError for a block that is recomputed already, also by
    ``gradient_checkpointing_enable()``. From a call: TypeError without a tensor of floating point; ValueError with a
    cache of keys, which backward would fill again.
    """
    who = _checked("recompute", block, _Recomputed)
    if getattr(block, "gradient_checkpointing", False):
        raise ValueError(f"{who}: it is a checkpoint already; call gradient_checkpointing_disable() of its model first")
    return _Recomputed(block, who, save_attention=save_attention, offload=offload)


def is_recomputed(module: nn.Module) -> bool:
    """Whether `recompute` was called for a module."""
    return any(isinstance(each, _Recomputed) for each in _replaced(module))


class ReplacedForward:
    """A module's forward, replaced until `undo`. A copy of the module has its own, around its own forward."""

    def __init__(self, module: nn.Module, who: str) -> None:
        *_, (owner, name) = places_of(module)
        self.module, self.who, self.active = module, who, True
        self.forward, self.is_own = getattr(owner, name), name in vars(owner)
        vars(owner)[name] = self

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward inside, for code that asks for its signature."""
        return self.forward

    def undo(self) -> None:
        """Restore the module. A second call does nothing; other handles of the module keep their effect."""
        self.active = False  # where another wrapper holds this one
        for owner, name in places_of(self.module):
            place = vars(owner)
            while isinstance(above := place.get(name), ReplacedForward) and above is not self:
                place, name = vars(above), "forward"
            if place.get(name) is not self:
                continue
            if "is_own" in place:
                place.update(forward=self.forward, is_own=self.is_own)
            elif self.is_own:
                place[name] = self.forward
            else:
                del place[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        return self._run(*args, **kwargs) if self.active else self.forward(*args, **kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def _of(self, key: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Tensor], Any]:
        """The module's forward as a function of one of its arguments, which it does not hold."""
        forward, count = self.forward, len(args)
        others = {n: x for n, x in (*enumerate(args), *kwargs.items()) if n != key}

        def run(x: Tensor) -> Any:
            given = {**others, key: x}
            return forward(*[given.pop(n) for n in range(count)], **given)

        return run


class _Tiled(ReplacedForward):
    """The forward of a tiled module. tried: in which modes, training or not, it was tried."""

    def __init__(self, module: nn.Module, who: str, rows: int) -> None:
        self.rows, self.tried = rows, set[bool]()
        super().__init__(module, who)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        tensors = {n: x for n, x in (*enumerate(args), *kwargs.items()) if isinstance(x, Tensor)}
        if len(tensors) != 1 or min(x.dim() for x in tensors.values()) < 2:
            raise TypeError(
                f"{self.who} was called with tensors {[list(x.shape) for x in tensors.values()]}, expected one "
                "[..., rows, channels]; tile modules inside it that take one, or call undo() of the handle"
            )
        ((key, x),) = tensors.items()
        run = self._of(key, args, kwargs)
        if self.module.training not in self.tried:
            self._try(key, args, kwargs)  # eagerly, so call the module once before torch.compile(fullgraph=True)
        if x.shape[-2] <= self.rows:
            return run(x)
        parts = list(x.split(self.rows, -2))

        def computed(part: Tensor) -> Any:
            return run(part.contiguous())  # of a batch, rows are no view that modules may flatten

        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # compilers know no saved tensors of nodes
            return _in_tiles(computed, parts)
        return torch.cat([checkpoint(computed, part, use_reentrant=False) for part in parts], -2)

    @uncompiled
    def _try(self, key: int | str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[key] if isinstance(key, int) else kwargs[key]
        if under_trial() or type(x) not in (Tensor, nn.Parameter) or x.is_meta:
            return  # it is a run of another trial, or there are no values to compare
        with _trying:
            if self.module.training not in self.tried:  # by another thread
                tried = in_a_trial(self.module, self._of(key, args, kwargs), x)
                _check(self.who, self.module.children(), tried)  # its own hooks run once
                self.tried.add(self.module.training)


def _in_tiles(run: Callable[[Tensor], Tensor], parts: list[Tensor]) -> Tensor:
    """The results of all tiles, whose inputs are saved before any of them is computed.

    So where nothing after the tiles is needed, a recomputation of the block around them ends here, without their work.
    """
    empty = parts[0].detach().new_empty(0)
    # Results and not their nodes are held: torch before 2.13 frees what a node saved when its result is gone.
    saved: list[Any] = [_Saved.apply(x, empty.clone().requires_grad_()) for x in parts]  # type: ignore[no-untyped-call]
    device = [empty]  # tells checkpoints, which save no lists, where random numbers are drawn

    def compute(n: int, _: object) -> Tensor:
        return run(parts[n] if parts else saved[n].grad_fn.saved_tensors[0])

    out = torch.cat([checkpoint(compute, n, device, use_reentrant=False) for n in range(len(parts))], -2)
    parts.clear()
    return out


class _Saved(torch.autograd.Function):
    """A node that saves a tensor, and has no other purpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, empty: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return empty.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None]:
        return None, None


class _Recomputed(ReplacedForward):
    """The forward of a block that backward computes again."""

    def __init__(self, block: nn.Module, who: str, *, save_attention: bool, offload: bool) -> None:
        self.offload = offload
        self.options: dict[str, Any] = {"context_fn": keeping_attention} if save_attention else {}
        super().__init__(block, who)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        given = (*enumerate(args), *kwargs.items())
        caches = [x for n, x in given if x is not None and (n in CACHES or hasattr(x, "get_seq_length"))]
        if caches:
            raise ValueError(
                f"{self.who} was called with a {type(caches[0]).__name__}, which backward would fill again; call the "
                "model with use_cache=False in training"
            )
        found = next(((n, x) for n, x in given if isinstance(x, Tensor) and x.is_floating_point()), None)
        if found is None:
            raise TypeError(f"{self.who} was called without a tensor of floating point; recompute the layers inside it")
        key, x = found
        on_host = self.offload and x.is_cuda and type(x) is Tensor  # of a block on the CPU, it is there
        with saved_tensors_hooks(_HostInput.packed, _HostInput.unpacked) if on_host else nullcontext():
            return checkpoint(self._of(key, args, kwargs), x, use_reentrant=False, **self.options)


class _HostInput:
    """A block's input in pinned memory, and on its device again from when the block after it fetches its own.

    Copies run on a stream of their own, in the order in which they are asked for.
    """

    def __init__(self, x: Tensor) -> None:
        self.device, self.there = x.device, None
        self.before, _last.packed = getattr(_last, "packed", None), ref(self)
        self.host = torch.empty_like(x, device="cpu", pin_memory=True)
        stream = _copying(x.device)
        stream.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(stream):
            self.host.copy_(x.detach(), non_blocking=True)
        x.record_stream(stream)

    @classmethod
    def packed(cls, x: Tensor) -> Tensor | _HostInput:
        """What a checkpoint saves. Those of torch before 2.13 save an empty tensor too, which stays."""
        return cls(x) if x.numel() else x

    @staticmethod
    def unpacked(saved: Tensor | _HostInput) -> Tensor:
        """The tensor that was saved, on its device."""
        return saved if isinstance(saved, Tensor) else saved.fetched()

    def start(self) -> Tensor:
        """The input on its device, once the copying stream is there."""
        if self.there is None:
            with torch.cuda.stream(_copying(self.device)):
                self.there = self.host.to(self.device, non_blocking=True)
        return self.there

    def fetched(self) -> Tensor:
        """The input on its device; the copy of the one before it begins."""
        (there, self.there), current = (self.start(), None), torch.cuda.current_stream(self.device)
        current.wait_stream(_copying(self.device))
        there.record_stream(current)
        if self.before is not None and (before := self.before()) is not None:
            before.start()
        return there


@cache
def _copying(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device's copies to and from the host."""
    return torch.cuda.Stream(device)


def _replaced(module: nn.Module) -> Iterator[ReplacedForward]:
    """What is around a module's forward, from the outermost."""
    for owner, name in places_of(module):
        each = vars(owner).get(name)
        while isinstance(each, ReplacedForward):
            yield each
            each = each.forward


def _checked(name: str, module: object, kind: type[ReplacedForward], given: str = "") -> str:
    """A call in messages. Raises TypeError unless it is for a module, ValueError if that is replaced so already."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name}({type(module).__name__}{given}): expected a module, an nn.Module, of one layer")
    if any(isinstance(each, kind) for each in _replaced(module)):
        done = "tiled" if kind is _Tiled else "recomputed"
        raise ValueError(f"{name}({name_of(module)}{given}): it is {done} already; call undo() of that handle first")
    return f"{name}({name_of(module)}{given})"


def _check(who: str, parts: Iterable[nn.Module], reason: str) -> None:
    """Raise ValueError if one of these modules gathers weights; NotImplementedError for a reason against tiles."""
    if by := next(filter(None, map(gathered, parts)), ""):
        raise ValueError(
            f"{who}: {by}, which would gather its weights once a tile, and ranks may have different numbers of tiles; "
            "tile modules inside the unit, or call tile before fully_shard"
        )
    if reason:
        raise NotImplementedError(
            f"{who} cannot be computed in tiles of rows: {reason}; tile modules inside it that work on each row "
            "alone, or none"
        )
