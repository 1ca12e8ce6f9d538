"""Checks of a training step, in which all ranks must do the same.

1. **Weights are the same on all ranks**: at the first forward, and at the first one after they were written otherwise
   than by a step of an optimizer. Pointers and versions of their memory show writes, and a hook on all optimizers shows
   steps. Ranks that step unequally often, or that freeze other parameters, compare too. Weights of which a wrapper
   gives each of the ranks another part (FSDP) are one tensor by construction, and left out. A write through ``.data``
   changes no version, and is noticed only at a later comparison.
2. **Each gradient was summed once before the optimizer's step**: `sync_gradients` marks what it has summed, a step uses
   the mark up. Gradients without a mark, such as sums by hand, let ranks compare their weights at the next forward.
3. **What averages gradients averages by the number that was given**: DistributedDataParallel and `fully_shard`.

Ranks exchange all of this along with what they announce of a forward: a step costs no additional exchange. In a forward
whose weights nothing has written, the host waits for no device.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from seqpar.comm import Comm
from seqpar.comm.entry import uncompiled
from seqpar.comm.header import hash63
from seqpar.ops.core.collective_op import is_dtensor
from seqpar.ops.core.compared import hashed
from seqpar.private.accelerate import offloaded
from seqpar.private.torch import FLAT, parameters_of
from seqpar.train.wrappers import Averaging, alike, by_ddp, by_fsdp, global_rank, in_flat, local, shards, version

WEIGHTS = "weights"  # the fact of a forward
FEWER = (  # what to do where a rank comes to no forward
    "give every rank the same number of batches, or run the model on one rank alone inside `with handle.local():`, "
    "where handle is what `parallelize` returned"
)

_open: weakref.WeakSet[StepChecks] = weakref.WeakSet()
_listening: list[Any] = []  # the hook on all optimizers, once a model is parallel
_opening = threading.Lock()  # around uses of both, since ranks may be threads


class StepChecks:
    """The checks of the training steps of one model. Created as a collective of the comm's ranks.

    average_over: the number of ranks over which a wrapper averages the gradients; 1 if they are summed. within: where
    ranks are meanwhile, for messages.
    """

    def __init__(self, model: nn.Module, comm: Comm, *, average_over: int = 1, within: str = "parallelize") -> None:
        self._model, self.comm, self.average_over = weakref.ref(model), comm, average_over
        self._ranks = frozenset(comm.gather(f"{within}({type(model).__name__})", global_rank()))
        self._known: dict[int, tuple[Tensor, Tensor | None]] = {}  # parameters by id, each with the weight to compare
        self._found: list[tuple[nn.Module, str, Tensor]] = []  # weights of the current forward, with their places
        self._now: dict[int, tuple[int, int]] = {}  # pointers and versions in the current forward, by ids of weights
        self._seen: dict[int, tuple[int, int]] = {}  # the same when ranks were last equal, or after a step since
        self._equal = False  # whether ranks have had equal weights once
        self._steps = 0  # of optimizers since ranks were last equal
        self._unsummed = False  # whether one of these steps took gradients without a mark
        self._due = False  # whether a forward's gradients were not summed since
        # for a class of the model, which `fully_shard` changes
        self._by_fsdp: tuple[type[nn.Module], Averaging | None] | None = None
        self._wrapped = False  # whether a wrapper has reduced gradients
        self.reduced: Averaging | None = None  # the wrapper that reduces those of the last forward in training
        self._said = False  # whether a warning named its number
        with _opening:
            if not _listening:
                _listening.append(register_optimizer_step_post_hook(_after_step))
            _open.add(self)

    def close(self) -> None:
        """Leave optimizers and `sync_gradients` alone."""
        with _opening:
            _open.discard(self)

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self._model()).__name__

    def gather(
        self, what: str, value: Any, error: Exception | None = None, *, facts: Mapping[str, object], hint: str = FEWER
    ) -> list[Any]:
        """Every rank's value if all ranks have equal facts, no error and equal weights; costs one `Comm.gather`.

        Raises: as `Comm.gather`; ValueError on every rank if weights differ, or what requires gradients.
        """
        if self.comm.size == 1:
            return self.comm.gather(what, value, error, facts=facts, hint=hint)
        gathered = None
        try:
            gathered = self.comm.gather(what, value, error, facts={**facts, WEIGHTS: self._fact()}, hint=hint)
        except ValueError as refused:
            if getattr(refused, "differing", "") != WEIGHTS:
                raise
        if gathered is None:  # outside the except clause: its error, about digests, would be printed above this one's
            self._compare(what)
            gathered = self.comm.gather(what, value, error, facts=facts, hint=hint)
        self._seen, self._equal, self._steps, self._unsummed = self._now, True, 0, False
        return gathered

    # 1. weights

    def _fact(self) -> tuple[int, int, int]:
        """What ranks compare in a forward: steps, a hash of what is trained, and one of all weights if they changed."""
        self._found = self._weights()
        self._now = {id(p): _written(p) for *_, p in self._found if not p.is_meta}
        changed = not self._equal or self._unsummed or self._now != self._seen
        trained = hash(tuple([p.requires_grad for *_, p in self._found])) if torch.is_grad_enabled() else 0
        return self._steps, trained, hash63(self._hashes()) if changed else 0

    def _weights(self) -> list[tuple[nn.Module, str, Tensor]]:
        """The weights that all ranks should hold alike, each once; shards, where `fully_shard` has made them whole."""
        found, modules, known, whole = {}, [self._model()], dict[int, Any](), None
        while modules:
            if (module := modules.pop()) is None:
                continue
            modules.extend(module._modules.values())
            for key, p in parameters_of(module).items():
                if p is None:
                    continue
                if p.is_meta:  # perhaps put away, and other objects in every forward
                    found[id(module), key] = module, key, p
                    continue
                if (each := self._known.get(id(p))) is None or each[0] is not p:
                    whole = shards(self._model()) if whole is None else whole
                    shard = whole.get(id(p), p)
                    each = p, shard if key != FLAT and self._is_alike(shard) else None
                known[id(p)] = each
                if each[1] is not None:
                    found[id(each[1])] = module, key, each[1]
        self._known = known
        return list(found.values())

    def _is_alike(self, p: Tensor) -> bool:
        return not in_flat(p) and (not is_dtensor(p) or alike(p, self._ranks)) and local(p).numel() > 0

    def _hashes(self) -> list[int]:
        stored = [offloaded(module, key) if p.is_meta else local(p) for module, key, p in self._found]
        return [0 if x is None else hashed(x) for x in stored]

    def _compare(self, what: str) -> None:
        """Raise if weights differ between ranks, or what is trained. A collective."""
        paths = {id(module): path for path, module in self._model().named_modules()}  # type: ignore[union-attr]
        names = [f"{paths[id(module)]}.{key}".lstrip(".") for module, key, _ in self._found]
        new = {name for name, (*_, p) in zip(names, self._found) if id(p) not in self._seen}
        trained = [p.requires_grad and torch.is_grad_enabled() for *_, p in self._found]
        own = dict(sorted(zip(names, zip(trained, self._hashes()))))
        every = self.comm.gather(f"{what}: weights", (own, self._steps))
        first, steps = every[0]
        for rank, (other, _) in enumerate(every):
            if odd := sorted(first.keys() ^ other.keys()):
                raise ValueError(
                    f"{what}: {odd[0]} is a parameter of rank {0 if odd[0] in first else rank}, and not of rank "
                    f"{rank if odd[0] in first else 0} ({len(odd)} in all); add the same adapters on every rank"
                )
            if odd := [name for name in first if first[name][0] != other[name][0]]:
                frozen, other_rank = (rank, 0) if first[odd[0]][0] else (0, rank)
                raise ValueError(
                    f"{what}: ranks differ in what requires gradients: {odd[0]} is frozen on rank {frozen} and not "
                    f"on rank {other_rank} ({len(odd)} in all); freeze the same parameters on every rank"
                )
        differ = [[name for name in first if first[name] != other[name]] for other, _ in every]
        rank = next((rank for rank, names in enumerate(differ) if names), 0)
        if not (odd := differ[rank]):
            return
        told = f"{what}: weights differ between rank 0 and rank {rank}, {odd[0]} first ({len(odd)} in all)"
        if not self._equal or odd[0] in new:
            since = "parameters are new" if self._equal else "nothing has trained yet"
            raise ValueError(
                f"{told}, and {since}; load the same weights on every rank, or call "
                "torch.manual_seed(0) before you create the model"
            )
        if unequal := [(rank, count) for rank, (_, count) in enumerate(every) if count != steps]:
            raise ValueError(
                f"{told}: an optimizer has stepped {unequal[0][1]} times on rank {unequal[0][0]} and {steps} times on "
                "rank 0, as where a GradScaler leaves out a step; start again from equal weights, and call "
                "sync_gradients before GradScaler.unscale_, so that all ranks find the same overflow"
            )
        raise ValueError(
            f"{told}: an optimizer stepped with gradients that were not summed over ranks, or stepped before their "
            "sum, or some ranks loaded or drew other weights; start again from equal weights, call "
            "seqpar.train.sync_gradients(model.parameters(), comm) before every step, and load weights on every rank"
        )

    def stepped(self, parameters: Sequence[Tensor], unsummed: set[int]) -> None:
        """Note a step of an optimizer. unsummed: ids of parameters whose gradients were not marked as sums."""
        own = [p for p in parameters if id(p) in self._seen]
        self._steps += 1
        self._unsummed |= not self._wrapped and any(id(p) in unsummed for p in own)
        self._seen |= {id(p): _written(p) for p in own}

    def has(self, parameters: Iterable[Tensor]) -> bool:
        """Whether ranks have compared some of these parameters."""
        return any(id(p) in self._seen for p in parameters)

    # 2. gradients

    def note_results(self, rows: int, results: Iterable[Tensor]) -> None:
        """Note a forward that computed so many rows: in training its results have a graph, and a backward is due."""
        model = self._model()
        self._due |= rows > 0 and bool(model and model.training) and any(x.grad_fn is not None for x in results)

    def unanswered(self) -> bool:
        """Whether a backward is due and has left no gradient."""
        return self._due and all(p.grad is None for p in self._model().parameters())  # type: ignore[union-attr]

    def summed(self) -> None:
        """Note a sum over ranks of the model's gradients."""
        self._due = False

    # 3. averages

    def wrapper(self) -> Averaging | None:
        """The wrapper around the forward that begins, or inside its model, that reduces gradients over the comm."""
        model = self._model()
        assert model is not None
        found = by_ddp(model)
        if found is None:
            if self._by_fsdp is None or self._by_fsdp[0] is not type(model):
                self._by_fsdp = type(model), by_fsdp(model, trained=True)
            found = self._by_fsdp[1]
        self.reduced = found if found is not None and found.covers(self._ranks, self.comm.size) else None
        self._wrapped |= self.reduced is not None
        return self.reduced

    def check_average(self, what: str) -> None:
        """Warn once, on one rank, if the wrapper of this forward averages by another number than `average_over`."""
        if (misfit := self._misfit(self.average_over)) and not self.comm.rank:
            warnings.warn(f"{what}: {misfit[0]}; give seqpar.parallelize(..., average_over={misfit[1]})", stacklevel=2)

    def check_loss(self, what: str, average_over: int) -> None:
        """Warn once if the wrapper of the last forward averages by another number than a loss was given."""
        if misfit := self._misfit(average_over):
            assert self.reduced is not None
            more = ""
            if len(self.reduced.ranks) != self.comm.size:
                ranks = len(self.reduced.ranks)
                more = f" (or {self.reduced.divisor:g}, where `valid` counts the labels of all {ranks} ranks)"
            warnings.warn(
                f"{what}: {misfit[0]}, unless you multiply it yourself; give it average_over={misfit[1]}{more}",
                stacklevel=4,
            )

    def _misfit(self, average_over: int) -> tuple[str, int] | None:
        """Why a loss for that number does not fit its wrapper, and the number that does; None if it fits, or said."""
        if (by := self.reduced) is None or self._said:
            return None
        self._said, expected = True, by.average_over(self.comm.size)
        if expected % 1 or expected == average_over:
            return None
        why = (
            f"{by.who} divides the sum of {len(by.ranks)} ranks' gradients by {by.divisor:g}, so that they are "
            f"{average_over}/{expected:g} of this loss's"
        )
        return why, int(expected)

    def averages_over(self, ranks: frozenset[int]) -> bool:
        """Whether the loss is for a wrapper that averages over some of these global ranks, as far as they are known."""
        others = ranks - {global_rank()}
        return self.average_over > 1 and not (others and others.isdisjoint(self._ranks))


