"""The trial of one block of layers: which of its arguments have rows, and which rows its attention is over.

A block gets whole arguments, of a few rows each, and random weights. Each attention is recorded, and returns random
rows. Then the block runs on either half of the rows of its streams, as on one of two ranks, where attention returns the
recorded rows::

    run      stream            attention             must follow
    whole    a b c d e         q: text, a b c d e
    halves   a b c | c d e     q: text, a b c | ...  q, k, v, mask, outputs: rows of the recorded ones, in their order

Rows that one half has are *cut*, those that both have are *whole*, but for a row in the middle of each stream. So the
runs find the order of the streams in each attention. What mixes rows otherwise does not follow. In training, gradients
must follow too (`gradients`). Which dims of the arguments have rows is a guess by sizes, a *reading*; the first one
that follows is the finding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from seqpar.comm import PeerError
from seqpar.foreign.wrap import places_of, replaced
from seqpar.private.torch import TENSORS, parameters_of
from seqpar.trial.compare import close
from seqpar.trial.finding import READS, Attended, AttentionCall, Finding, MaskForm, value_of
from seqpar.trial.gradients import Graph, Rows, gradients_follow, leaf
from seqpar.trial.protect import eager, saved
from seqpar.trial.randomness import draws
from seqpar.trial.readings import BlockArguments, BlockReading, GivenRows, Mismatch, index, picked
from seqpar.trial.rows import random_rows, real
from seqpar.trial.segments import RowPlace, RowSegment, RowSegments, is_cut
from seqpar.trial.weights import drawn, without_zeros

RUNS = 16
PLAIN = {bool, int, float, str, type(None)}  # types of outputs that may be compared


class Draws(BaseException):
    """A block draws random numbers, which ranks would not share if they computed it whole. No model catches it."""


def find(
    module: nn.Module, run: Callable[[list[Any]], list[Any]], arguments: list[Any], ranks: int
) -> Finding | None:  # fmt: skip
    """The finding for such arguments; None if the block is to be computed whole, as it has no rows to share.

    run: the block's outputs, of its arguments, both flat. arguments: tensors, `GivenRows`, and others.

    Raises: NotImplementedError with the reason if the rows follow in no reading; Draws.
    """
    device = next((x.device for x in arguments if isinstance(x, (Tensor, GivenRows))), None)
    with ExitStack() as stack:
        stack.enter_context(saved_tensors_hooks(Tensor.detach, lambda x: x))  # not those of a checkpoint around it
        given = stack.enter_context(saved(nn.Module(), [x for x in arguments if not isinstance(x, GivenRows)]))
        stack.enter_context(without_zeros(module))
        state = stack.enter_context(saved(module))
        stack.enter_context(eager(module))
        stack.enter_context(_unhooked(module))
        stack.enter_context(drawn(module, device))
        found = _BlockTrial(run, arguments, ranks).finding()
        if changed := state.changed():
            raise NotImplementedError(f"it changes its buffer {next(iter(changed))[1]}")
        if given.written():
            raise NotImplementedError("it writes into an object that it is given")
        return found


class _OfRows(Tensor):
    """Some rows, or what follows from them."""


class _Intercepting(TorchFunctionMode):
    """A mode in which attention is ``attend(number, call)``, and nothing is by chance."""

    def __init__(self, attend: Callable[[int, AttentionCall], Tensor]) -> None:
        super().__init__()
        self.attend, self.calls, self.reads, self.as_arrays = attend, 0, list[Any](), False
        self.kept = saved_tensors_hooks(Tensor.detach, lambda x: x)  # as a checkpoint in the block would attend again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self.kept:
            return self._called(func, args, kwargs or {})

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        if draws(func, args, kwargs):
            raise Draws(f"it draws random numbers, by {func.__name__}")
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self.attend(self.calls - 1, AttentionCall(*args, **kwargs))
        found = func(*args, **kwargs)
        if func in (Tensor.numpy, Tensor.__array__):  # experts that rows choose are counted so
            self.as_arrays |= not isinstance(args[0], _OfRows)
        if func in READS:
            if any(isinstance(x, _OfRows) for x in args):
                raise Mismatch(f"its branches depend on values of its rows, which it reads by {func.__name__}")
            self.reads.append(value_of(found))
        return found


@contextmanager
def _unhooked(block: nn.Module) -> Iterator[None]:
    """A context without hooks that move or cast weights of a block's parts; those of the trial need no such thing.

    Weights of 8 bits that such a hook would cast have 32, and no values yet.
    """
    with ExitStack() as stack:
        for module in block.modules():
            *_, (owner, name) = places_of(module)
            if module is not block and owner is not module:
                wide = {k: _wide(p) for k, p in parameters_of(module).items()}
                stack.enter_context(replaced(module, {"forward": getattr(owner, name), TENSORS[0]: wide}))
        yield


def _wide(x: nn.Parameter | None) -> nn.Parameter | None:
    if x is None or not x.is_floating_point() or x.dtype.itemsize > 1 or type(x.data) is not Tensor:
        return x
    return nn.Parameter(torch.empty_like(x, dtype=torch.float32), requires_grad=False)


class _BlockTrial:
    """The runs of one block."""

    def __init__(self, run: Callable[[list[Any]], list[Any]], arguments: list[Any], ranks: int) -> None:
        self.run, self.arguments, self.runs, self.reasons = run, BlockArguments(arguments, ranks), 0, list[str]()
        self.outputs, self.calls, self.reads = list[Any](), list[tuple[AttentionCall, Tensor]](), list[Any]()
        self.given = list[Any]()

    def finding(self) -> Finding | None:
        """The first reading that follows; None if there are no rows to share."""
        arguments = self.arguments
        if not (kinds := arguments.kinds()):
            return None
        for few, features in itertools.product(arguments.divided(kinds), (False, True)):
            if not self._recorded(few, features):
                continue
            if not self.calls and not any(isinstance(x, GivenRows) for x in arguments.given):
                return None  # such as a network of embeddings, which is not worth a gather
            if not (likely := next(iter(arguments.streams(self.outputs)), [])):
                return None
            streams = {each.count for _, place in likely for each in place.segments}
            if arguments.few.keys() - streams and not self._recorded(arguments.of(few, streams), features):
                continue
            for reading in arguments.readings(self.outputs):
                if self.runs > RUNS - 2:
                    break
                if (found := self._tried(reading)) is not None:
                    return found
            if not arguments.few:
                break
        if not self.reasons or (self.outputs and not self.calls) or arguments.are_short(self.outputs):
            return None
        raise NotImplementedError(min(self.reasons, key=_unlikely))

    def _recorded(self, kinds: set[int], features: bool) -> bool:
        """Run the block on a few rows of these kinds, and record its attentions; whether it could."""

        def attend(number: int, call: AttentionCall) -> Tensor:
            out = leaf(random_rows((*call.query.shape[:-1], call.value.shape[-1]), call.value, number + 1))
            self.calls.append((call, out))
            return out.clone()

        for as_given in (False, True):
            self.calls = []
            try:
                self.arguments.take_few(kinds, features, as_given)
                self.given, self.outputs = self._ran(self.arguments.sample, attend)
            except Mismatch as error:
                self.reasons.append(str(error))
                return False
            if not self.reads:  # else a later call must read the same
                break
        return True

    def _ran(
        self, arguments: list[Any], attend: Callable[[int, AttentionCall], Tensor]
    ) -> tuple[list[Any], list[Any]]:  # fmt: skip
        """The arguments, as leaves of a graph, and the outputs. Raises Mismatch if the block fails or ran too often."""
        if self.runs >= RUNS:
            raise Mismatch(f"its rows follow in none of {RUNS} runs")
        self.runs += 1
        mode, given = _Intercepting(attend), list(map(leaf, arguments))
        try:
            with mode:
                outputs = self.run(own := [x.clone() if isinstance(x, Tensor) else x for x in given])
        except (Mismatch, NotImplementedError, PeerError):
            raise
        except Exception as error:
            told = (str(error).splitlines() or [""])[0]
            raise Mismatch(f"with some of its rows it fails: {type(error).__name__}: {told:.200}") from error
        if (self.reads, len(self.calls)) != (mode.reads, mode.calls) and arguments is not self.arguments.sample:
            raise Mismatch(f"it calls attention {len(self.calls)} times with all rows and {mode.calls} with some")
        if mode.as_arrays and arguments is not self.arguments.sample:
            raise Mismatch("it reads values of a tensor by numpy, which cannot be compared later; use item or tolist")
        self.reads = mode.reads
        for number, (x, y) in enumerate(zip(own, given)):
            if isinstance(x, Tensor) and not _equal(_plain(x), _plain(y)):
                raise Mismatch(f"it writes into its argument {number}, which others may use")
        return given, outputs

    def _tried(self, reading: BlockReading) -> Finding | None:
        """The finding, if the rows follow in this reading."""
        halves = [_Half(self, reading, half) for half in range(2)]
        try:
            for half in halves:
                half.follow()
            attends = [
                Attended(*(self._segments([half.at[n][side] for half in halves], f"its attention {n}")
                           for side in range(2)), _one([half.masks[n] for half in halves]))
                for n in range(len(self.calls))
            ]  # fmt: skip
            outputs = [self._place([half.outputs[n] for half in halves], n) for n in range(len(self.outputs))]
            if torch.is_grad_enabled():
                self._check_gradients([Graph.of(half.results, half.leaves) for half in halves])
        except Mismatch as error:
            self.reasons += [str(error)] if str(error) not in self.reasons else []
            return None
        places = tuple([None if place is None or not is_cut(place.segments) else place for place in reading.places])
        return Finding(places, reading.counts, tuple(attends), tuple(outputs), tuple(self.reads))

    def _check_gradients(self, parts: list[Graph]) -> None:
        """Raise Mismatch if the gradients of the halves are not those of all rows."""
        given = [*self.outputs, *(x for call, _ in self.calls for x in call[:3])]
        own = [*self.given, *(out for _, out in self.calls)]
        try:
            follow = gradients_follow(Graph.of([(x, None) for x in given], [(x, None) for x in own]), parts)
        except Exception as error:
            told = str(error).partition("\n")[0]
            raise Mismatch(f"with some of its rows backward fails: {type(error).__name__}: {told:.200}") from error
        if not follow:
            raise Mismatch("its gradients depend on other rows")

    def _place(self, found: list[tuple[int, list[int], int] | None], number: int) -> RowPlace | None:
        """Where an output has rows; found: by half the dim, the rows, and how many the whole has."""
        if found[0] is None or found[1] is None:
            if found != [None, None]:
                raise Mismatch(f"its output {number} is whole on some ranks and not on others")
            return None
        (dim, *_), (other, *_) = found
        if dim != other:
            raise Mismatch(f"its output {number} has rows in two dims")
        return RowPlace(
            dim, self._segments([(at, count) for _, at, count in filter(None, found)], f"its output {number}")
        )

    def _segments(self, halves: list[tuple[list[int], int]], what: str) -> RowSegments:
        """The segments of rows, from those of either half, each with the number of rows of the whole."""
        (first, count), (second, _) = halves
        owners, segments = [(row in set(first), row in set(second)) for row in range(count)], list[list[int]]()
        if not count or (False, False) in owners:
            raise Mismatch(f"{what} has no rows, or some that no rank has")
        for one, other in owners:  # a segment is [rows of the first half alone, of both, of the second alone]
            number = 1 if one and other else 2 * other
            if not segments or any(segments[-1][number + 1 :]) or (number == 2 and not segments[-1][0]):
                segments.append([0, 0, 0])
            segments[-1][number] += 1
        for one, both, other in segments:
            (_, stop), (start, _) = _parts(one + both + other)
            if (one or other) and (one, one + both) != (start, stop):
                raise Mismatch(f"{what} has rows in an order that is not that of its streams")
        many = {few: n for n, few in self.arguments.few.items()}
        return tuple([RowSegment(many.get(sum(each), sum(each)), each[0] > 0) for each in segments])


class _Half:
    """A run on one half of the rows of a reading. at: rows of queries and of keys of each attention."""

    def __init__(self, trial: _BlockTrial, reading: BlockReading, half: int) -> None:
        self.trial, self.reading, self.half = trial, reading, half
        self.at: list[list[tuple[list[int], int]]] = []
        self.masks: list[MaskForm | None] = []
        self.outputs: list[tuple[int, list[int], int] | None] = []
        self.results, self.leaves = list[tuple[Any, Rows]](), list[tuple[Any, Rows]]()

    def follow(self) -> None:
        """Run. Raises Mismatch for what does not follow."""
        arguments = list(self.trial.arguments.sample)
        for number, place in enumerate(self.reading.places):
            if place is not None:
                some = picked(arguments[number], place.dim, self._rows(place.segments))
                arguments[number] = some.as_subclass(_OfRows)
        for number, segments in self.reading.counts:
            arguments[number] = len(self._rows(segments))
        given, outputs = self.trial._ran(arguments, self._attend)
        if len(outputs) != len(self.trial.outputs):
            raise Mismatch("it returns another number of outputs")
        for number, (x, y) in enumerate(zip(map(_plain, outputs), self.trial.outputs)):
            self.outputs.append(self._output(x, y, number))
        places = [each and (each.dim, self._rows(each.segments)) for each in self.reading.places]
        self.leaves[:0] = zip(given, places)
        self.results[:0] = [(x, at and at[:2]) for x, at in zip(outputs, self.outputs)]

    def _rows(self, segments: RowSegments) -> list[int]:
        """The rows of the half, of an argument of the run."""
        rows, at = list[int](), 0
        for each in segments:
            count = self.trial.arguments.few.get(each.count, each.count)
            start, stop = _parts(count)[self.half] if each.cut else (0, count)
            rows += range(at + start, at + stop)
            at += count
        return rows

    def _attend(self, number: int, call: AttentionCall) -> Tensor:
        if number >= len(self.trial.calls):
            raise Mismatch("it calls attention more often with some of its rows")
        whole, out = self.trial.calls[number]
        if call[4:] != whole[4:]:
            told = ", ".join(f"{m} for {n}" for m, n in zip(call[4:], whole[4:]) if m != n)
            raise Mismatch(f"its scale or the like of attention {number} depends on the number of rows: {told}")
        query, key, value, mask = map(_plain, call[:4])
        queries = _places(query, whole.query, -2, f"its query of attention {number}")
        keys = _places(key, whole.key, -2, f"its key of attention {number}")
        if not _equal(value, whole.value.index_select(-2, index(keys, value))):
            raise Mismatch(f"its value of attention {number} depends on other rows")
        self.at.append([(queries, whole.query.shape[-2]), (keys, whole.key.shape[-2])])
        self.masks.append(_form(mask, whole.attn_mask, queries, keys, f"its mask of attention {number}"))
        own = leaf(out.detach().index_select(-2, index(queries, out)))
        self.leaves.append((own, (-2, queries)))
        self.results += [(query, (-2, queries)), (key, (-2, keys)), (value, (-2, keys))]
        return own.clone().as_subclass(_OfRows)

    def _output(self, x: Any, y: Any, number: int) -> tuple[int, list[int], int] | None:
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            if type(x) is not type(y) or type(x) not in PLAIN or x != y:
                raise Mismatch(f"its output {number} is {x!r:.80} with some of its rows and {y!r:.80} with all")
            return None
        if _equal(x, y):
            return None
        apart = [d for d, (m, n) in enumerate(zip(x.shape, y.shape)) if m != n]
        if x.dim() != y.dim() or len(apart) != 1:
            raise Mismatch(f"its output {number}, {list(y.shape)}, depends on other rows besides by attention")
        return apart[0], _places(x, y, apart[0], f"its output {number}"), y.shape[apart[0]]


def _parts(count: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The rows of either half, from where to where. Both have the one in the middle.

    The second begins at a prime, where no strides or windows of rows do, and the first ends at the next number, where
    windows of so many rows do not.
    """
    primes = (n for n in range(count // 2, 1, -1) if all(n % d for d in range(2, n)))
    middle = next(primes, count // 2)
    return (0, middle + (count > 2)), (middle, count)


def _unlikely(reason: str) -> tuple[bool, bool]:
    """The order of reasons: an output that does not follow says most, a run that fails least."""
    return not reason.startswith("its output"), not reason.startswith("its ")


def _one(several: list[Any]) -> Any:
    if several[0] != several[1]:
        raise Mismatch("its masks have other forms on other ranks")
    return several[0]


def _plain(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, _OfRows) else x


def _equal(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and close(y, x)


def _places(part: Tensor, whole: Tensor, dim: int, what: str) -> list[int]:
    """Which rows of a whole tensor those of a part are, in ascending order."""
    dim %= whole.dim()
    if part.dim() != whole.dim() or part.shape[dim] > whole.shape[dim]:
        raise Mismatch(f"{what}, {list(whole.shape)}, is {list(part.shape)} on some of its rows")
    if apart := [d for d, (m, n) in enumerate(zip(part.shape, whole.shape)) if m != n and d != dim]:
        told = "; a factorised attention is planned by stages, seqpar.dsp.parallelize" if apart[0] == 0 else ""
        raise Mismatch(f"{what}, {list(whole.shape)}, is {list(part.shape)} on some of its rows{told}")
    few, many = (real(x).movedim(dim, 0).flatten(1).double() for x in (part, whole))
    like = torch.cdist(few, many, p=torch.inf) <= 1e-3 * many.abs().max() if many.numel() else few.new_ones(len(few), 0)
    found, at = list[int](), 0
    for row in like.tolist():
        at = next((n for n in range(at, len(row)) if row[n]), len(row)) + 1
        found.append(at - 1)
    if found and found[-1] >= len(many) or not _equal(part, whole.index_select(dim, index(found, whole))):
        raise Mismatch(f"{what}, {list(whole.shape)}, depends on other rows besides by attention")
    return found


def _form(mask: Tensor | None, whole: Tensor | None, queries: list[int], keys: list[int], what: str) -> MaskForm | None:
    """The form of a mask, from that of the whole run."""
    if mask is None or whole is None:
        if mask is not whole:
            raise Mismatch(f"{what} is there or not depending on the rows")
        return None
    one = whole.dim() < 2 or whole.shape[-2] == 1
    for own_rows in (False,) if one else (False, True):
        if _equal(mask, whole.index_select(-2, index(queries, whole)) if own_rows else whole):
            return MaskForm(own_rows, False, one)
    at_keys = whole.index_select(-1, index(keys, whole)) if whole.shape[-1] > max(keys, default=0) else whole
    if _equal(mask, at_keys):
        return MaskForm(False, True, one)
    # of rows and keys that are both the rank's no rank has its rows of others' keys, unless flags of rows tell all
    if not one and queries == keys and mask.dtype == torch.bool and whole.any() and not whole.all():
        own, flags = at_keys.index_select(-2, index(queries, whole)), whole.diagonal(dim1=-2, dim2=-1)
        for one, rows in (True, torch.ones_like(flags)), (False, flags):
            if _equal(mask, own) and (whole == rows[..., None] & flags[..., None, :]).all():
                return MaskForm(True, True, one)
    raise Mismatch(f"{what}, {list(whole.shape)}, depends on other rows")
