"""Collectives in autograd: one function, called directly in eager mode and through a dispatcher op in graphs.

::

    eager    tensors, values,  options  ->  results           autograd's node keeps the record
    graph    tensors, handles, options  ->  results, ticket   the ticket keeps it, and goes where autograd takes it

A call leaves a *record* for its backward: its comm and its numbers. The backward of a linear collective is another
collective whose only value is that record, so it has derivatives of any order. Any other collective has a backward
function on the tensors that forward saved; since checkpoints save tensors anew, a *stamp* among them tells whether they
are from the same call. Neither kind has a forward-mode derivative.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.node import has_side_effect
from torch.utils.checkpoint import CheckpointPolicy

from seqpar.comm import Comm, Tag
from seqpar.comm.entry import refuse_transforms, uncompiled
from seqpar.ops.core.agreement import errors_on_all_ranks
from seqpar.ops.core.handles import carried, carry, handles, in_graph
from seqpar.ops.core.regions import refuse_repetition
from seqpar.private import torch as torch_private
from seqpar.private.torch import forward_level

Tensors = Sequence[Tensor | None]
STRIDED = torch.strided
PLAIN = (Tensor, torch.nn.Parameter)
# dtypes whose elements PyTorch does not copy: quantized ones, those below a byte, and bits
UNMOVED = frozenset(
    {
        torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4,
        torch.bits1x8, torch.bits2x4, torch.bits4x2, torch.bits8, torch.bits16,
        torch.int1, torch.int2, torch.int3, torch.int4, torch.int5, torch.int6, torch.int7,
        torch.uint1, torch.uint2, torch.uint3, torch.uint4, torch.uint5, torch.uint6, torch.uint7,
    }
)  # fmt: skip
LIBRARY = torch.library.Library("seqpar", "FRAGMENT")
# A replay of a CUDA graph reads no handle: it would compute the captured call's plan for every batch.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)


class LayerCalls(threading.local):
    """The layers' calls of this thread, those of compiled graphs included.

    begun: attention calls entered, including refused ones and those whose result a checkpoint already has. run: calls
    of attention and recurrences that an op has run. verbs: calls of all verbs, backward passes included.
    """

    begun = run = verbs = 0


layer_calls = LayerCalls()


@dataclass(eq=False)
class Record:
    """A call, as its backward passes need it.

    passes: backward passes so far; a retained graph has several. stamp: a number for the call's values other than
    tensors, distinct within this process.
    """

    comm: Comm
    tag: Tag
    passes: int = field(default=0, kw_only=True)
    stamp: int = field(default=0, kw_only=True)

    def way_back(self) -> Tag:
        """The tag of the next backward pass; each has its own numbers."""
        self.passes += 1
        name = self.tag.name.replace("forward", "backward")
        return self.tag._replace(phase=self.tag.phase + 1, stage=self.tag.stage + self.passes - 1, name=name)


@dataclass(frozen=True, eq=False)
class Ticket:
    """The values of an op's ticket.

    kept: saved tensors, or their numbers among the op's tensors and results. The ticket must not refer to those, since
    the graph may overwrite their memory.
    """

    record: Record
    kept: Sequence[Tensor | int | None]


class CollectiveOp:
    """A collective of a list of tensors or Nones, and the op ``seqpar::name`` for graphs.

    tensors, options, results: in the schema of the op, which has the handles between the first two, ``bool[] grads``
    after the options and the ticket after the results. The op of its backward, ``seqpar::name_backward``, takes the
    gradients of results, the tensors, the results if it reads them, the ticket, and which gradients are needed.

    run(tensors, values, *options, grads) returns its results (None for one that is not asked for, which is empty in
    graphs), the tensors to save, and its record. values: the op's other arguments, ending with a comm; or, as the
    backward of another call, that call's record. grads: which of the tensors require a gradient. fake(tensors, handles,
    *options, grads) returns the results without values; without a list in the schema it gets each tensor.
    adjoint(tensors, options, needed), for a linear collective, returns the op of its backward for the tensors numbered
    `needed`, and its options without grads. back(record, saved, grads, needs), for any other, returns the gradients of
    the tensors. reads_results: whether that needs the results of forward, which graphs then save. checks: whether a
    call refuses transforms, and leaves tensors that are not dense to `run`; False where the verb has checked both.
    verb: whether it moves rows.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., tuple[Tensors, Tensors, Any]],
        fake: Callable[..., Tensors],
        *,
        tensors: str = "Tensor[] xs",
        options: str = "",
        results: str = "Tensor[] ys",
        adjoint: Callable[..., tuple[CollectiveOp, tuple[Any, ...]]] | None = None,
        back: Callable[..., Tensors] | None = None,
        reads_results: bool = False,
        checks: bool = True,
        verb: bool = True,
    ) -> None:
        run = _counted(run, layer=back is not None) if verb else run
        back = None if back is None else _counted(back)
        self.name, self.run, self.adjoint, self.back, self.checks = name, run, adjoint, back, checks
        self.reads_results = reads_results
        self._recorded, self._unrecorded = uncompiled(_Eager.apply), uncompiled(run)
        named, found = tensors.split(", "), results.split(", ")
        self._tensors = None if tensors.startswith("Tensor[]") else len(named)  # None: one list
        self._results = len(found)
        arguments = [tensors, "Tensor[] handles", *([options] if options else []), "bool[] grads"]
        self._define(name, f"({', '.join(arguments)}) -> ({results}, Tensor ticket)", self._run_in_graph)
        LIBRARY.impl(name, uncompiled(self._differentiable), "Autograd")

        def fake_call(*given: Any) -> Any:
            made, ticket = fake(*given), torch.empty((), dtype=torch.int64, device="cpu")
            return (made, ticket) if self._tensors is None else (*made, ticket)

        torch.library.register_fake(f"seqpar::{name}", fake_call, lib=LIBRARY)
        if back is not None:
            arguments = [f"Tensor? d{x.split()[-1]}" for x in found] + [tensors] + ([results] if reads_results else [])
            grads = ", ".join(f"Tensor d{x.split()[-1]}" for x in named)
            schema = f"({', '.join(arguments)}, Tensor ticket, bool[] needs) -> ({grads})"
            self._define(f"{name}_backward", schema, self._run_back_in_graph)
            torch.library.register_fake(f"seqpar::{name}_backward", self._fake_back, lib=LIBRARY)

    def __call__(self, tensors: Tensors, values: Sequence[Any], *options: Any) -> Sequence[Tensor]:
        """The results."""
        if self.checks:
            refuse_transforms(self.name)
        grads = requirements(tensors)
        if in_graph(*tensors):
            if self.checks and not all_dense(tensors):
                if torch.compiler.is_compiling():
                    check_dense(self.name, tensors)
                # no dispatcher takes them; `run` refuses them on all ranks
                return self._unrecorded(tensors, values, *options, grads)[0]  # type: ignore[no-any-return]
            return self.dispatch(tensors, handles(*values), *options, grads)[0]
        if forward_level() >= 0:
            last = values[-1]
            with errors_on_all_ranks(self.name, last.comm if isinstance(last, Record) else last):
                refuse_tangents(self.name, tensors)
        if True in grads:
            return self._recorded(self, values, (*options, grads), *tensors)  # type: ignore[no-any-return]
        return self._unrecorded(tensors, values, *options, grads)[0]  # type: ignore[no-any-return]

    def _define(self, name: str, schema: str, run: Callable[..., Any]) -> None:
        LIBRARY.define(f"{name}{schema}", tags=TAGS)
        LIBRARY.impl(name, uncompiled(run), "CompositeExplicitAutograd")
        # compilers must not drop an op whose result is unused or empty on a rank: other ranks wait for it
        has_side_effect(getattr(torch.ops.seqpar, name).default)

    def dispatch(self, tensors: Tensors, handles: Sequence[Tensor], *options: Any) -> tuple[Sequence[Tensor], Tensor]:
        """The results and the ticket, through the dispatcher."""
        op = getattr(torch.ops.seqpar, self.name)
        if self._tensors is None:
            return op(list(tensors), handles, *options)  # type: ignore[no-any-return]
        *results, ticket = op(*tensors, handles, *options)
        return results, ticket

    def _parted(self, arguments: Sequence[Any]) -> tuple[Tensors, Sequence[Tensor], Sequence[Any]]:
        """An op's arguments as tensors, handles and options."""
        count = 1 if self._tensors is None else self._tensors
        tensors = arguments[0] if self._tensors is None else arguments[:count]
        return tensors, arguments[count], arguments[count + 1 :]

    def _run_in_graph(self, *arguments: Any) -> Any:
        refuse_capture(self.name)
        tensors, handles, options = self._parted(arguments)
        values = [value for handle in handles for value in carried(handle)]
        if isinstance(values[0], Ticket):
            values = [values[0].record]
        results, saved, record = self.run(tensors, values, *options)
        saved_by_graph = [*tensors, *results] if self.reads_results else tensors
        places = {id(x): n for n, x in reversed(list(enumerate(saved_by_graph))) if x is not None}
        ticket = carry(Ticket(record, [places.get(id(x), x) for x in saved]))
        # as the op's fake promises to compilers
        dense = [unneeded(tensors) if x is None else x.contiguous() for x in results]
        return (dense, ticket) if self._tensors is None else (*dense, ticket)

    def _run_back_in_graph(self, *arguments: Any) -> tuple[Tensor, ...]:
        assert self.back is not None
        refuse_capture(self.name)
        *given, ticket, needs = arguments
        grads, tensors = given[: self._results], given[self._results :]
        (left,) = carried(ticket)
        saved = [tensors[x] if isinstance(x, int) else x for x in left.kept]
        found = self.back(left.record, saved, grads, needs)
        gradients = []
        for x, of, need in zip(found, tensors, needs, strict=False):
            gradients.append(unneeded(tensors) if not need else torch.zeros_like(of) if x is None else _apart(x))
        return tuple(gradients)

    def _fake_back(self, *arguments: Any) -> tuple[Tensor, ...]:
        *given, _, needs = arguments
        tensors = given[self._results :]  # and results
        pairs = zip(tensors, needs, strict=False)
        return tuple(x.new_empty(x.shape) if x is not None and need else unneeded(tensors) for x, need in pairs)

    def _differentiable(self, *arguments: Any) -> Any:
        tensors, handles, options = self._parted(arguments)
        refuse_tangents(self.name, tensors)
        if any(requirements(tensors)):
            *results, ticket = _InGraph.apply(self, handles, options, *tensors)
            return (results, ticket) if self._tensors is None else (*results, ticket)
        with torch_private.AutoDispatchBelowAutograd(), _never_repeated():
            return getattr(torch.ops.seqpar, self.name)(*arguments)


