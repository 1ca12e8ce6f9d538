"""A forward of a parallel model with a cache that is split over its ranks. All ranks have the same tokens.

Many new tokens, as of a prompt, are shared out under a plan, like a batch; each rank keeps the keys of its rows. Up to
`FEW` new tokens of a sequence are computed on every rank (`seqpar.integrations.hf.cache`). The shape of ``input_ids``
decides, so all ranks decide alike::

    tokens ──► compared in one message ──► many: rows of this rank ──► model ──► hidden rows that have logits, gathered
                                       └─► few:  all of them ──► model, with parts of attention merged in each layer

Every rank then computes the same logits of the same hidden rows, so that all take the same next token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from seqpar.comm import Comm
from seqpar.comm.header import hash63
from seqpar.facts.mask import Mask
from seqpar.facts.past import Past
from seqpar.facts.value import Ints
from seqpar.integrations.hf.cache import TOGETHER, CacheStep, ShardedCache
from seqpar.integrations.hf.forward import Forward, during
from seqpar.integrations.hf.mask import Rule, blocks_of, rule_of
from seqpar.integrations.hf.recurrent.states import MixerStates, rows_at
from seqpar.ops.core.agreement import gathering, plan_fact
from seqpar.parallel import surround
from seqpar.plan import Plan

FEW = 16  # new tokens of a sequence that every rank computes
TAKEN = ("input_ids", "attention_mask", "position_ids", "use_cache", "logits_to_keep", "return_dict")
TOKENS = "tokens"  # the fact by which ranks compare ids; see `seqpar.comm.protocol.HINTS`

Gather = Callable[..., list[Any]]


class Turn(NamedTuple):
    """New tokens and what becomes of them on this rank.

    given: arguments of the model's own forward. plan: of tokens that are shared out. kept: the last columns whose
    logits are asked for; real [B, S]: which tokens are no padding.
    """

    step: CacheStep
    given: dict[str, Any]
    plan: Plan | None
    new: Ints
    real: Any
    kept: int
    facts: dict[str, object]


def cached_forward(
    model: PreTrainedModel, last: torch.nn.Module, before: Callable[..., Any], cache: ShardedCache,
    arguments: Mapping[str, Any], check: Callable[[], None], plans: Callable[[Ints], Plan], gather: Gather,
) -> Any:  # fmt: skip
    """The output of a model's own forward for all sequences, on every rank. A collective.

    last: the base model, whose output the head reads. before: the model's own forward. check: of the model and the
    cache. plans: of documents' lengths. gather: compares facts and weights of ranks.
    """
    what, comm = f"{type(model).__name__}.forward with a cache", cache.comm
    facts: dict[str, object] = {}
    with gathering(what, comm, partial(gather, what, facts=facts, hint=TOGETHER)):
        check()
        turn = _turn(model, cache, arguments, plans)
        facts |= turn.facts
    cache.begin(turn.step)
    with torch.no_grad():
        out = _few(before, cache, turn) if turn.plan is None else _shared(last, before, cache, turn, turn.plan)
    cache.commit(turn.real.shape[1])
    return out


def _turn(
    model: PreTrainedModel, cache: ShardedCache, arguments: Mapping[str, Any], plans: Callable[[Ints], Plan]
) -> Turn:
    """The tokens of a call. Raises: NotImplementedError and ValueError naming what is not served."""
    _check(model, arguments)
    comm, ids = cache.comm, arguments["input_ids"]
    b, s = ids.shape
    past = cache.past or Past(b, comm.size)
    if past.sequences != b:
        raise ValueError(f"input_ids has {b} sequences, and the cache {past.sequences}; make a new one, or reset() it")
    real = _real(arguments.get("attention_mask"), past, cache.columns, b, s)
    new, tokens = real.sum(1), ids.cpu().numpy()
    if not new.any():
        raise ValueError("attention_mask masks all new tokens; give each turn a token")
    positions = arguments.get("position_ids")
    if positions is None:
        positions = (torch.arange(s, device=ids.device) + cache.columns)[None]
    if positions.dim() != 2 or positions.shape[1] != s:
        raise ValueError(f"position_ids has the shape {list(positions.shape)}, expected [B, S] = {[b, s]}")
    positions = positions.expand(b, s)
    kept = arguments.get("logits_to_keep", 0)
    if not isinstance(kept, int) or kept < 0:
        raise NotImplementedError(f"logits_to_keep={kept!r:.200} with a cache, expected a number of columns")
    facts: dict[str, object] = {
        "sequences and columns": [b, s],
        TOKENS: (*tokens[:4, -1].tolist(), hash63((tokens.tobytes(), real.tobytes()))),
        "cache": past.digest(), "columns of the cache": cache.columns, "logits_to_keep": kept,
    }  # fmt: skip
    at = np.flatnonzero(real.ravel())
    device = ids.device
    states_of = partial(MixerStates, cache.states, real)
    step_of = partial(CacheStep.of, earlier=past, rank=comm.rank, tokens=new, device=device)
    if s <= FEW:
        after = past.kept(new)
        mine = (after.counts() - past.counts())[comm.rank] > 0
        owned = np.flatnonzero(np.repeat(mine, new))
        seen = np.where(real, past.lengths()[:, None] + np.cumsum(real, 1) - 1, -1)
        given = {"input_ids": ids, "position_ids": positions, "logits_to_keep": kept}
        step = step_of(after, states_of(None, cache.alone), owned=owned, source=at[owned], seen=seen)
        return Turn(step, given, None, new, real, kept or s, facts)
    base, plan, after = _planned(past, new, plans, comm)
    facts["plan"] = plan_fact(plan)
    rows = plan.positions(comm.rank)
    source = np.argsort(np.where(rows < 0, plan.layout.total, rows), kind="stable")[: plan.layout.tokens(comm.rank)]
    packed = torch.from_numpy(np.where(rows < 0, -1, at[rows])).to(device)
    given = {name: torch.where(packed < 0, 0, x.flatten()[packed.clamp(min=0)])[None]
             for name, x in (("input_ids", ids), ("position_ids", positions))}  # fmt: skip
    step = step_of(after, states_of(base, comm), owned=rows[source], source=source, seen=None)
    return Turn(step, given, plan, new, real, kept or s, facts)


def _check(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    who = type(model).__name__
    if model.training:
        raise NotImplementedError(f"{who} with a cache in training; call eval() before, and train() after generation")
    unknown = sorted(n for n, x in arguments.items() if n not in TAKEN and x is not None and x is not False)
    if unknown:
        raise NotImplementedError(
            f"{who} got {', '.join(unknown)} with a cache that is split over ranks, supported are {', '.join(TAKEN)}; "
            "leave it out, or generate on each rank, without cache=handle.cache()"
        )
    ids = arguments.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        got = list(ids.shape) if isinstance(ids, Tensor) else ids
        raise ValueError(f"{who} with a cache expects input_ids [B, S], got {got!r:.200}")
    if arguments.get("use_cache") is False:
        raise ValueError(f"{who} got a cache and use_cache=False; leave one of them out")


def _real(mask: Any, past: Past, columns: int, b: int, s: int) -> Any:
    """Which new tokens are no padding, [B, S]. Raises ValueError for a mask that has other earlier tokens."""
    if mask is None:
        return np.ones((b, s), bool)
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape != (b, columns + s):
        got = list(mask.shape) if isinstance(mask, Tensor) else mask
        raise ValueError(
            f"attention_mask is {got!r:.200}, expected [B, S] = {[b, columns + s]} of 0 and 1, with the {columns} "
            "columns that the cache holds"
        )
    whole = mask.cpu().numpy() != 0
    if (whole[:, :columns].sum(1) != past.lengths()).any():
        raise ValueError(
            f"attention_mask has {whole[:, :columns].sum(1).tolist()!r:.99} earlier tokens, and the cache "
            f"{past.lengths().tolist()!r:.99}; give the mask of all turns"
        )
    return whole[:, columns:]


def _planned(past: Past, new: Ints, plans: Callable[[Ints], Plan], comm: Comm) -> tuple[Plan, Plan, Past]:
    """The plans of many new tokens alone and over all keys, and the past with them.

    Raises: ValueError for a plan that does not fit.
    """
    lengths = new[new > 0]
    base = plans(lengths)
    if not isinstance(base, Plan) or base.ranks != comm.size or base.mask != Mask(lengths):
        raise ValueError(f"plan must return a Plan of causal documents on {comm.size} ranks, got {base!r:.200}")
    after = past.after(new, base.layout)
    if not past.lengths().any():
        return base.padded(), base.padded(), after
    return base.padded(), Plan(
        after.mask(new), base.layout, kv_layout=after.kv_layout(), ulysses=base.ulysses, transport=base.transport,
        node=base.node, stage_bytes=base.stage_bytes, rows=np.maximum(base.layout.sizes(), 1).tolist(),
    ), after  # fmt: skip


def checked(rule: Rule) -> Rule:
    """A layer's rule. Raises: NotImplementedError for one that is not causal, or causal in a window."""
    if not rule.causal or rule.block or rule.chunk is not None or (rule.left or 0) < 0:
        raise NotImplementedError(
            f"a layer sees keys by {rule}, and a cache that is split over ranks serves causal layers and windows; "
            "generate on each rank, without cache=handle.cache()"
        )
    return rule


