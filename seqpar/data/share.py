"""`share` and `back`: rows from the rank whose loader brought them to the rank that computes them, and home again.

Three stages, so that `prefetch` can run the second elsewhere: all ranks announce what their batches hold, the union of
the documents is planned, and the rows move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.data.batch import POSITIONS, Home, Packed, Reading, read
from seqpar.layout import Layout
from seqpar.mask import Ints, Mask, Memo, frozen
from seqpar.ops import relayout, unshard
from seqpar.ops.handles import refuse
from seqpar.plan import Plan
from seqpar.planner import plan_batch

SOURCES = ("sharded", "replicated")
Planner = Callable[[Ints, int], Plan]


@dataclass(frozen=True, eq=False)
class Share(Memo):
    """What one rank computes of a batch.

    plan: of the union of all ranks' batches, with a pad row on ranks that would have none. tensors: name -> this rank's
    rows [rows, ...], pads last: "input_ids", "labels" at the token that predicts them, and whatever else the batch had
    for each token. positions: int64 [rows], what one device would have given the model; 0 for pads. valid: labels that
    count in the union, the same on every rank. others: entries of this rank's own batch that were asked to be kept.
    places: int64 [tokens of the union], each token's distance from the first one of its document, masked-out tokens
    between them counted; None if there are none.
    """

    plan: Plan
    comm: Comm
    tensors: dict[str, Tensor]
    positions: Tensor
    valid: int
    others: dict[str, Any]
    places: Ints | None
    home: Home
    source: Layout | None  # where the rows were before; None if every rank had them all
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def mask_for(self, *, causal: bool = True, window: tuple[int | None, int | None] = (None, None)) -> Mask:
        """The mask of the union's documents for a layer: `Mask`, with windows as one device counts them.

        That is by the places in the row as it came, masked-out tokens included. For ``share.plan.with_mask``.

        Raises: ValueError for a window that `Mask` refuses.
        """
        return self.memo((causal, window), lambda: self._mask(causal, window))  # type: ignore[no-any-return]

    def _mask(self, causal: bool, window: tuple[int | None, int | None]) -> Mask:
        lengths = self.plan.mask.lengths
        plain = Mask(lengths, causal=causal, window=window)
        if self.places is None or window == (None, None):
            return plain
        left, right = window[0], 0 if causal else window[1]
        # places of all documents on one line, so far apart that no window reaches the next document
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
    keep: Sequence[str] = (),
    device: torch.device | str | None = None,
) -> Share:
    """This rank's share of a batch. A collective.

    batch: "input_ids" (or "inputs_embeds" [..., E]) padded [B, S], packed [1, T] or [T], or a list of documents [S_i];
    beside it for every token, in the same form: "labels" or "shift_labels", "position_ids", and any other tensor
    [B, S, ...], which travels along. "attention_mask" [B, S] of 0 and 1: tokens with 0, wherever they are, are left
    out. None is an empty batch, as of a rank whose loader has ended; so is one of no rows.

    Documents are what "cu_seqlens" (or "cu_seq_lens_q", "cu_seq_lens_k") says; without it a row without attention_mask
    starts one wherever its position_ids do not go on by 1, as in Hugging Face models; else a row is one.
    Positions are the given position_ids; else the place in the row, padding on the left and holes counted, which is
    what models make themselves; in the document where it has a row of its own or cu_seqlens says where it starts.

    source: "sharded": every rank brings other documents, and their union is computed; only lengths and counts are told
    to all ranks, and each row moves once. "replicated": all ranks hold the same batch, which is checked by a digest,
    and nothing moves. plan: ``(lengths, ranks) -> Plan``, by default `plan_batch`; pass a model and a machine by
    ``functools.partial(seqpar.plan_batch, model=..., hardware=...)``.

    shift: what "labels" belong to. "row": to the token before them in the row, across documents packed in it, as the
    loss of Hugging Face's causal models has it on one device (whose collators therefore mask the first label of each
    document). "document": to the token before them in the document; its first is never predicted. "none": to their own
    token, as in masked language models; so do "shift_labels", whatever shift says. keep: names of entries
    that are no rows, handed on in ``Share.others``. device: where the share shall be, by default where the batch is.

    Gradients of inputs_embeds reach the batch that brought them; with "replicated" they sum over ranks to its gradient.

    Raises: on every rank, before any row moves: ValueError for a batch that can be read in two ways (labels on
    masked-out tokens, position_ids that start anew in a row with an attention_mask, ...), that has an entry which is
    neither rows nor kept, or that differs from other ranks' in names, dtypes or dims; for a union of no token; for a
    plan of other documents, or with a window where masked-out tokens lie between others. NotImplementedError for masks
    and positions of other dims.
    """
    how = Reading(shift, ignore_index, keep, device)
    known = announce(batch, comm, source, how)
    if known is None:
        raise ValueError("share: no rank's batch has a token")
    return take(known, comm, how, *choose(known, comm.size, plan))


def back(share: Share, x: Tensor) -> Tensor | list[Tensor]:
    """The rows of this rank's own batch in its own shape, of results [rows, ...] in the share's. A collective.

    x: ``share.plan.rows(rank)`` rows, as ``share.tensors`` have. Returns [B, S, ...], with 0 where the batch has no
    token, or a list of [S_i, ...]; for None [0, ...]. Of a replicated batch every rank gets the whole. The adjoint
    moves gradients the same way back; those of a replicated batch are summed over ranks.

    Raises: ValueError for another number of rows, on every rank.
    """
    plan, comm = share.plan, share.comm
    rows = plan.rows(comm.rank)
    if not isinstance(x, Tensor) or x.dim() == 0 or x.shape[0] != rows:
        shown = str(list(x.shape)) if isinstance(x, Tensor) else repr(x)
        refuse("back", comm, ValueError(f"x on rank {comm.rank} must have the share's {rows} rows, got {shown:.200}"))
    if share.source is None:
        return share.home.fill(unshard(x, plan, comm))
    tokens = plan.layout.tokens(comm.rank)
    return share.home.fill(relayout(x[:tokens], comm, src=plan.layout, dst=share.source))


# --- announce ---------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """What ranks must have in common of a tensor."""

    dtype: torch.dtype
    dims: tuple[int, ...]  # after the first
    device: str
    requires_grad: bool


class Facts(NamedTuple):
    """What a rank tells the others of its batch."""

    lengths: Ints
    places: tuple[Ints, Ints] | None  # tokens before which some are masked out, and how many
    valid: int
    columns: dict[str, Column]
    ended: bool
    digest: str  # of a replicated batch


class Known(NamedTuple):
    """The union of all batches as every rank knows it, and this rank's own batch.

    layout: where rows are before they move; None if every rank has them all.
    """

    own: Packed
    lengths: Ints
    places: Ints | None
    valid: int
    columns: dict[str, Column]
    layout: Layout | None


def announce(
    batch: Mapping[str, Any] | None,
    comm: Comm,
    source: str,
    how: Reading,
    *,
    error: Exception | None = None,
    ended: bool = False,
) -> Known | None:
    """What all ranks bring together; None if all have ended. A collective. error: why this rank has no batch.

    Raises: as `share`.
    """
    own, facts = None, None
    if error is None:
        try:
            if source not in SOURCES:
                raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
            own = read(batch, how)
            digest = own.digest() if source == "replicated" else ""
            facts = Facts(own.lengths, _gaps(own), own.valid, _columns(own), ended, digest)
        except Exception as found:  # whatever it is, the others must hear of it
            error = found
    what = f"share(source={source!r}, shift={how.shift!r}, ignore_index={how.ignore_index})"
    every = comm.gather(what, facts, error)
    assert own is not None
    if source == "replicated":
        _check_equal(every)
    if all(each.ended for each in every):
        return None
    return _union(own, every, source)


def _columns(own: Packed) -> dict[str, Column]:
    return {
        name: Column(x.dtype, tuple(x.shape[1:]), x.device.type, x.requires_grad) for name, x in own.tensors.items()
    }


def _gaps(own: Packed) -> tuple[Ints, Ints] | None:
    if own.places is None:
        return None
    more = np.diff(own.places, prepend=-1) - 1
    more[np.cumsum(own.lengths) - own.lengths] = 0
    return np.flatnonzero(more), more[more != 0]


def _check_equal(every: Sequence[Facts]) -> None:
    for rank, each in enumerate(every):
        if (each.digest, each.ended) != (every[0].digest, every[0].ended):
            lacks = " (one loader has ended)" if each.ended != every[0].ended else ""
            raise ValueError(
                f"share: the batch of rank {rank} is not that of rank 0{lacks}; source='replicated' takes the same "
                "batch on every rank, source='sharded' a batch of each"
            )


def _union(own: Packed, every: Sequence[Facts], source: str) -> Known:
    """The documents of all ranks, one rank's after the other's; of a replicated batch, those of each."""
    if source == "replicated":
        every = every[:1]
    lengths = np.concatenate([each.lengths for each in every])
    if not lengths.size:
        raise ValueError("share: no rank's batch has a token; leave such batches out")
    tokens = np.array([each.lengths.sum() for each in every])
    start = np.cumsum(tokens) - tokens
    columns = _common(every)
    ranks = len(every)
    layout = None if source == "replicated" else Layout.from_pieces(start, tokens, np.arange(ranks), ranks)
    return Known(
        own, frozen(lengths), _union_places(every, lengths, start), sum(e.valid for e in every), columns, layout
    )


def _common(every: Sequence[Facts]) -> dict[str, Column]:
    """The columns of the ranks that have tokens, which must be alike."""
    ranks = [rank for rank, each in enumerate(every) if each.lengths.size]
    first = ranks[0]
    for rank in ranks[1:]:
        if every[rank].columns == every[first].columns:
            continue
        for name in sorted(every[first].columns.keys() | every[rank].columns.keys()):
            one, other = (each.columns.get(name, "not there") for each in (every[first], every[rank]))
            if one != other:
                raise ValueError(
                    f"share: {name} is {_told(one)} on rank {first} and {_told(other)} on rank {rank}; rows of all "
                    "ranks' batches go together: give them the same entries"
                )
    return {name: every[first].columns[name] for name in sorted(every[first].columns)}


def _told(column: Column | str) -> str:
    if isinstance(column, str):
        return column
    grad = " that requires a gradient" if column.requires_grad else ""
    return f"{column.dtype} [tokens{''.join(f', {n}' for n in column.dims)}] on {column.device}{grad}"


def _union_places(every: Sequence[Facts], lengths: Ints, start: Ints) -> Ints | None:
    if all(each.places is None for each in every):
        return None
    first = np.cumsum(lengths) - lengths
    more = np.zeros(int(lengths.sum()), np.int64)
    for each, begin in zip(every, start.tolist(), strict=True):
        if each.places is not None:
            more[begin + each.places[0]] = each.places[1]
    total = np.arange(more.size) + np.cumsum(more)
    places: Ints = frozen(total - np.repeat(total[first], lengths))
    return places


# --- choose -----------------------------------------------------------------------------------------------------------


def choose(known: Known, ranks: int, planner: Planner | None) -> tuple[Plan | None, Exception | None]:
    """The plan of a union, or why there is none. Local, and without tensors."""
    try:
        plan = plan_batch(known.lengths, ranks) if planner is None else planner(known.lengths, ranks)
        if not isinstance(plan, Plan) or plan.ranks != ranks or not np.array_equal(plan.mask.lengths, known.lengths):
            raise ValueError(
                f"plan must return a Plan of the documents {known.lengths.tolist()!r:.200} on {ranks} ranks, "
                f"got {plan!r:.200}"
            )
        if plan.kv_layout is not plan.layout:
            raise ValueError(f"plan must leave the keys with the queries, got a kv_layout: {plan!r:.200}")
        whole = (Mask(known.lengths), Mask(known.lengths, causal=False))
        if known.places is not None and plan.mask not in whole:
            raise ValueError(
                f"plan returned {plan.mask!r}, whose bounds do not know of the tokens that attention_mask leaves out "
                "between others; return plan.with_mask(Mask(lengths)), and make the masks of layers by Share.mask_for"
            )
        return plan.padded(), None
    except Exception as error:
        return None, error


# --- take -------------------------------------------------------------------------------------------------------------


def take(known: Known, comm: Comm, how: Reading, plan: Plan | None, error: Exception | None) -> Share:
    """This rank's share under a plan that all ranks have made alike. A collective."""
    comm.agree("share: the plan of the batch", {"plan": plan and plan.digest()}, error)
    assert plan is not None
    rows = _moved(known, comm, plan)
    fill = {"labels": how.ignore_index}
    pads = plan.rows(comm.rank) - plan.layout.tokens(comm.rank)
    if pads:
        rows = {name: torch.cat([x, x.new_full((pads, *x.shape[1:]), fill.get(name, 0))]) for name, x in rows.items()}
    positions = rows.pop(POSITIONS)
    own = known.own
    return Share(plan, comm, rows, positions, known.valid, own.others, known.places, own.home, known.layout)