def _counted(run: Callable[..., Any], *, layer: bool = False) -> Callable[..., Any]:
    """The run of a verb, or its backward, which counts its calls. layer: whether it runs attention or a recurrence."""

    def counted(*arguments: Any) -> Any:
        layer_calls.verbs += 1
        layer_calls.run += layer
        return run(*arguments)

    return counted


def unneeded(tensors: Tensors) -> Tensor:
    """What a backward op returns for a gradient that is not needed. tensors: of the forward."""
    return next(x for x in tensors if x is not None).new_empty(0)


def requirements(tensors: Sequence[object]) -> list[bool]:
    """Which tensors require a gradient; False for anything that is not a tensor."""
    if not torch.is_grad_enabled():
        return [False] * len(tensors)
    return [getattr(x, "requires_grad", False) for x in tensors]


def is_dtensor(x: object) -> bool:
    """Whether x is sharded or replicated over a DeviceMesh; torch's DTensor, half a second to import, is not."""
    if type(x) in PLAIN:  # most are; each parameter is asked several times a step
        return False
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(x, loaded.DTensor)


def all_dense(tensors: Sequence[object]) -> bool:
    """Whether no tensor is nested, sparse, a DTensor, or of a dtype that PyTorch does not copy."""
    return not any(
        [
            isinstance(x, Tensor) and (x.is_nested or x.layout is not STRIDED or x.dtype in UNMOVED or is_dtensor(x))
            for x in tensors
        ]
    )