def checks_of(parameters: Sequence[Tensor]) -> list[StepChecks]:
    """The checks of models that have some of these parameters."""
    with _opening:
        every = [(each, each._model()) for each in _open]
    ids = {id(p) for p in parameters}
    return [each for each, model in every if model is not None and any(id(p) in ids for p in model.parameters())]


def _written(p: Any) -> tuple[int, int]:
    """What a write to a tensor changes: the pointer to its memory, or its version."""
    if type(p) is nn.Parameter and not p.is_inference():  # most are, and each forward asks for all
        return p.data_ptr(), p._version
    try:
        return local(p.detach()).data_ptr() if is_dtensor(p) else p.data_ptr(), version(p)
    except RuntimeError:  # of classes without memory of their own, as quantised weights
        return id(p), version(p)


@uncompiled
def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Tell the checks of a step, and use up the marks of its gradients. After it, as a closure may compute them."""
    with _opening:
        every = list(_open)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if own := [each for each in every if each.has(parameters)]:
        unsummed = {id(p) for p in parameters if p.grad is not None and not _use(p.grad)}
        for each in own:
            each.stepped(parameters, unsummed)


# Marks of gradients that are sums over ranks


class _Sum:
    """One sum over ranks, with some values of a few gradients: they show writes through ``.data``, unlike versions."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._few = [TensorWeakRef(grad) for grad in grads[:: max(1, len(grads) // 2)]]
        self.sample()

    def sample(self) -> None:
        """Take the present values as those of the sum."""
        self._values = [None if (grad := each()) is None else _some(grad).clone() for each in self._few]

    def written(self) -> bool:
        """Whether a gradient that has the version of the sum has other values."""
        pairs = [(grad, x) for each, x in zip(self._few, self._values) if (grad := each()) is not None]
        return any(_is_unchanged(grad) and hashed(_some(grad)) != hashed(x) for grad, x in pairs)


