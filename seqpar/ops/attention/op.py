"""Attention as a collective op: ``seqpar::attention`` in graphs, and the same functions in eager mode.

::

    seqpar::attention           q k v sinks slopes, handles, options   ->  out lse top ticket
    seqpar::attention_backward  gradients, q k v sinks slopes out lse top, ticket   ->  dq dk dv dsinks

Plan and comm come through handles and are looked up when the op runs. They are unknown while a graph is traced, so fake
results depend on q and v alone. Saved are the tensors inside the head trade, so that backward only trades gradients. If
a part's tensors are views, the inputs and results that they view are saved instead, so that autograd detects changes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.comm.header import hash63
from seqpar.kernels import Kernel, acc_dtype, faulty
from seqpar.ops.attention.call import Call, PartTensors, Recipe, Views, prepare, recipe_of
from seqpar.ops.attention.rows import leading, near
from seqpar.ops.attention.schedule import backward, forward, largest
from seqpar.ops.attention.signature import Expansion, Options, Signature, check_tensors, signature_of
from seqpar.ops.attention.source import check_plan, resolved, values_of
from seqpar.ops.core.agreement import abort_on_error, agreement, check_comm, gathering, remember
from seqpar.ops.core.collective_op import CollectiveOp, Tensors, check_dense, layer_calls
from seqpar.ops.core.device import current_device_of, no_autocast
from seqpar.ops.core.precompute import recent_attention
from seqpar.ops.core.regions import check_repetition
from seqpar.ops.move.pack import some_of
from seqpar.plan import Part, Plan

log = logging.getLogger("seqpar.ops")

# in the schemas of ops
OPTIONS = (
    "float? scale, float softcap, float dropout_p, SymInt? dropout_seed, bool deterministic, str kernel, str accuracy, "
    "bool return_lse, bool return_max_logit"
)
RESULTS = "Tensor out, Tensor lse, Tensor top"


def attended(
    op: CollectiveOp, tensors: Sequence[Any], plan: Plan | Tensor, comm: Comm | None, options: Options, *more: Any
) -> Tensor | tuple[Tensor, ...]:
    """What a verb returns: out[, lse][, max_logit], out alone by default. more: options of the op alone."""
    seed = options.dropout_seed
    if isinstance(seed, int) and not -(2**63) <= seed < 2**63:  # what an op takes
        options = options._replace(dropout_seed=(seed + 2**63) % 2**64 - 2**63)
    out, lse, top = op(tensors, values_of(op.name, plan, comm), *options, *more)
    if not (options.return_lse or options.return_max_logit):
        return out
    return out, *([lse.t()] if options.return_lse else []), *([top.detach()] if options.return_max_logit else [])


def _run(tensors: Sequence[Any], values: Sequence[Any], *options_and_grads: Any) -> tuple[Tensors, Tensors, Call]:
    """Output, lse [H, T] and the largest scores, the tensors of the parts that backward needs, and the call."""
    *given, grads = options_and_grads
    plan, comm, options = resolved(values, Options(*given))
    call = agreed_call("attention", tensors, None, plan, comm, options, grads)
    results, saved = computed(call, call.recipe.kernel, tensors, saves=any(grads))
    return results, saved, call


def agreed_call(
    verb: str, tensors: Sequence[Any], expansion: Expansion | None, plan: Plan, comm: Comm, options: Options,
    grads: Sequence[bool],
) -> Call:  # fmt: skip
    """The call with these arguments. A collective; raises as the verb, on every rank.

    tensors: q, k, v, sinks and slopes; those of latent attention have the latents as k and the rotated parts as v.
    grads: which of them, and then of the weights, require a gradient.
    """
    q, k, v, sinks, slopes = tensors
    layer_calls.begun += 1
    check_comm(verb, comm)
    with agreement(verb, comm) as agreed:
        check_dense(verb, tensors if expansion is None else (*tensors, *expansion))
        check_plan(verb, plan, comm)
        check_tensors(q, k, v, sinks, slopes, expansion)
        signature = signature_of(q, k, v, sinks, slopes, options, grads, expansion)
        recipe = plan.known((comm.rank, signature)) or _first(plan, comm, signature)
        if (q.shape[0], k.shape[0]) != recipe.rows:
            raise ValueError(_wrong_rows(q, k, comm, recipe, latents=expansion is not None))
        # unused without dropout, so ranks may pass different seeds
        seed = int(options.dropout_seed) if signature.dropout_p and options.dropout_seed is not None else None
        agreed.facts, agreed.keys = recipe.facts, recipe.keys
        agreed.digest = recipe.digest if seed is None else hash63((recipe.digest, seed))
        agreed.values = {"dropout_seed": seed, "alibi_slopes": slopes, "sinks": sinks}
        if expansion is not None:
            agreed.values |= expansion.weights
    if recipe.kind is not None:
        recipe = _usable(recipe, plan, comm, signature)
    number = comm.next_call()
    # a comm and its subs share stats; numbers as text, since Python's hashes of -1 and -2 are the same
    stamp = hash((recipe.stamp, str(seed), id(comm.stats), comm.rank))
    check_repetition(verb, comm, stamp)
    log.debug("rank %d: %s, call %d, plan %s, %s", comm.rank, verb, number, recipe.facts["plan"], recipe.kernel.name)
    return Call(comm, Tag(agreed.digest, number, 0, 0, verb), plan, signature, recipe, seed or 0, stamp=stamp)


def computed(call: Call, kernel: Kernel, tensors: Sequence[Any], *, saves: bool) -> tuple[list[Tensor | None], Tensors]:
    """Output, lse [H, T] and the largest scores [H], and the tensors that `differentiated` needs, if it `saves` any.

    tensors: as agreed. Scores that are not asked for are None.
    """
    q, k, v, sinks, slopes = tensors
    q, k, v = near(q), near(k), near(v)
    with abort_on_error(call.comm, call.name), no_autocast(q.device.type), current_device_of(q):
        out, lse, parts = forward(call, kernel, q, k, v, sinks, slopes)
        top = largest(call, parts) if call.signature.return_max_logit else None
    saved: list[Tensor | None] = []
    if saves:
        saved = [sinks, slopes, out, lse]
        for part, own in zip(call.recipe.parts, parts, strict=True):
            saved += _saved(part, own, (q, k, v), call.recipe.widths[part.width].views)
    return [out, lse, top], saved


def _usable(recipe: Recipe, plan: Plan, comm: Comm, signature: Signature) -> Recipe:
    """The recipe with the kernel of all ranks: one that failed its first check on some rank is passed over on all.

    A collective in the first call of a kind. Raises: ValueError if the ranks' GPUs have different best kernels.
    """
    assert recipe.kind is not None
    known: Any = comm.agreed.get(recipe.kind)
    passed_over: frozenset[str] = known or frozenset()

    def without() -> Recipe:
        key = (comm.rank, signature, passed_over)
        return plan.memo(key, lambda: recipe_of(plan, comm.rank, signature, passed_over)) if passed_over else recipe

    while known is None:  # the next kernel may fail on another rank, so until no rank has news
        with gathering(signature.verb, comm) as kernels:
            name = without().kernel.name
            kernels.own = name, list(faulty(signature.spec(plan)))
        names, failed = zip(*kernels.every, strict=True)
        every = passed_over.union(*failed)
        if every == passed_over:
            if len(set(names)) > 1:
                comm.agree(signature.verb, {"kernel": name})  # raises, and names the ranks
            remember(comm, recipe.kind, known=(known := passed_over))
        passed_over = every
    return without()


def _first(plan: Plan, comm: Comm, signature: Signature) -> Recipe:
    """The recipe of a plan's first call with this signature."""
    recent_attention.note(comm, _prepared, signature)
    return _recipe(plan, comm.rank, signature)