def _moved(known: Known, comm: Comm, plan: Plan) -> dict[str, Tensor]:
    """The rows of every tensor that the plan gives to this rank; tensors of one kind move in one exchange."""
    own = {name: _own(known, name) for name in known.columns}
    if known.layout is None:
        mine = plan.layout.positions(comm.rank)
        return {name: x.index_select(0, torch.from_numpy(mine).to(x.device)) for name, x in own.items()}
    kinds: dict[tuple[object, ...], list[str]] = {}
    for name, column in known.columns.items():
        kinds.setdefault((column.dtype, column.device, column.requires_grad), []).append(name)
    found: dict[str, Tensor] = {}
    for names in kinds.values():
        sizes = [int(np.prod(known.columns[name].dims)) for name in names]
        flat = [own[name].reshape(len(own[name]), size) for name, size in zip(names, sizes)]
        moved = relayout(torch.cat(flat, 1), comm, src=known.layout, dst=plan.layout)
        for name, part in zip(names, torch.split(moved, sizes, 1)):
            found[name] = part.reshape(len(part), *known.columns[name].dims)
    return found


def _own(known: Known, name: str) -> Tensor:
    """This rank's rows; a rank without tokens takes the kind of tensor from the others."""
    if known.own.lengths.size:
        return known.own.tensors[name]
    column = known.columns[name]
    return torch.empty(0, *column.dims, dtype=column.dtype, device=column.device, requires_grad=column.requires_grad)
