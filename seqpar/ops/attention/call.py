"""One attention call: its name in messages, and this rank's steps, shares of heads and facts."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Tag
from seqpar.comm.header import hash63
from seqpar.facts.value import Ints
from seqpar.kernels import CallSpec, Kernel, Score, StepFacts, acc_dtype, choose
from seqpar.kernels.memory.upload import UploadBuffer, upload
from seqpar.ops.attention.rows import UploadedSteps, numbers
from seqpar.ops.attention.signature import Signature
from seqpar.ops.core.agreement import digest_of_call, plan_fact, plan_key
from seqpar.ops.core.collective_op import Record
from seqpar.ops.core.device import stream_of
from seqpar.plan import Part, Plan, Step, StepBand, head_blocks, head_share, replicated


class Phase(IntEnum):
    """The parts of a call that exchange messages, in order."""

    ENTER = 0
    KEYS = 1
    LEAVE = 2
    LARGEST = 3
    BACK_ENTER = 4
    BACK_KEYS = 5
    BACK_GRADS = 6
    BACK_LEAVE = 7


PHASES = len(Phase)
# for errors
NAMES = {
    Phase.ENTER: "attention (forward, tokens to heads)",
    Phase.KEYS: "attention (forward, keys and values)",
    Phase.LEAVE: "attention (forward, heads to tokens)",
    Phase.LARGEST: "attention (forward, the largest scores)",
    Phase.BACK_ENTER: "attention (backward, tokens to heads)",
    Phase.BACK_KEYS: "attention (backward, keys and values)",
    Phase.BACK_GRADS: "attention (backward, gradients of keys and values)",
    Phase.BACK_LEAVE: "attention (backward, heads to tokens)",
}

Shares = tuple[list[slice], list[slice]]  # query heads and key heads of every member of a part
Views = tuple[slice | None, slice | None]
Heads = slice | None  # of a part's tensors; None for all, which need no view of their own
HeadBlock = tuple[Heads, Heads, slice]  # query heads and key heads inside, and the query heads outside
ScoredBlock = tuple[Heads, Heads, Score]


@dataclass(frozen=True, eq=False, slots=True)
class PartRecipe:
    """This rank's heads in a part, by its Ulysses width.

    shares: the heads of every member. blocks: of this rank's heads; in a block every key head serves the same number of
    query heads. key_heads: the number of key heads of its share. views: the rows of q, and of k and v, that the part's
    tensors are views of (None if they have their own memory). several: whether several shares read the same key head.
    """

    shares: Shares
    blocks: list[HeadBlock]
    key_heads: int
    views: Views
    several: bool

    @classmethod
    def of(cls, part: Part, heads: int, kv_heads: int) -> PartRecipe:
        """The recipe of a part. heads, kv_heads: the number of query heads and of key heads of the whole call."""
        pairs = [head_share(heads, kv_heads, part.width, share) for share in range(part.width)]
        q, kv = pairs[part.share]
        cut = head_blocks(q, kv, heads // kv_heads) if q.stop > q.start else []
        blocks: list[HeadBlock] = [(a, b, slice(q.start + a.start, q.start + a.stop)) for a, b in cut]
        if len(cut) == 1:
            blocks = [(None, None, q)]
        return cls(
            shares=([own for own, _ in pairs], [own for _, own in pairs]),
            blocks=blocks,
            key_heads=kv.stop - kv.start,
            views=_views(part),
            several=replicated(heads, kv_heads, part.width),
        )

    def specs(self, spec: CallSpec) -> set[CallSpec]:
        """The kernel's view of each block of this rank's heads, from that of the whole call."""
        counts = [(q.stop - q.start, self.key_heads if kv is None else kv.stop - kv.start) for _, kv, q in self.blocks]
        return {replace(spec, heads=heads, kv_heads=kv_heads) for heads, kv_heads in counts}


@dataclass(frozen=True, eq=False)
class Recipe:
    """A call's plan and signature, worked out for one rank: once, for all layers and both directions.

    kind: the key under which ranks remember the kernels that "auto" passes over; None if no machine matters. acc: the
    accumulation dtype. backward_steps: the steps, widest part first. keys: of the plan and the signature, under which
    ranks remember that they agreed. rows: of this rank's queries and keys. widths: the parts' recipes, by their Ulysses
    width. stamp: of the plan and what else results depend on. slot, entry_slot: elements of the largest buffer of
    received keys, and of keys that enter a node. alone: the rank computes its rows in one step from its own keys,
    without a schedule or an exchange. trades: whether any heads are traded.
    """

    kernel: Kernel
    kind: int | None
    acc: torch.dtype
    facts: Mapping[str, object]
    keys: tuple[int, int]
    digest: int
    stamp: int
    steps: list[Step]
    backward_steps: list[Step]
    parts: list[Part]
    rows: tuple[int, int]
    widths: Mapping[int, PartRecipe]
    slot: int
    entry_slot: int
    alone: bool
    trades: bool


def recipe_of(plan: Plan, rank: int, signature: Signature, passed_over: Collection[str] = ()) -> Recipe:
    """The recipe of a call. passed_over: kernels that "auto" must not take.

    Raises: ValueError for an unknown kernel; NotImplementedError if no kernel can do the call, and for ALiBi where keys
    end early.
    """
    s = signature
    if s.slopes and plan.mask.has_until:
        raise NotImplementedError(
            f"alibi_slopes: keys of {plan.mask!r} end early, and places in the batch are not distances along a path; "
            "leave the slopes out, and turn q and k by the angles of plan.rope_positions(rank)"
        )
    spec = s.spec(plan)
    kernel = choose(s.kernel, spec, passed_over)
    # what "auto" takes on CUDA depends on the machine, so ranks agree on it separately
    local = s.kernel == "auto" and spec.device == "cuda" and plan.ranks > 1
    facts = s.facts("auto" if local else kernel.name)
    conditions = {"merges": spec.merges, "few_shapes": spec.few_shapes, "until": spec.until}
    whole = {"plan": plan_fact(plan), **facts}
    row_bytes = plan.row_bytes(s.heads, s.kv_heads, *s.wire, s.dtype.itemsize)
    steps = plan.steps(rank, row_bytes=row_bytes)
    parts = [step.part for step in steps if step.first]
    backward_steps = [step for part in reversed(parts) for step in steps if step.part is part]
    widths = {part.width: PartRecipe.of(part, s.heads, s.kv_heads) for part in parts}
    step, *more = steps
    size = {width: part.key_heads * sum(s.wire) for width, part in widths.items()}  # elements of a row
    return Recipe(
        kernel=kernel,
        kind=digest_of_call("kernels of attention", {**facts, **conditions}) if local else None,
        acc=acc_dtype(s.dtype),
        facts=whole,
        keys=(plan_key(plan), digest_of_call(s.verb, facts)),
        digest=digest_of_call(s.verb, whole),
        stamp=hash63((plan.digest(), s.function())),
        steps=steps,
        backward_steps=backward_steps,
        parts=parts,
        rows=(plan.rows(rank), plan.rows(rank, "kv")),
        widths=widths,
        slot=max((len(step.pos) * size[step.part.width] for step in steps if not step.own_alone), default=0),
        entry_slot=max((step.entry.rows * size[step.part.width] for step in steps if step.entry), default=0),
        alone=(plan.ranks == 1 or step.local and not step.moves) and step.part.trivial and not any(map(is_used, more)),
        trades=any(part.width > 1 for part in parts),
    )


def is_used(step: Step) -> bool:
    """Whether a rank computes or moves anything in a step; later steps may concern other ranks only."""
    return step.first or len(step.pos) > 0 or step.moves or bool(step.grad_sends or step.grad_recvs or step.carry_rows)


def _views(part: Part) -> Views:
    q, kv = part.q.local, part.kv.local
    alone = part.width == 1
    return q if alone and isinstance(q, slice) else None, kv if alone and isinstance(kv, slice) else None


@dataclass(eq=False)
class Call(Record):
    """One attention call, without its tensors. The tag's digest and number are in every message of it.

    uploaded: the steps' row numbers and facts on the device, present once forward begins.
    """

    plan: Plan
    signature: Signature
    recipe: Recipe
    seed: int  # of dropout, or 0
    uploaded: UploadedSteps = field(init=False)

    @property
    def name(self) -> str:
        """The call in messages."""
        return f"{self.tag.name}, call {self.tag.call}"

    def message(self, phase: Phase, stage: int) -> Tag:
        """The tag of one of its exchanges; repeated backward passes have their own numbers."""
        repeat = max(0, self.passes - 1)
        return Tag(self.tag.digest, self.tag.call, phase + PHASES * repeat, stage, NAMES[phase])

    def blocks(self, part: Part, slopes: Tensor | None) -> list[ScoredBlock]:
        """Blocks of this rank's heads: inside query heads, inside key heads, their score. slopes: of all heads."""
        s, blocks = self.signature, []
        for heads, kv, outside in self.recipe.widths[part.width].blocks:
            own = None if slopes is None else slopes[outside].detach().to(self.recipe.acc).contiguous()
            blocks.append((heads, kv, Score(s.scale, s.softcap, own, s.dropout_p, self.seed, outside.start)))
        return blocks


