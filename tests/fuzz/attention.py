"""Random calls of attention: products of all that it takes, and ranks that differ in one thing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

import seqpar
from seqpar.comm import Comm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.plan import TRANSPORTS, Plan
from seqpar.testing import dense_attention
from tests.cases import LAYOUTS, MASKS, Case, divisors
from tests.fuzz.outcome import Left, World, Wrong, compare, ends, is_ours, refused
from tests.ops.cases import MIXED, inputs, joined, poisoned

HEADS = ((4, 4), (4, 2), (6, 1), (5, 5), (3, 1), (7, 7), (6, 3), (1, 1))
DIMS = ((8, 8), (4, 4), (6, 4), (1, 3), (16, 16), (5, 5), (8, 8))
KERNELS = ("auto", "auto", "auto", "auto", "aten", "native", "blockwise", "reference")
NAMES = ("q", "k", "v", "sinks")


@dataclass(frozen=True)
class Attention:
    """One call on every rank. forms: what each rank's loss uses. needs: which of `NAMES` require a gradient."""

    seed: int
    plan: Case
    world: World
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    kernel: str
    softcap: float
    sinks: bool
    alibi: bool
    dropout: float
    scale: float | None
    deterministic: bool
    return_lse: bool
    forms: tuple[str, ...]
    needs: tuple[bool, ...]
    grad: bool
    passes: int
    strided: bool
    misuse: str | None = None
    culprit: int = 0

    def tensors(self) -> list[Tensor]:
        """Sinks and slopes, in float64."""
        h = self.heads[0]
        return [torch.linspace(-1, 2, h, dtype=torch.float64), torch.logspace(-3, 0, h, base=2, dtype=torch.float64)]


def drawn(draw: Random, seed: int) -> Attention:
    """A random call."""
    ranks = draw.choice((1, 2, 2, 3, 4, 4, 6))
    ulysses = draw.choice(divisors(ranks))
    long = draw.random() < 0.25  # segments that a library takes
    most = 70 if long else 13
    case = Case(
        draw.choice(MASKS), draw.choice(LAYOUTS), draw.choice(TRANSPORTS), ranks, ulysses,
        tuple(draw.randint(1, most) for _ in range(draw.randint(1, 2 if long else 5))), draw.randrange(2**16),
        mixed=draw.random() < 0.3, stage_bytes=draw.choice((1, 3 * 4096, 64 << 20)), pads=draw.random() < 0.4,
        node=draw.choice([None, *(d for d in divisors(ranks) if d % ulysses == 0)]),
    )  # fmt: skip
    world = World(ranks, draw.choice((0.0, 0.0, 0.0005)), draw.random() < 0.5, draw.choice(("call", "batch")))
    return_lse = draw.random() < 0.5
    made = Attention(
        seed, case, world, draw.choice(HEADS), draw.choice(DIMS),
        draw.choice((torch.float64,) * 6 + (torch.float32, torch.float32, torch.bfloat16, torch.float16)),
        draw.choice(KERNELS), draw.choice((0.0, 0.0, 0.0, 1.5)), draw.random() < 0.25, draw.random() < 0.25,
        draw.choice((0.0, 0.0, 0.0, 0.3)), draw.choice((None, None, None, 0.37, 0.0, -0.5)), draw.random() < 0.7,
        return_lse, tuple(draw.choice(MIXED) if return_lse else "out" for _ in range(ranks)),
        tuple(draw.random() < 0.8 for _ in NAMES), draw.random() < 0.9, draw.choice((1, 1, 1, 2)), draw.random() < 0.3,
    )  # fmt: skip
    if ranks > 1 and draw.random() < 0.4:
        made = replace(made, misuse=draw.choice([*MISUSES, *PROGRAMS, *AGAIN]), culprit=draw.randrange(ranks))
    return made


Call = dict[str, Any]


def put(name: str, value: Any) -> Callable[[Call], Call]:
    return lambda call: call | {name: value}


def on(names: str, change: Callable[[Tensor], Any]) -> Callable[[Call], Call]:
    return lambda call: call | {name: change(call[name]) for name in names}


def other_plan(**changes: Any) -> Callable[[Call], Call]:
    def change(call: Call) -> Call:
        plan: Plan = call["plan"]
        made = {"mask": plan.mask, "layout": plan.layout, "transport": plan.transport} | changes
        kv = plan.kv_layout if plan.mask.tokens != plan.mask.kv_tokens else None
        rows = [plan.rows(rank) for rank in range(plan.ranks)]
        return call | {"plan": Plan(made["mask"], made["layout"], kv_layout=kv, transport=made["transport"], rows=rows)}

    return change