def check_dense(what: str, tensors: Sequence[object]) -> None:
    """Raise NotImplementedError for nested and sparse tensors, DTensors, and dtypes that PyTorch does not copy."""
    for x in tensors:
        if not isinstance(x, Tensor):
            continue
        if x.is_nested or x.layout is not STRIDED:
            kind = "nested tensor" if x.is_nested else f"tensor of layout {x.layout}"
            raise NotImplementedError(
                f"{what} got a {kind}, expected dense tensors; give documents of several lengths as rows [T, ...], one "
                "document after another (x.values() of a jagged tensor), and their lengths to the mask"
            )
        if is_dtensor(x):
            raise NotImplementedError(
                f"{what} got a DTensor with placements {x.placements}, expected this rank's plain tensor; give "  # type: ignore[attr-defined]
                "x.to_local(), and a comm of ranks that hold the same heads"
            )
        if x.dtype in UNMOVED:
            ways = "x.dequantize() or x.int_repr()" if x.is_quantized else "x.view(torch.uint8)"
            raise NotImplementedError(
                f"{what} got a tensor of {x.dtype}, expected dense tensors of a dtype that PyTorch copies; give {ways}"
            )


def refuse_tangents(what: str, tensors: Tensors) -> None:
    """Raise NotImplementedError for tensors with a tangent of forward-mode derivatives, which would be lost."""
    for x in tensors if forward_level() >= 0 else ():
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(f"{what} has no forward-mode derivative; use reverse mode")


