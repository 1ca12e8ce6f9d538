"""`share` and `back`: rows move from the rank that loaded them to the rank that computes them, and results return.

There are three stages, so that `prefetch` can run the second in a thread: all ranks announce their batches (`union`),
the union's documents are planned, and the rows move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.data.batch import MTP_LABELS, Reading, taken
from seqpar.data.rows import POSITIONS, BatchShape
from seqpar.data.union import BatchUnion, announce
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Ints, Memo, cached, digest_of
from seqpar.ops import relayout, unshard
from seqpar.ops.core.agreement import agreement, errors_on_all_ranks
from seqpar.ops.core.collective_op import check_dense
from seqpar.ops.core.device import no_autocast
from seqpar.ops.move.relayout import expect_relayout
from seqpar.plan import Plan

if TYPE_CHECKING:
    from seqpar.planner import MicroBatch  # the planner is loaded at the first batch

Planner = Callable[[Any, int], Plan]  # (lengths, or the mask of trees; ranks)
StepPlanner = Callable[[Any, int], "Sequence[MicroBatch]"]


@dataclass(frozen=True, eq=False)
class Share(Memo):
    """One rank's share of a batch.

    plan: of the union of all ranks' batches, with a pad row on ranks that would have none. tensors: name -> this rank's
    rows [rows, ...], pads last: "input_ids", "labels" at the token that predicts them, "mtp_labels" of further tokens,
    and the batch's other per-token tensors. positions: int64 [rows], the positions that the model would get on one
    device; 0 for pads. valid: labels that count in the union, equal on every rank. mtp_valid: of each column of
    "mtp_labels". others: the entries of this rank's own batch named in `keep`. places: int64 [tokens of the union],
    each token's distance from its document's first one, counting masked-out tokens between; None without such tokens.
    """

    plan: Plan
    comm: Comm
    tensors: dict[str, Tensor]
    positions: Tensor
    valid: int
    mtp_valid: tuple[int, ...]
    others: dict[str, Any]
    places: Ints | None
    home: BatchShape
    source: Layout | None  # the layout of the rows before they move; None if every rank has all rows
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    @cached
    def mask_for(self, *, causal: bool = True, window: tuple[int | None, int | None] = (None, None)) -> Mask:
        """The mask of the union's documents for a layer: `Mask`, with windows counted as on one device.

        That is by places in the original row, including masked-out tokens. For ``share.plan.with_mask``.

        Raises: ValueError for a window that `Mask` refuses.
        """
        if self.plan.mask.paths is not None:
            if not causal:
                raise ValueError(f"a tree is causal, got causal=False for {self.plan.mask!r}; leave causal out")
            return self.plan.mask.windowed(window)
        lengths = self.plan.mask.lengths
        plain = Mask(lengths, causal=causal, window=window)
        if self.places is None or window == (None, None):
            return plain
        left, right = window[0], 0 if causal else window[1]
        # all documents' places on one line, so far apart that no window reaches into the next document
        reach = int(self.places.max()) + 1
        base = np.repeat(np.arange(lengths.size) * 2 * reach, lengths)
        at = base + self.places
        low = base if left is None else np.maximum(at - left, base)
        high = base + reach if right is None else np.minimum(at + right, base + reach)
        lo, hi = np.searchsorted(at, low), np.searchsorted(at, high, side="right")
        return Mask.from_bounds(lo, hi, lengths=lengths)


def share(
    batch: Mapping[str, Any] | None,
    comm: Comm,
    *,
    source: str = "sharded",
    plan: Planner | None = None,
    shift: str = "row",
    ignore_index: int = -100,
    mtp_depth: int = 0,
    keep: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> Share:
    """This rank's share of a batch. A collective.

    batch: "input_ids" (or "inputs_embeds" [..., E]) padded [B, S], packed [1, T] or [T], or a list of documents [S_i].
    In the same form, with a value per token: "labels" or "shift_labels" (or both, if they agree), "position_ids", and
    any other tensor [B, S, ...], whose rows move unchanged. "attention_mask" [B, S] of 0 and 1: tokens with 0 are
    left out, wherever they are; or the number of each token's document in its row, ascending from 1. None, or a batch
    without rows, is empty, as for a rank whose loader has ended.

    Documents come from "cu_seqlens" (or "cu_seq_lens_q", "cu_seq_lens_k"). Without it, a row without attention_mask
    starts a document wherever its position_ids do not continue by 1, as in Hugging Face models without a cache;
    otherwise a row is one document, unless attention_mask numbers several. Positions are the given position_ids.
    Without them they are the place in the row, counting left padding and holes, as such models count themselves; or the
    place in the document, if it has a row of its own, or if cu_seqlens or attention_mask has its start.
    (``plan.rope_positions(rank)`` is always the place among the document's tokens.)

    source: "sharded": every rank supplies other documents, and their union is computed; ranks exchange only lengths and
    counts, and each row moves once. "replicated": all ranks hold the same batch, which a digest checks, and nothing
    moves. plan: ``(lengths, ranks) -> Plan``, called with the mask in place of lengths for trees; pass a model and a
    machine with ``functools.partial(seqpar.plan_batch, model=..., hardware=...)``. The default plans for a Llama of 8B
    on H100s, with memory not limited.

    shift: which token predicts a label of "labels":

    - "row" (default, as on one device): the previous token of the row, even across packed documents, as in the loss of
      Hugging Face's causal models. Collators for these therefore mask the first label of each document.
    - "document": the previous token of the document; its first token is never predicted.
    - "none": the label's own token, as in masked language models. "shift_labels" always belong to their own token.

    For documents a b | c d in one row, the labels a b c d are predicted by - a b c ("row"), - a - c ("document") or a b
    c d ("none"). A label that only a masked-out token could predict is refused: on one device its loss would depend on
    the attention implementation. With "document" and "none" so is any label of a masked-out token; with "row" the label
    of the first one after a token counts, as on one device: set it to ignore_index.

    "parents" [nodes] makes trees: documents are nodes then, in depth-first order, each with the number of its parent
    among this rank's nodes, -1 for a root, as for `Mask.tree`; so answers share the rows of their prompt. Positions are
    depths along the path. A label stays at its own token, for any `shift`, since the last token of a prompt predicts
    several: ``recurrent.shift(hidden, share.plan, comm)`` brings the hidden state that predicts it. The first token of
    a path has no label: of a tree, or of each child of a root without tokens.

    mtp_depth: how many tokens after its label a token also predicts, in columns of "mtp_labels" [rows, mtp_depth],
    int64 (Gloeckle et al. 2024, Better & Faster Large Language Models via Multi-token Prediction, section 2). Column k
    holds the label of the token k + 1 further on in the same document, so of token i token i + k + 2, and ignore_index
    beyond the document's end, for any `shift`. ``Share.mtp_valid`` counts the labels of each column.

    keep: names of entries that are not rows, passed on in ``Share.others`` if a batch has them. device: of the share,
    by default the batch's.

    Gradients of inputs_embeds return to the batch; with "replicated" they are shares, whose sum is its gradient.

    Raises: on every rank, before any row moves: ValueError for a batch that can be read in two ways (labels on
    masked-out tokens, position_ids that restart in a row with an attention_mask, ...), for an entry that is neither
    rows nor kept, for names, dtypes or dims that differ between ranks, for a union without tokens, and for a plan of
    other documents or with a window where masked-out tokens are between others. NotImplementedError for masks and
    positions of other dims, and for mtp_depth in trees.
    """
    how = Reading(shift, ignore_index, keep, device, mtp_depth)
    known = announce(batch, comm, source, how)
    assert known is not None
    (only,) = take(known, comm, how, choose(known, comm.size, plan))
    return only


def micro_batches(
    batch: Mapping[str, Any] | None,
    comm: Comm,
    *,
    source: str = "sharded",
    plan: StepPlanner | None = None,
    shift: str = "row",
    ignore_index: int = -100,
    mtp_depth: int = 0,
    keep: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> list[Share]:
    """This rank's shares of a global batch in several steps, equally many on each rank of the comm. A collective.

    plan: ``(lengths, ranks) -> [MicroBatch]``, by default `plan_step`; every document is in exactly one. The other
    arguments are those of `share`. Another comm, as that of another replica, may get another number of shares.
    ``valid`` counts the labels of one micro-batch: divide each loss by the sum of all ``valid``, and the gradients add
    up to those of the whole batch. ``back`` gives 0 for tokens of other micro-batches, so results add up too.

    Raises: as `share`, and ValueError for a plan that omits or repeats a document.
    """
    how = Reading(shift, ignore_index, keep, device, mtp_depth)
    known = announce(batch, comm, source, how)
    assert known is not None
    return take(known, comm, how, choose_step(known, comm.size, plan))


def back(share: Share, x: Tensor) -> Tensor | list[Tensor]:
    """Results [rows, ...] of a share, returned to this rank's own batch in its own shape. A collective.

    x: ``share.plan.rows(rank)`` rows, like ``share.tensors``. Returns [B, S, ...] with 0 where the batch has no token,
    or a list of [S_i, ...]; for None [0, ...], and for an empty list a list of one such. Use it in the loss: rows
    that this rank computed for others get their gradients in its backward. For a replicated batch every rank gets
    everything. The adjoint moves gradients back the same way; those of a replicated batch are summed over ranks.

    Raises: ValueError for a wrong number of rows, on every rank.
    """
    plan, comm = share.plan, share.comm
    rows = plan.rows(comm.rank)
    with errors_on_all_ranks("back", comm):
        if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] != rows:
            shown = str(list(x.shape)) if isinstance(x, Tensor) else repr(x)
            raise ValueError(f"x on rank {comm.rank} must have the share's {rows} rows, got {shown:.200}")
        check_dense("back", [x])
    with no_autocast(x.device.type):
        if share.source is None:
            return share.home.fill(unshard(x, plan, comm))
        tokens = plan.layout.tokens(comm.rank)
        return share.home.fill(relayout(x[:tokens], comm, src=plan.layout, dst=share.source))


def choose(known: BatchUnion, ranks: int, planner: Planner | None) -> list[MicroBatch] | Exception:
    """The plan of a union, or the error that prevents it. Local, and without tensors."""
    from seqpar.planner import MicroBatch

    try:
        plan = (planner or _default_plan)(known.documents, ranks)
        return [MicroBatch(np.arange(known.lengths.size), _served(plan, known.documents, ranks, known.places))]
    except Exception as error:
        return error


def choose_step(known: BatchUnion, ranks: int, planner: StepPlanner | None) -> list[MicroBatch] | Exception:
    """The plans of a union in several steps, or the error that prevents them. Local, and without tensors."""
    from seqpar.planner import MicroBatch, plan_step

    try:
        made: Any = (planner or plan_step)(known.documents, ranks)
        parts = list(made) if isinstance(made, Iterable) else [made]
        if not all(isinstance(part, MicroBatch) for part in parts):
            raise ValueError(
                f"plan must return micro-batches, got {made!r:.200}; give seqpar.plan_step, or a function like it"
            )
        found = np.concatenate([np.asarray(part.documents) for part in parts]) if parts else np.zeros(0)
        ascend = all((np.diff(part.documents) > 0).all() for part in parts)
        if not ascend or not np.array_equal(np.sort(found), np.arange(known.lengths.size)):
            raise ValueError(
                f"plan must return each of {known.lengths.size} documents in one micro-batch, ascending, got "
                f"{[list(part.documents) for part in parts]!r:.200}"
            )
        some = known.lengths.__getitem__ if known.tree is None else known.tree.pick
        return [part._replace(plan=_served(part.plan, some(part.documents), ranks, known.places)) for part in parts]
    except Exception as error:
        return error


def _default_plan(documents: Mask | Ints, ranks: int) -> Plan:
    """The plan if model and machine are unknown, with memory not limited: the user knows what fits."""
    from seqpar.planner import Hardware, plan_batch

    return plan_batch(documents, ranks, hardware=replace(Hardware.of("h100"), memory=1 << 60))


def _served(plan: Plan, documents: Mask | Ints, ranks: int, places: Ints | None) -> Plan:
    """The plan with its pads. Raises ValueError if it is not a plan of these documents."""
    tree = documents if isinstance(documents, Mask) else None
    lengths = documents.lengths if isinstance(documents, Mask) else documents
    if not isinstance(plan, Plan) or plan.ranks != ranks or not np.array_equal(plan.mask.lengths, lengths):
        raise ValueError(
            f"plan must return a Plan of the documents {lengths.tolist()!r:.200} on {ranks} ranks, got {plan!r:.200}"
        )
    if tree is not None and not plan.mask.same_paths(tree):
        raise ValueError(
            f"plan must return a Plan of the trees {tree!r}, got {plan.mask!r}; give plan_batch the mask that plan is "
            "called with"
        )
    if plan.kv_layout is not plan.layout:
        raise ValueError(f"plan must leave the keys with the queries, got a kv_layout: {plan!r:.200}")
    if places is not None and plan.mask not in (Mask(lengths), Mask(lengths, causal=False)):
        raise ValueError(
            f"plan returned {plan.mask!r}, whose bounds ignore the tokens that attention_mask leaves out "
            "between others; return plan.with_mask(Mask(lengths)), and make the masks of layers by Share.mask_for"
        )
    return plan.padded()


def take(
    known: BatchUnion, comm: Comm, how: Reading, chosen: list[MicroBatch] | Exception, *, alike: bool = False
) -> list[Share]:
    """This rank's shares under plans that all ranks have made alike. A collective.

    alike: whether plans follow from what ranks exchanged, so that they need not be compared: their digests travel with
    later messages.
    """
    what = "share: the plan of the batch"
    with agreement(what, comm, every=not alike) as call:
        if isinstance(chosen, Exception):
            raise chosen
        if not alike or comm.check_every == "call":
            call.facts = {"plan": [(digest_of(part.documents), part.plan.digest()) for part in chosen]}
    if len(chosen) == 1:
        return [_taken(known, comm, how, chosen[0].plan)]
    return [_taken(known.pick(part.documents, comm.rank), comm, how, part.plan) for part in chosen]


def _taken(known: BatchUnion, comm: Comm, how: Reading, plan: Plan) -> Share:
    source = known.layout()
    with no_autocast("cpu"), no_autocast("cuda"):  # its `cat` refuses rows of the other 16 bits
        rows = _moved(known, comm, source, plan.layout)
        if pads := plan.rows(comm.rank) - plan.layout.tokens(comm.rank):
            fill = dict.fromkeys(("labels", MTP_LABELS), how.ignore_index)
            some = {name: x.new_full((pads, *x.shape[1:]), fill.get(name, 0)) for name, x in rows.items()}
            rows = {name: torch.cat([x, some[name]]) for name, x in rows.items()}
    positions = rows.pop(POSITIONS)
    own, (valid, *later) = known.own, known.valid.sum(0).tolist()
    return Share(plan, comm, rows, positions, valid, tuple(later), own.others, known.places, own.home, source)


def _moved(known: BatchUnion, comm: Comm, source: Layout | None, target: Layout) -> dict[str, Tensor]:
    """The rows of every tensor that this rank computes; tensors of one kind move in one exchange."""
    own = {name: known.rows(name) for name in known.columns}
    if source is None:
        mine = target.positions(comm.rank)
        return taken(own, mine)
    if source is target or source.digest() == target.digest():
        return {name: x.clone() for name, x in own.items()}
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name, column in known.columns.items():
        kinds.setdefault((column.dtype, column.device, column.requires_grad), []).append(name)
    found: dict[str, Tensor] = {}
    for names in kinds.values():
        sizes = [math.prod(known.columns[name].dims) for name in names]
        flat = [own[name].reshape(len(own[name]), size) for name, size in zip(names, sizes)]
        rows = torch.cat(flat, 1)
        expect_relayout(rows, comm, src=source, dst=target)
        moved = relayout(rows, comm, src=source, dst=target)
        for name, part in zip(names, torch.split(moved, sizes, 1)):
            found[name] = part.reshape(len(part), *known.columns[name].dims)
    return found