def other_mask(call: Call) -> Call:
    mask: Mask = call["plan"].mask
    lo, hi = mask.bounds(np.arange(mask.tokens))
    return call | {"plan": call["plan"].with_mask(Mask.from_bounds(lo * 0, hi, kv_tokens=mask.kv_tokens))}


MISUSES: dict[str, Callable[[Call], Call]] = {
    "dtype": on("qkv", lambda x: x.detach().to(torch.float32 if x.dtype != torch.float32 else torch.float64)),
    "one dtype": on("k", lambda x: x.detach().half()),
    "gradient of q": on("q", lambda x: x.detach().requires_grad_(not x.requires_grad)),
    "gradient of k and v": on("kv", lambda x: x.detach().requires_grad_(not x.requires_grad)),
    "scale": put("scale", 0.71),
    "softcap": put("softcap", 2.5),
    "dropout": lambda call: call | {"dropout_p": 0.5, "dropout_seed": 3},
    "seed": put("dropout_seed", 99),
    "no seed": put("dropout_seed", None),
    "sinks": lambda call: call | {"sinks": None if call["sinks"] is not None else torch.zeros(call["q"].shape[1])},
    "values of sinks": lambda call: call | {"sinks": None if call["sinks"] is None else call["sinks"].detach() + 1},
    "slopes": put("alibi_slopes", [0.5, 0.25]),
    "return_lse": lambda call: call | {"return_lse": not call["return_lse"]},
    "deterministic": lambda call: call | {"deterministic": not call["deterministic"]},
    "kernel": put("kernel", "reference"),
    "no kernel": put("kernel", "cutlass"),
    "accuracy": put("accuracy", "fast"),
    "transport": other_plan(transport="gather"),
    "mask": other_mask,
    "layout": lambda call: other_plan(layout=Layout.striped(call["plan"].layout.total, call["plan"].ranks))(call),
    "no plan": put("plan", None),
    "no comm": put("comm", "x"),
    "rows": on("q", lambda x: x[1:]),
    "keys": on("kv", lambda x: torch.cat([x, x])),
    "heads": on("q", lambda x: x[:, :0]),
    "more heads": on("kv", lambda x: x.repeat(1, 4, 1)),
    "numpy": on("v", lambda x: x.detach().float().numpy()),
    "none": put("q", None),
    "four dims": on("q", lambda x: x[None]),
    "text": put("scale", "large"),
    "nan": put("softcap", float("nan")),
}

# programs that one rank runs in another order, or not to its end
PROGRAMS = ("grad mode", "other verb first", "left before", "left before backward", "twice", "backward order")
# what one rank does otherwise in a second call, when in batch mode ranks compare no more what they have agreed on
LATER = (
    "dtype", "gradient of q", "gradient of k and v", "scale", "softcap", "sinks", "return_lse", "deterministic",
    "kernel", "transport", "mask", "layout", "rows", "none",
)  # fmt: skip


AGAIN = {f"{name}, later": name for name in LATER}


def program(case: Attention, plan: Plan, comm: Comm) -> dict[str, Tensor]:
    """A rank's results by name, as far as it came."""
    odd = case.misuse if case.misuse is not None and comm.rank == case.culprit else None
    call = arguments(case, plan, comm)
    if odd == "left before":
        raise Left
    if case.misuse in AGAIN:
        attend(case, arguments(case, plan, comm))
    if odd in MISUSES or odd in AGAIN:
        call = MISUSES[AGAIN.get(odd, odd)](call)
    if case.misuse == "other verb first" and odd:
        seqpar.switch(torch.zeros(comm.size, 1), comm, split_dim=0, concat_dim=1)
    if odd == "twice":
        attend(case, call)
    with torch.no_grad() if odd == "grad mode" or not case.grad else nullcontext():
        out, lse = attend(case, call)
    if case.misuse == "other verb first" and not odd:
        seqpar.switch(torch.zeros(comm.size, 1), comm, split_dim=0, concat_dim=1)
    reached = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
    if odd == "left before backward":
        raise Left
    if case.misuse == "backward order":
        with torch.set_grad_enabled(case.grad):
            again = attend(case, call)
        for results in ((out, lse), again) if odd else (again, (out, lse)):
            back(case, plan, comm, *results, 1)
    else:
        back(case, plan, comm, out, lse, case.passes)
    comm.agree("the end", {})  # which a rank may still have to reach
    leaves = {f"d{name}": call[name] for name in NAMES if isinstance(call[name], Tensor) and call[name].is_leaf}
    return reached | {name: x.grad for name, x in leaves.items() if x.grad is not None}