class _Eager(torch.autograd.Function):
    """A collective and its backward."""

    @staticmethod
    def forward(ctx: Any, op: CollectiveOp, values: Any, options: Any, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        results, saved, ctx.record = op.run(tensors, values, *options)
        ctx.op = op
        if op.adjoint is not None:
            _note_way_back(ctx, tensors, options, results)
        else:
            ctx.set_materialize_grads(False)
            ctx.stamp = torch.full((), ctx.record.stamp, dtype=torch.int64, device="cpu")
            ctx.save_for_backward(ctx.stamp, *saved)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batches(ctx.op.name, grads)
        if ctx.op.adjoint is not None:
            op, options = ctx.way_back
            return (None, None, None, *_placed(ctx, op([grads[n] for n in ctx.needed], [ctx.record], *options)))
        refuse_double_backward(ctx.op.name)
        stamp, *saved = ctx.saved_tensors
        if stamp.data_ptr() != ctx.stamp.data_ptr():  # equal pointers: nothing came between
            check_stamp(ctx.op.name, ctx.record.comm, int(ctx.stamp), stamp)
        return (None, None, None, *ctx.op.back(ctx.record, saved, grads, ctx.needs_input_grad[3:]))


class _InGraph(torch.autograd.Function):
    """The same for ops. All tensors are saved, as it is unknown which ones are needed."""

    @staticmethod
    def forward(ctx: Any, op: CollectiveOp, handles: Any, options: Any, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with torch_private.AutoDispatchBelowAutograd(), _never_repeated():
            results, ticket = op.dispatch(tensors, handles, *options)
        ctx.op = op
        if op.adjoint is not None:
            ctx.ticket = ticket
            _note_way_back(ctx, tensors, options, [*results, ticket])
        else:
            ctx.mark_non_differentiable(ticket)
            ctx.set_materialize_grads(False)
            # a traced graph has none
            ctx.record = carried(ticket)[0].record if type(ticket) is Tensor else None
            ctx.save_for_backward(*tensors, *(results if op.reads_results else ()), ticket)
        return (*results, ticket)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_batches(ctx.op.name, grads)
        if ctx.op.adjoint is not None:
            op, options = ctx.way_back
            found, _ = op.dispatch([grads[n] for n in ctx.needed], [ctx.ticket], *options, [False] * len(ctx.needed))
            return (None, None, None, *_placed(ctx, found))
        refuse_double_backward(ctx.op.name)
        *saved, ticket = ctx.saved_tensors
        if ctx.record is not None and type(ticket) is Tensor:
            again = carried(ticket)[0].record
            if again is not ctx.record:
                check_stamp(ctx.op.name, ctx.record.comm, ctx.record.stamp, again.stamp)
        needs = list(ctx.needs_input_grad[3:])
        found = getattr(torch.ops.seqpar, f"{ctx.op.name}_backward")(*grads[:-1], *saved, ticket, needs)
        return (None, None, None, *(x if need else None for x, need in zip(found, needs, strict=True)))


@contextmanager
def _never_repeated() -> Iterator[None]:
    """A block whose ops a traced graph's backward does not repeat to save memory: ranks would choose other ones.

    By default none is repeated; under `torch._functorch.config.activation_memory_budget` sizes decide. What a
    checkpoint says about its region stays.
    """
    meta = torch_private.meta_of_graph()
    if torch_private.memory_budget() >= 1 or "recompute" in meta:
        yield
        return
    meta["recompute"] = CheckpointPolicy.MUST_SAVE
    try:
        yield
    finally:
        del meta["recompute"]


def _note_way_back(ctx: Any, tensors: Tensors, options: Any, results: Sequence[Tensor]) -> None:
    """Note the op of a linear collective's backward, and the inputs that need no gradient."""
    ctx.needed = [n for n, x in enumerate(tensors) if x is not None and x.requires_grad]
    ctx.count = len(tensors)
    ctx.mark_non_differentiable(*(y for n, y in enumerate(results) if n not in ctx.needed))
    ctx.way_back = ctx.op.adjoint(tensors, options, ctx.needed)


def _placed(ctx: Any, grads: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients, at the places of all tensors; None where none is needed."""
    by_number = dict(zip(ctx.needed, grads, strict=True))
    return [by_number.get(n) for n in range(ctx.count)]


def refuse_capture(what: str) -> None:
    """Raise NotImplementedError for an op of a compiled graph while a CUDA graph is captured."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            f"{what} of a compiled function in a CUDA graph under capture, whose replays would compute this plan for "
            "every batch; leave capturing to torch.compile, which captures the parts between such calls if "
            "torch._inductor.config.graph_partition is on, as by default"
        )


def refuse_batches(what: str, grads: Tensors) -> None:
    """Raise NotImplementedError in a backward of several gradients at once."""
    if any([x is not None and torch_private.is_legacy_batchedtensor(x) for x in grads]):
        raise NotImplementedError(
            f"{what} has no backward with is_grads_batched=True, nor with vectorize=True of torch.autograd.functional; "
            "take one gradient after another"
        )


def refuse_double_backward(what: str, linear: Tensors | None = None) -> None:
    """Raise NotImplementedError in a backward that is recorded to be differentiated again.

    `once_differentiable` of torch would leave this part out of second derivatives that also flow another way. linear:
    the gradients, if the backward depends on nothing else; constant ones have no second derivative.
    """
    if torch.is_grad_enabled() and (linear is None or any(requirements(linear))):
        raise NotImplementedError(f"{what} has no double backward; call backward without create_graph=True")


def check_stamp(what: str, comm: Comm, stamp: int, saved: Tensor | int) -> None:
    """Raise RuntimeError, and report it to the other ranks, if backward got the saved tensors of another call."""
    if isinstance(saved, Tensor):
        saved = int(saved) if saved.dtype == torch.int64 and saved.numel() == 1 else -1
    if saved != stamp:
        refuse_repetition(what, comm)


def _apart(x: Tensor) -> Tensor:
    """A gradient in its own memory, as results of an op may not share any, and contiguous, as its fake promises."""
    alone = x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if alone else x.clone(memory_format=torch.contiguous_format)
