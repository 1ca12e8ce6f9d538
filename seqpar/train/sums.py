"""Sums over the ranks of a comm, equal to the last bit on all ranks, in an order that no message decides.

Every rank sums one piece of a flat tensor and sends the result to the others, so each rank sends and receives
``2 (n - 1) / n`` of the bytes on n ranks::

    rank 0   a0 a1 a2         a0+b0+c0
    rank 1   b0 b1 b2    ->            a1+b1+c1            ->   all three pieces, on every rank
    rank 2   c0 c1 c2                           a2+b2+c2

CUDA tensors move by NCCL's collectives (`Comm.sums`), all others by exchanges, which add in the order of ranks, from
where a tensor lies and to where its sum comes. gloo's collectives take one flat tensor: several tensors would be copied
to it and back (``bench/cpu/sums.py``). On the CPU, few bytes are summed by pairs of ranks, then by pairs of pairs, with
whole sums in their messages: one message in each round, and one round for each bit of the number of ranks. Two ranks
sum a single tensor so too, whatever its size.

Source: recursive doubling, as in Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in
MPICH (2005), section 4.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from seqpar.comm import Comm, Tag
from seqpar.comm.base import pairs
from seqpar.comm.over_nccl import HALVES
from seqpar.comm.protocol import has_memory
from seqpar.kernels import acc_dtype
from seqpar.ops.core.agreement import abort_on_error, agreement, check_comm, digest_of_call, errors_on_all_ranks
from seqpar.ops.core.collective_op import CollectiveOp, Record, check_dense
from seqpar.ops.core.handles import checked_values
from seqpar.private import torch as torch_private

FEW = 1 << 21  # bytes that a rank sends at most where sums go by pairs: more rounds would be faster with pieces
BOTH = 1 << 23  # bytes of tensors up to which each of two ranks sends all of them and sums all of them: one round
JOINED = 1 << 18  # bytes of a tensor below which it is joined with others: messages cost more than a copy
BLOCK = 1 << 15  # elements that are widened at a time: a cache holds them, and no memory is new
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
STAGES = 6  # bits of the stages of one sum


def all_sum(x: Tensor, comm: Comm) -> Tensor:
    """The sum over ranks of x, on every rank; fp16 and bf16 are summed in fp32. A collective.

    Spec over ranks: ``xs -> [sum(xs)] * len(xs)``. The adjoint is the same sum, of the gradients of all ranks' losses.
    A loss computed from such sums is the same on every rank, and a rank's share of it is ``loss / comm.size``. Every
    rank must run the backward, even if its loss does not need the sum: ``loss + 0 * sum``. In a compiled model `bind`
    must have seen the comm: ``seqpar.bind(comm)``, or with a plan.

    Raises: ValueError for booleans, and if ranks differ in shape, dtype or requires_grad; NotImplementedError for
    nested, sparse and quantized tensors, 8-bit floating and wide unsigned dtypes; on every rank, before any byte moves.
    """
    _check_comm("all_sum", comm)
    with errors_on_all_ranks("all_sum", comm):
        if not isinstance(x, Tensor):
            raise TypeError(f"all_sum: x must be a tensor, got {x!r:.200}")
        check_dense("all_sum", [x])
        if x.is_meta:
            raise ValueError("x is on the meta device, which holds no values to sum")
        if x.dtype == torch.bool:
            raise ValueError("the sum of booleans, expected numbers; give x.long()")
        if not adds(x.dtype):
            other = "x.float()" if x.is_floating_point() else "x.long()"
            raise NotImplementedError(f"all_sum of {x.dtype}, in which PyTorch does not add; give {other}")
    return ALL_SUM([x], [comm])[0]


@lru_cache(maxsize=64)
def adds(dtype: torch.dtype) -> bool:
    """Whether PyTorch adds numbers of a dtype: it combines booleans with or, and does not add some other dtypes."""
    return dtype not in (torch.bool, *UNSIGNED) and not (dtype.is_floating_point and dtype.itemsize < 2)


def sum_under(x: Tensor, comm: Comm, what: str, facts: Mapping[str, object]) -> Tensor:
    """`all_sum` without a gradient, for tensors that ranks know to be alike, and so do not compare.

    facts: what else the call depends on; they ride in the messages, and ranks that differ do not meet.
    """
    digest = digest_of_call(what, facts) if comm.size > 1 else 0
    return _whole(x.detach(), comm, Tag(digest, comm.next_call(), 0, 0, what))


def token_mean(x: Tensor, comm: Comm, *, keep: Tensor | None = None) -> Tensor:
    """The mean over the tokens of all ranks of x ``[T, ...]``, shape ``[...]``, on every rank. Differentiable.

    keep [T] bool: the rows that count, by default all; leave pads out. The balance loss of a mixture of experts is the
    product of two such means, an expert's fraction of tokens and its mean probability, and is then exact:

        load, chance = token_mean(chosen, comm), token_mean(probabilities, comm)
        loss = loss + weight * experts * (load * chance).sum() / comm.size      # this rank's share

    NaN if no row counts on any rank. Raises: as `all_sum`, and ValueError for a `keep` that does not match x's rows.
    """
    _check_comm("token_mean", comm)
    with errors_on_all_ranks("token_mean", comm):
        if not isinstance(x, Tensor):
            raise TypeError(f"token_mean: x must be a tensor, got {x!r:.200}")
        check_dense("token_mean", [x])
        if not (keep is None or isinstance(keep, Tensor)):
            raise TypeError(f"token_mean: keep must be a tensor, got {keep!r:.200}")
        if x.dim() == 0 or not (keep is None or (keep.dtype == torch.bool and keep.shape == x.shape[:1])):
            rows = None if keep is None else f"{keep.dtype}{list(keep.shape)}"
            raise ValueError(f"x {list(x.shape)}, keep {rows}, expected [T, ...] and bool [T]")
    wide = x.to(acc_dtype(x.dtype))
    if keep is not None:
        wide = wide.masked_fill(~keep.view(-1, *[1] * (x.dim() - 1)), 0.0)
    count = wide.new_full((1,), len(x)) if keep is None else keep.sum().to(wide.dtype)[None]
    # one exchange for both: the count follows the sums
    total = all_sum(torch.cat([wide.sum(0).reshape(-1), count]), comm)
    return (total[:-1] / total[-1]).view(x.shape[1:])


def _check_comm(what: str, comm: object) -> None:
    if not isinstance(comm, Tensor):  # a handle of it
        check_comm(what, comm)


def _run(xs: Sequence[Tensor], values: Sequence[Any], grads: Sequence[bool]) -> tuple[list[Tensor], tuple[()], Record]:
    """The sum, and the record of the call. values: the comm, or the record of the sum whose backward this is."""
    if isinstance(values[0], Record):
        comm, tag = values[0].comm, values[0].way_back()
    else:
        (comm,) = checked_values(values)
        tag = _agreed(xs[0], comm, requires_grad=grads[0])
    # so that the stages of one backward do not end in those of the next
    return [_whole(xs[0], comm, tag._replace(stage=tag.stage << STAGES))], (), Record(comm, tag)


def _adjoint(_: object, options: tuple[Any, ...], needed: Sequence[int]) -> tuple[CollectiveOp, tuple[Any, ...]]:
    return ALL_SUM, ()


def _fake(xs: Sequence[Tensor], handles: Sequence[Tensor], grads: Sequence[bool]) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in xs]


ALL_SUM = CollectiveOp("all_sum", _run, _fake, adjoint=_adjoint, checks=False, verb=False)


def _agreed(x: Tensor, comm: Comm, *, requires_grad: bool) -> Tag:
    """The tag of a call that all ranks make with the same arguments."""
    with agreement("all_sum", comm) as call:
        call.facts, call.digest = _facts(x.shape, x.dtype, x.device.type, requires_grad)
    return Tag(call.digest, comm.next_call(), 0, 0, "all_sum (forward)")


@lru_cache(maxsize=256)
def _facts(shape: torch.Size, dtype: torch.dtype, device: str, requires_grad: bool) -> tuple[Mapping[str, object], int]:
    facts = {"shape": list(shape), "dtype": dtype, "device": device, "requires grad": requires_grad}
    return facts, digest_of_call("all_sum", facts)


def _whole(x: Tensor, comm: Comm, tag: Tag) -> Tensor:
    flat = summed([x], comm, tag, kept=True)
    # `data`: a result that views another may not be changed in place
    return (flat if len(flat) == x.numel() else flat[: x.numel()]).view(x.shape).data


@torch.no_grad()
def summed(tensors: Sequence[Tensor], comm: Comm, tag: Tag, *, few: bool | None = None, kept: bool = False) -> Tensor:
    """The sum over ranks of the elements of tensors of one dtype, end to end; what may follow them is zeros.

    Uses the tag's stage and those after it. few: whether to sum by pairs on the CPU; by default the bytes decide. kept:
    as in `Comm.empty`.
    """
    first, count = tensors[0], sum([x.numel() for x in tensors])
    if comm.size == 1 or not count:
        return _filled(comm.empty((count,), first.dtype, first.device, kept=kept), tensors, count)
    with abort_on_error(comm, f"a sum over ranks, call {tag.call}"):
        # two ranks send a single tensor from where it lies
        alone = comm.size == 2 and len(tensors) == 1 and first.device.type == "cpu"
        if alone or (_are_few(first, count, comm.size) if few is None else few):
            return _by_pairs(_joined(tensors, count, comm), comm, tag, kept=kept)
        flat = comm.empty((-(-count // comm.size) * comm.size,), first.dtype, first.device, kept=kept)
        if (sums := comm.sums(flat)) is not None:
            sums.sum_(_filled(flat, tensors, count), tag)
        else:
            _by_pieces([_joined(tensors, count, comm)], comm, tag, out=flat)
            flat[count:].zero_()
    return flat


@torch.no_grad()
def sum_in_place(tensors: Sequence[Tensor], comm: Comm, tag: Tag, *, veto: bool | None = None) -> bool:
    """Replace contiguous tensors of one dtype, which have no memory in common, by their sums over ranks.

    tag: as in `summed`. veto: whether this rank wants none replaced; None if no rank may. Returns whether they were, on
    all ranks alike.
    """
    first, count = tensors[0], sum([x.numel() for x in tensors])
    few, by_collectives = _are_few(first, count, comm.size), comm.sums(first) is not None
    if comm.size == 1 or first.device.type != "cpu" or by_collectives or few:
        if veto is not None:
            tensors = [*tensors, first.new_full((1,), float(veto))]
        flat = summed(tensors, comm, tag, few=few)  # the veto among them must not decide
        if veto is not None and flat[count]:
            return False
        torch_private.foreach_copy_(tensors, torch_private.unflatten_dense_tensors(flat, tensors))
        return True
    small = [x for x in tensors if x.nbytes < JOINED]
    several = [x.view(-1) for x in tensors if x.nbytes >= JOINED]
    with abort_on_error(comm, f"a sum over ranks, call {tag.call}"):
        if small:
            several.append(_joined(small, sum([x.numel() for x in small]), comm))
        if not _by_pieces(several, comm, tag, veto=veto):
            return False
    if small:
        torch_private.foreach_copy_(small, torch_private.unflatten_dense_tensors(several.pop(), small))
    torch.autograd.graph.increment_version([x for x in several if not x.is_inference()])
    return True


def _joined(tensors: Sequence[Tensor], count: int, comm: Comm) -> Tensor:
    """The elements of tensors, end to end; of a single tensor its own memory, if they lie there so."""
    if len(tensors) == 1 and has_memory(tensors[0]):
        return tensors[0].resolve_conj().resolve_neg().reshape(-1).contiguous()
    return _filled(comm.empty((count,), tensors[0].dtype, tensors[0].device), tensors, count)


def _filled(flat: Tensor, tensors: Sequence[Tensor], count: int) -> Tensor:
    """The flat tensor, holding the `count` elements of tensors and zeros."""
    if count == len(flat) and len(tensors) == 1:
        return flat.copy_(tensors[0].reshape(-1))
    torch.cat([x.reshape(-1) for x in tensors], out=flat[:count])
    flat[count:].zero_()
    return flat


def _are_few(like: Tensor, count: int, ranks: int) -> bool:
    """Whether `count` elements are summed by pairs of ranks."""
    itemsize = 4 if like.dtype in HALVES and ranks > 2 else like.itemsize
    return like.device.type == "cpu" and count * itemsize * (ranks - 1).bit_length() <= FEW


def _by_pairs(own: Tensor, comm: Comm, tag: Tag, *, kept: bool) -> Tensor:
    """The sum over ranks, by recursive doubling. Both ranks of a pair add the same two sums and get the same bits."""
    # a sum of two is rounded once in any case
    total = own.float() if own.dtype in HALVES and comm.size > 2 else own
    among = 1 << comm.size.bit_length() - 1  # ranks that double; another one gives to one of them, and takes at the end
    for index, (stage, peer) in enumerate(pairs(comm.rank, comm.size)):
        gives = max(comm.rank, peer) < among or (comm.rank >= among) == (index == 0)
        takes = max(comm.rank, peer) < among or not gives
        at = tag._replace(stage=tag.stage + stage)
        heard = comm.empty(total.shape, total.dtype, total.device, kept=kept)
        comm.exchange({peer: [total] if gives else []}, {peer: [heard] if takes else []}, tag=at).wait()
        if takes:
            total = heard if comm.rank >= among else heard.add_(total)
    return total.to(own.dtype)


def _by_pieces(
    tensors: Sequence[Tensor], comm: Comm, tag: Tag, *, out: Tensor | None = None, veto: bool | None = None
) -> bool:
    """Replace 1-D tensors by their sums over ranks, in the order of ranks, or write that of a single one into `out`.

    out: as long as the tensor, and then to a multiple of the ranks. veto, and the result: as in `sum_in_place`.
    """
    both = comm.size == 2 and out is None and sum([x.nbytes for x in tensors]) <= BOTH
    pieces = [list(tensors)] * comm.size if both else _pieces(tensors, comm.size)
    places = pieces if out is None else _pieces([out[: len(tensors[0])]], comm.size)
    if not _sum_own(pieces, comm, tag, out, places[comm.rank], veto):
        return False
    if both:
        return True
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    sends, recvs = {peer: places[comm.rank] for peer in peers}, {peer: places[peer] for peer in peers}
    comm.exchange(sends, recvs, tag=tag._replace(stage=tag.stage + 1)).wait()
    return True


def _sum_own(
    pieces: Sequence[Sequence[Tensor]], comm: Comm, tag: Tag, out: Tensor | None, sums: Sequence[Tensor],
    veto: bool | None,
) -> bool:  # fmt: skip
    """Write the sums of this rank's pieces into `sums`, which may be the pieces. The rest as in `_by_pieces`."""
    own, peers = pieces[comm.rank], [peer for peer in range(comm.size) if peer != comm.rank]
    lengths = [len(x) for x in own]
    if out is None:
        rows = comm.empty((len(peers), sum(lengths)), pieces[0][0].dtype, pieces[0][0].device).unbind()
    else:  # what arrives lies where the sums of other ranks come later
        rows = tuple(out.view(comm.size, -1)[peer, : sum(lengths)] for peer in peers)
    arrived = {peer: list(row.split(lengths)) for peer, row in zip(peers, rows)}
    sends: dict[int, Sequence[Tensor]] = {peer: pieces[peer] for peer in peers}
    recvs: dict[int, Sequence[Tensor]] = dict(arrived)
    if veto is not None:
        vetoes = torch.full((comm.size, 1), float(veto), device="cpu")
        sends = {peer: [*several, vetoes[comm.rank]] for peer, several in sends.items()}
        recvs = {peer: [*several, vetoes[peer]] for peer, several in recvs.items()}
    comm.exchange(sends, recvs, tag=tag).wait()
    if veto is not None and vetoes.any():
        return False
    for piece, place, *addends in zip(own, sums, *arrived.values()):
        addend = piece if out is None else place.copy_(piece)
        _add_in_order([*addends[: comm.rank], addend, *addends[comm.rank :]], place)
    return True