def _few(before: Callable[..., Any], cache: ShardedCache, turn: Turn) -> Any:
    """The output with all new tokens computed on every rank."""

    def note(function: Callable[..., Any], mask: Tensor | None, config: Any) -> Rule:
        rule = rule_of(function)
        return checked(rule if blocks_of(function) is None else rule._replace(block="whole"))

    with during(Forward(note=note, attend=cache.attend, states=turn.step.states)):
        return before(cache=cache, use_cache=True, return_dict=True, **turn.given)


def _shared(last: torch.nn.Module, before: Callable[..., Any], cache: ShardedCache, turn: Turn, plan: Plan) -> Any:
    """The output with new tokens shared out, for the columns that are kept."""
    after, real, comm = turn.step.past, turn.real, cache.comm

    def make(around: Plan, rule: Rule, ids: Tensor | None) -> Plan:
        return around.with_mask(after.mask(turn.new, window=(checked(rule).left, None)))

    def gathered(module: Any, args: Any, out: Any) -> Any:
        hidden = out[0][0]
        packed = np.cumsum(real.ravel()).reshape(real.shape) - 1
        wanted = packed[:, -turn.kept :][real[:, -turn.kept :]]
        result = hidden.new_zeros(real.shape[0], min(turn.kept, real.shape[1]), hidden.shape[1])
        if wanted.size:
            where = torch.from_numpy(real[:, -turn.kept :]).to(hidden.device)
            result[where] = rows_at(hidden, plan, comm, wanted)
        out["last_hidden_state"] = result
        return out

    hook = last.register_forward_hook(gathered)
    try:
        with surround(plan, comm), during(Forward(make, states=turn.step.states)):
            return before(cache=cache, use_cache=True, return_dict=True, **turn.given)
    finally:
        hook.remove()