def _prepared(plan: Plan, rank: int, signature: Signature) -> None:
    """Make the recipe of calls to come, and pack what they upload."""
    prepare(plan, _recipe(plan, rank, signature), signature)


def _recipe(plan: Plan, rank: int, signature: Signature) -> Recipe:
    """The recipe of calls with this signature; cached."""
    return plan.memo((rank, signature), lambda: recipe_of(plan, rank, signature))  # type: ignore[no-any-return]


def _wrong_rows(q: Tensor, k: Tensor, comm: Comm, recipe: Recipe, *, latents: bool) -> str:
    keys = ("latent and rotated" if latents else "k and v", k, recipe.rows[1])
    name, x, rows = ("q", q, recipe.rows[0]) if q.shape[0] != recipe.rows[0] else keys
    if rows and rows in x.shape[1:] and not latents:
        return (
            f"{name} on rank {comm.rank} must have {rows} rows, as the plan's layout says, got {list(x.shape)}, with "
            f"them at dim {list(x.shape).index(rows)}; give [rows, heads, dim]"
        )
    return (
        f"{name} on rank {comm.rank} must have {rows} rows, as the plan's layout says, got {x.shape[0]}; seqpar.shard "
        "makes them"
    )


def _back(call: Call, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    return *differentiated(call, call.recipe.kernel, saved, grads, needs), None  # slopes have none


def differentiated(call: Call, kernel: Kernel, saved: Sequence[Any], grads: Tensors, needs: Sequence[bool]) -> Tensors:
    """dq, dk, dv, dsinks, from what `computed` saved; None where none is needed."""
    call.passes += 1
    dout, dlse, _ = grads
    sinks, slopes, out, lse, *inside = saved
    parts = [
        _restored(call, part, inside[5 * n : 5 * n + 5], out, lse, slopes) for n, part in enumerate(call.recipe.parts)
    ]
    with abort_on_error(call.comm, call.name), no_autocast(out.device.type), current_device_of(out):
        dout = torch.zeros_like(out) if dout is None else dout
        dq, dk, dv, dsinks = backward(call, kernel, parts, sinks, dout, dlse)
    dtype = call.signature.dtype
    return (
        dq if needs[0] else None,
        dk.to(dtype) if needs[1] else None,
        dv.to(dtype) if needs[2] else None,
        dsinks.to(sinks.dtype) if needs[3] and dsinks is not None else None,
    )


def _saved(part: Part, own: PartTensors, inputs: Sequence[Tensor], views: Views) -> list[Tensor | None]:
    """The 5 saved tensors of a part: its own, or the inputs that they view; None for views of results."""
    results = (None, None) if part.q.trivial else (own.out, own.lse)
    q, kv = views
    chosen = own.q if q is None else inputs[0], own.k if kv is None else inputs[1], own.v if kv is None else inputs[2]
    return [*chosen, *results]


def _restored(
    call: Call, part: Part, saved: Sequence[Any], out: Tensor, lse: Tensor, slopes: Tensor | None
) -> PartTensors:
    """A part's tensors, from the saved ones."""
    q, k, v, own_out, own_lse = saved
    q_rows, kv_rows = call.recipe.widths[part.width].views
    if q_rows is not None:
        q = some_of(q, q_rows)
    if kv_rows is not None:
        k, v = some_of(k, kv_rows), some_of(v, kv_rows)
    if part.q.trivial:
        own_out, own_lse = leading(out, part.q.rows), leading(lse, part.q.rows, 1)
    return PartTensors(q, k, v, own_out, own_lse, call.blocks(part, slopes))


def _fake(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, ...]:
    if any(x.dim() != 3 for x in (q, k, v)):
        raise ValueError(f"q, k, v must be packed [rows, heads, dim], got {[list(x.shape) for x in (q, k, v)]}")
    return fake_results(q, v.shape[2], scored=more[-2])


def fake_results(q: Tensor, v_dim: int, *, scored: bool) -> tuple[Tensor, ...]:
    """Output, lse, and the largest scores if they are asked for, without values."""
    (rows, heads, _), acc = q.shape, acc_dtype(q.dtype)
    top = q.new_empty(heads, dtype=acc) if scored else q.new_empty(0)
    return q.new_empty(rows, heads, v_dim), q.new_empty(heads, rows, dtype=acc), top


ATTENTION = CollectiveOp(
    "attention",
    _run,
    _fake,
    tensors="Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes",
    options=OPTIONS,
    results=RESULTS,
    back=_back,
    reads_results=True,
)