def arguments(case: Attention, plan: Plan, comm: Comm) -> Call:
    """A rank's arguments, with NaN in pad rows."""
    whole = [x.to(case.dtype) for x in inputs(plan, case.heads, case.dims, case.seed)[:3]]
    mine = [poisoned(x, plan, comm.rank, side) for x, side in zip(whole, ("q", "kv", "kv"), strict=True)]
    if case.strided:
        mine = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in mine]
    sinks, slopes = case.tensors()
    call: Call = dict(zip("qkv", mine, strict=True)) | {"sinks": sinks if case.sinks else None}
    for name, needed in zip(NAMES, case.needs, strict=True):
        if call[name] is not None:
            call[name].requires_grad_(needed)
    return call | {
        "plan": plan, "comm": comm, "scale": case.scale, "softcap": case.softcap, "dropout_p": case.dropout,
        "dropout_seed": 1234567890123 if case.dropout else None, "alibi_slopes": slopes if case.alibi else None,
        "deterministic": case.deterministic, "kernel": case.kernel, "return_lse": case.return_lse,
    }  # fmt: skip


def attend(case: Attention, call: Call) -> tuple[Tensor, Tensor | None]:
    named = dict(call)
    tensors = [named.pop(name) for name in ("q", "k", "v", "plan", "comm")]
    result = seqpar.attention(*tensors, **named)
    return result if named["return_lse"] else (result, None)


def back(case: Attention, plan: Plan, comm: Comm, out: Tensor, lse: Tensor | None, passes: int) -> None:
    """Backward of this rank's loss, without what pads and rows that see nothing hold."""
    dout, dlse = (poisoned(x, plan, comm.rank, "q") for x in inputs(plan, case.heads, case.dims, case.seed)[3:])
    pads = torch.from_numpy(plan.positions(comm.rank)) < 0
    losses = {"out": (out.double() * dout).masked_fill(pads[:, None, None], 0.0).sum()}
    if lse is not None:
        losses["lse"] = (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).masked_fill(pads[:, None], 0.0).sum()
        losses["both"] = losses["out"] + losses["lse"]
    loss = losses[case.forms[comm.rank] if lse is not None else "out"]
    for n in range(passes if loss.requires_grad else 0):
        loss.backward(retain_graph=n + 1 < passes)


def expected(case: Attention, plan: Plan) -> dict[str, Tensor]:
    """One device's results in float64, of the inputs as they were rounded."""
    *whole, dout, dlse = inputs(plan, case.heads, case.dims, case.seed)
    sinks, slopes = case.tensors()
    leaves = [x.to(case.dtype).double().requires_grad_() for x in whole] + [sinks.requires_grad_()]
    out, lse = dense_attention(
        *leaves[:3], plan.mask, scale=case.scale, softcap=case.softcap, sinks=sinks if case.sinks else None,
        alibi_slopes=slopes if case.alibi else None, dropout_p=case.dropout, dropout_seed=1234567890123,
    )  # fmt: skip
    for rank, form in enumerate(case.forms):
        at = torch.from_numpy(plan.layout.positions(rank))
        dout[at] *= form != "lse"
        dlse[at] *= form != "out"
    loss = (out * dout).sum() + (lse.masked_fill(lse == -torch.inf, 0.0) * dlse).sum()
    passes = 2 if case.misuse == "backward order" else case.passes
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    named = {f"d{n}": torch.zeros_like(x) if g is None else passes * g for n, x, g in zip(NAMES, leaves, grads)}
    return {"out": out.detach(), "lse": lse.detach()} | named


def judge(case: Attention) -> str:
    """How the case ends. Raises: Wrong."""
    try:
        plan = case.plan.plan()
    except Exception as error:
        if is_ours(error):
            return f"refused: {error}"
        raise Wrong(f"the plan ended in {type(error).__name__}: {error}") from error
    results = ends(case.world, lambda comm: program(case, plan, comm))
    why = refused(results, by_all=case.misuse is None)
    if why is not None or any(end.value is None for end in results):
        return f"refused: {why}"
    compare(collected([end.value for end in results], plan), expected(case, plan), case.dtype)
    return "right"


def collected(results: list[dict[str, Tensor]], plan: Plan) -> dict[str, Tensor]:
    """Ranks' rows put together, and shares of the sinks' gradient summed: of what every rank has."""
    whole = {}
    for name in set.intersection(*map(set, results)):
        shards = [result[name] for result in results]
        if name == "dsinks":
            whole[name] = torch.stack(shards).sum(0)
            continue
        whole[name] = joined(shards, plan.kv_layout if name in ("dk", "dv") else plan.layout)
    return whole