@dataclass(eq=False)
class PartTensors:
    """The tensors of one part inside the head trade: the inputs of backward, and the sum in progress.

    blocks: of this rank's heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor  # [M, h, D_v]
    lse: Tensor  # [h, M]
    blocks: list[ScoredBlock]
    acc: Tensor | None = None  # out in the accumulation dtype, if there are several steps
    top: Tensor | None = None  # [h, M] each row's largest scores, if they are returned


def uploaded(plan: Plan, steps: Sequence[Step], device: torch.device) -> UploadedSteps:
    """The row numbers and facts of a rank's steps on a device, uploaded in one transfer and freed with the plan.

    The first layer of a batch uploads them.

    On CUDA each stream has its own copy: another stream would have to wait for the transfer, and its readers would have
    to finish before the memory is freed.
    """
    where = stream_of(device)
    # not cached with the steps, which it refers to: a cycle would hold device memory until garbage collection
    return plan.memo(("uploaded", id(steps), where), lambda: _uploaded(plan, steps, device, where))  # type: ignore[no-any-return]


@dataclass(frozen=True, eq=False)
class PlanUpload:
    """Everything of a rank's steps that goes to a device, ready for one transfer.

    ids: of the arrays of row numbers and facts. tables: of tiles, after those: the band of a step, the key in its
    memory, and the value with tensors of the host.
    """

    ids: list[int]
    tables: list[tuple[StepBand, Hashable, Any]]
    buffer: UploadBuffer


def prepare(plan: Plan, recipe: Recipe, signature: Signature) -> None:
    """Pack all that calls with this signature upload, so that `uploaded` makes one transfer; in any thread."""
    device = signature.device
    plan.memo(("prepared", id(recipe.steps), device.type), lambda: _prepared(recipe, signature.spec(plan), device))


def _prepared(recipe: Recipe, spec: CallSpec, device: torch.device) -> PlanUpload:
    arrays, tables = _arrays(recipe.steps), []
    for step in recipe.steps:
        if len(step.pos) or step.first or step.last:
            rows, keys = (torch.empty(len(x), dtype=torch.int32, device="cpu") for x in (step.part.pos, step.pos))
            for band in step.bands:
                until = None if band.until is None else keys
                facts = StepFacts(rows, rows, rows, keys, until, band.tiles, lambda: None, band.memo)
                made: dict[Hashable, Any] = {}
                for own in recipe.widths[step.part.width].specs(spec):
                    made |= recipe.kernel.tables(own, facts)
                tables += [(band, key, value) for key, value in made.items()]
    several = [*arrays.values(), *(x.numpy() for *_, value in tables for x in _tensors_of(value))]
    return PlanUpload(list(arrays), tables, UploadBuffer(several, device))


def _tensors_of(value: Any) -> list[Tensor]:
    return [x for x in (value if isinstance(value, tuple) else [value]) if isinstance(x, Tensor)]


def _arrays(steps: Sequence[Step]) -> dict[int, Ints]:
    """Row numbers and facts by the ids of their arrays, which the steps keep alive."""
    arrays = {id(x): x for x in numbers(steps)}
    for step in steps:
        arrays |= {id(x): x for x in (step.part.pos, step.pos)}
        for band in step.bands:
            arrays |= {id(x): x for x in (band.lo, band.hi, band.until) if x is not None}
    return arrays


def _uploaded(plan: Plan, steps: Sequence[Step], device: torch.device, where: Hashable) -> UploadedSteps:
    prepared: PlanUpload | None = plan.known(("prepared", id(steps), device.type))
    if prepared is None:
        arrays = _arrays(steps)
        on_device = dict(zip(arrays, upload(list(arrays.values()), device), strict=True))
    else:
        sent = iter(prepared.buffer.sent(device))
        on_device = dict(zip(prepared.ids, sent, strict=False))
        for band, key, value in prepared.tables:
            tensors = [next(sent) for _ in _tensors_of(value)]
            table = (*tensors, *value[len(tensors) :]) if isinstance(value, tuple) else tensors[0]
            band.memo((where, key), lambda table=table: table)

    def facts(band: StepBand) -> StepFacts:
        pos, lo, hi, key_pos = (on_device[id(x)] for x in (band.at, band.lo, band.hi, band.pos))
        until = None if band.until is None else on_device[id(band.until)]

        def memo(key: Hashable, make: Any) -> Any:
            return band.memo((where, key), make)

        return StepFacts(pos, lo, hi, key_pos, until, band.tiles, lambda: band.segments, memo)

    return UploadedSteps(on_device, steps, facts)