def _pieces(tensors: Sequence[Tensor], ranks: int) -> list[list[Tensor]]:
    """1-D tensors, end to end, cut in a piece of equal length for each rank; the last ones may be shorter."""
    length, at = -(-sum([len(x) for x in tensors]) // ranks), 0
    pieces: list[list[Tensor]] = [[] for _ in range(ranks)]
    for x in tensors:
        start = 0
        while start < len(x):
            rank, before = divmod(at + start, length)
            part = x[start : start + length - before]
            pieces[rank].append(part)
            start += len(part)
        at += len(x)
    return pieces


def _add_in_order(addends: Sequence[Tensor], out: Tensor) -> None:
    """Write the sum of 1-D addends, in order, into `out`, which may be one of them; the first may be overwritten too.

    fp16 and bf16 are summed in fp32.
    """
    if out.dtype in HALVES and out.device.type == "cpu" and len(out) > BLOCK:
        for first, *parts in zip(*(torch.split(x, BLOCK) for x in (out, *addends))):
            _add_in_order(parts, first)
        return
    total = addends[0].to(torch.float32 if out.dtype in HALVES else out.dtype)
    for x in addends[1:-1]:
        total += x
    torch.add(total, addends[-1], out=out)


def reported(part: Tensor, whole: Tensor) -> Tensor:
    """The loss of all ranks, with the gradient of this rank's share of it."""
    return _Reported.apply(part, whole)  # type: ignore[no-any-return]


class _Reported(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor) -> Tensor:
        return whole.to(part.dtype).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