def _some(grad: Tensor) -> Tensor:
    flat = local(grad.detach()).reshape(-1)
    return flat[:: max(1, len(flat) // 64)]


@dataclass(slots=True)
class _Mark:
    """A gradient that is part of a sum. version: after the sum. used: whether an optimizer has stepped by it."""

    of: _Sum
    version: int
    used: bool = False


# Not attributes of gradients, which pickle and deepcopy would copy.
_marks: Any = WeakTensorKeyDictionary()


def mark_summed(parameters: Iterable[Tensor]) -> None:
    """Mark the gradients of these parameters as a sum over ranks."""
    grads = [p.grad for p in parameters if p.grad is not None]
    of = _Sum(grads)
    for grad in grads:
        _marks[grad] = _Mark(of, version(grad))


def _is_unchanged(grad: Tensor | None) -> bool:
    """Whether a gradient is part of a sum, and has its version."""
    return grad is not None and (mark := _marks.get(grad)) is not None and mark.version == version(grad)


def summed_already(parameters: Sequence[Tensor]) -> list[bool]:
    """Which gradients are sums over ranks, and not written to since."""
    same = [_is_unchanged(p.grad) for p in parameters]
    if True not in same:
        return same
    written = {of for of in {_marks[p.grad].of for p, alike in zip(parameters, same) if alike} if of.written()}
    return [alike and _marks[p.grad].of not in written for p, alike in zip(parameters, same)]


@contextmanager
def remark(parameters: Sequence[Tensor]) -> Iterator[None]:
    """A block that changes gradients but leaves their marks as sums, as clipping does."""
    marked = [(p, _marks[p.grad]) for p in parameters if _is_unchanged(p.grad)]
    yield
    for p, mark in marked:
        assert p.grad is not None
        _marks[p.grad] = _Mark(mark.of, version(p.grad), mark.used)
    for of in {mark.of for _, mark in marked}:
        of.sample()


def _use(grad: Tensor) -> bool:
    """Use up the mark of a gradient if it is a sum by which no optimizer has stepped; a write since was clipping."""
    mark = _marks.get(grad)
    if mark is None or mark.used:
        return False
    mark.used = True
    return True


# Losses that the model's caller computes


_last = threading.local()  # its `checks` are of this thread's last model whose caller computes the loss


def expect_loss(checks: StepChecks) -> None:
    """Note a forward in training whose loss its caller computes."""
    _last.checks = weakref.ref(checks)


def check_average(what: str, rows: Tensor, average_over: int) -> None:
    """Warn if a loss is made for no wrapper, and one reduces the gradients of the last model's forward.

    A loss for another number than the comm's size may count the labels of other ranks too.
    """
    if average_over != 1 or torch.compiler.is_compiling() or not torch.is_grad_enabled() or rows.grad_fn is None:
        return
    if (last := getattr(_last, "checks", None)) is not None and (checks := last()) is not None:
        checks.check_loss(what, average_over)
