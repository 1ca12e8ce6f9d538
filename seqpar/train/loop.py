"""`Loop`: checks on the training loop of a parallel model, between its forwards, where all ranks must do the same.

At each forward, ranks compare a hash of some weights while they announce their batches. If it differs, other weights
were loaded or drawn, or an optimizer stepped by each rank's own share of the gradients: an error.

They compare a hash of some buffers too; if it differs, each rank has loaded them, or changed them, by itself, and a
warning says so.

The host waits for no GPU, except until ranks have agreed once: later it is the hash of the forward before, which the
GPU has long computed. `sync_gradients` finds the loop by the model's parameters.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from seqpar.comm import Comm
from seqpar.comm.protocol import DEAD, PeerError
from seqpar.facts.value import Ints
from seqpar.train.dtensor import global_rank
from seqpar.train.weights import (
    BufferPlace,
    Latest,
    Sampled,
    buffer_places,
    buffers_at,
    difference,
    sampled,
    spread,
    values,
)
from seqpar.train.wrappers import Averaging, WrapperCheck, shards

WEIGHTS, BUFFERS = "weights", "buffers"

_open: weakref.WeakSet[Loop] = weakref.WeakSet()
_opening = threading.Lock()  # around uses of the set, since ranks may be threads


class Loop:
    """The ranks' shared view of the training loop around a model. Created as a collective of the comm's ranks.

    average_over: the number of ranks over which a wrapper averages the gradients; 1 if they are summed. within: where
    ranks are meanwhile, for messages.
    """

    def __init__(self, model: nn.Module, comm: Comm, *, average_over: int = 1, within: str = "parallelize") -> None:
        self.model, self.comm, self.average_over = model, comm, average_over
        self._ranks = frozenset(comm.gather(f"{within}({type(model).__name__})", global_rank()))
        self._sample: list[Sampled] = []
        self._places: list[BufferPlace] | None = []  # of buffers; None once ranks were told that these differ
        self._latest = {WEIGHTS: Latest(), BUFFERS: Latest()}
        self._shards: dict[int, int] = {}  # ids of parameters that are whole in a forward -> of those of the optimizer
        self._known: set[int] = set()  # ids of the parameters at the time of sampling
        self._grown = False  # whether other parameters have appeared
        self._agreed = False  # whether ranks have had equal weights once
        self._begun = False  # whether they have had them before parameters were new
        self._count = -1  # number of parameters on which ranks agreed
        self.reduced: Averaging | None = None  # the wrapper that reduces those of the last forward in training
        self._due = False  # whether a forward's gradients were not summed since
        self._alike: int | None = 0  # how often all ranks brought the same batch; None once that is settled
        self._checked = False  # whether the wrapper was compared with average_over
        self._wrapper = WrapperCheck(self._ranks, comm.size)
        with _opening:
            _open.add(self)

    def gather(self, what: str, value: Any, error: Exception | None, *, facts: Mapping[str, object]) -> list[Any]:
        """Every rank's value if all ranks have equal facts, no error and equal weights; costs one `Comm.gather`.

        Raises: as `Comm.gather`; ValueError on every rank if weights differ at the first call, or because gradients
        were not summed.
        """
        more = {} if self.comm.size == 1 else self._hashes()
        gathered, differing = None, ""
        try:
            gathered = self._gather(what, value, error, dict(facts) | more)
        except ValueError as refused:
            differing = getattr(refused, "differing", "")
            if differing not in more:
                raise
        if gathered is None:  # outside the except clause: its error, about digests, would be printed above this one's
            (self._compare if differing == WEIGHTS else self._compare_buffers)(what)
            gathered = self._gather(what, value, error, facts)
        if not self._agreed:
            self._agreed = self._begun = True
            self._take()
        return gathered

    def _gather(self, what: str, value: Any, error: Exception | None, facts: Mapping[str, object]) -> list[Any]:
        try:
            return self.comm.gather(what, value, error, facts=facts)
        except PeerError as error:
            said, happened = str(error), f"{what} (gathering): "
            told = f"{said.partition(DEAD)[0]}{DEAD}"
            if lost := re.search(rf"{re.escape(happened)}lost (?:the connection to )?(rank \d+)", said):
                raise PeerError(
                    f"{told}; see in the log of {lost[1]} why it ended, and if it had no batch left, give every rank "
                    "as many as the others"
                ) from error
            if f"{happened}waited" in said or f"to agree on {what}" in said:
                raise PeerError(
                    f"{told}; give every rank as many batches as the others, or run the model on one rank alone inside "
                    "`with handle.local():`, where handle is what `parallelize` returned"
                ) from error
            raise

    def note_wrapper(self, what: str, *, averaged: bool) -> None:
        """Note the wrapper that reduces the gradients of the current forward; warn once if it scales them wrongly.

        averaged: whether this loss is for a wrapper that divides by `average_over`; False if its caller scales it.
        """
        if (found := self.wrapper()) is None or self._checked or not averaged:
            return
        self._checked = True
        if misfit := found.misfit(self.comm.size, self.average_over):
            self._warn(f"{what}: {misfit.why}; give seqpar.parallelize(..., average_over={misfit.average_over})")

    def wrapper(self) -> Averaging | None:
        """The wrapper that reduces the gradients of the current forward, in training, over the comm."""
        self.reduced = self._wrapper.find(self.model)
        return self.reduced

    def note_results(self, rows: int, results: Iterable[Tensor]) -> None:
        """Note a forward that computed so many rows: in training its results have a graph, and a backward is due."""
        self._due |= rows > 0 and self.model.training and any(x.grad_fn is not None for x in results)

    def unanswered(self) -> bool:
        """Whether a backward is due and has left no gradient."""
        return self._due and all(p.grad is None for p in self.model.parameters())

    def note_batch(self, what: str, lengths: Ints, tokens: Tensor | None) -> None:
        """Warn once if all ranks bring the same batch twice in a row, as if each had its own.

        lengths: of all ranks' documents, rank after rank. tokens: of this rank's batch. This takes at most two small
        exchanges in all.
        """
        size = self.comm.size
        if self._alike is None or size == 1:
            return
        alike = lengths.size % size == 0 and bool((lengths.reshape(size, -1) == lengths[: lengths.size // size]).all())
        if not alike or len(set(self.comm.gather(f"{what}: batches", _digest(tokens)))) > 1:
            self._alike = None
            return
        self._alike += 1
        if self._alike == 2:
            self._alike = None
            self._warn(
                f"{what}: all {size} ranks bring the same batch, and each document is computed {size} times; give each "
                "rank its own, or seqpar.parallelize(..., source='replicated') to compute it once on all of them"
            )

    def summed(self, parameters: Sequence[Tensor]) -> None:
        """Note that the gradients of these parameters are now sums over ranks."""
        ids = {id(p) for p in parameters}
        self._due = False
        self._grown |= not ids <= self._known

    def averages_over(self, ranks: frozenset[int]) -> bool:
        """Whether the loss is for a wrapper that averages over some of these global ranks, as far as they are known."""
        others = ranks - {global_rank()}
        return self.average_over > 1 and not (others and others.isdisjoint(self._ranks))

    def watches(self, ids: set[int]) -> bool:
        """Whether the model has some of the parameters with these ids."""
        return any(id(p) in ids for p in self.model.parameters())

    def close(self) -> None:
        """Leave `sync_gradients` alone."""
        with _opening:
            _open.discard(self)

    def _hashes(self) -> dict[str, str]:
        """The hashes that ranks compare."""
        if self._count < 0 or self._grown or not all(each.stands() for each in self._sample):
            self._take()
        found = {WEIGHTS: self._latest[WEIGHTS].digest(self._sample, agreed=self._agreed)}
        if self._places is not None:
            found[BUFFERS] = self._latest[BUFFERS].digest(buffers_at(self._places), agreed=self._agreed)
        return found

    def _take(self) -> None:
        """Sample the model: all parameters until ranks have agreed on them, later only a few."""
        self._latest[WEIGHTS] = Latest()
        every, self._grown = sampled(self.model, self._ranks), False
        self._shards = shards(self.model)
        self._known |= {self._id(each.parameter) for each in every}
        if len(every) != self._count:  # new modules, such as adapters, whose weights were not compared yet
            self._count, self._agreed = len(every), False
        self._sample = spread(every) if self._agreed else every
        self._places = None if self._places is None else buffer_places(self.model)

    def _id(self, parameter: Tensor) -> int:
        """The id of the parameter that an optimizer has in place of this one."""
        return self._shards.get(id(parameter), id(parameter))

    def _compare(self, what: str) -> None:
        """Find the weights behind unequal hashes, and raise or warn. A collective."""
        frozen = {name for name, p in self.model.named_parameters() if not p.requires_grad}
        found = self.comm.gather(f"{what}: weights", (values(self._sample), frozen))
        for rank, (_, other) in enumerate(found):
            if odd := sorted(other ^ found[0][1]):
                where = (rank, 0) if odd[0] in other else (0, rank)
                raise ValueError(
                    f"{what}: ranks differ in what requires gradients: {odd[0]} is frozen on rank {where[0]} and not "
                    f"on rank {where[1]} ({len(odd)} in all); freeze the same parameters on every rank"
                )
        worst = difference([several for several, _ in found])
        if worst is None:
            return
        told = f"{what}: {worst.name} differs by up to {worst.largest:.3g} between rank 0 and rank {worst.rank}"
        if not self._agreed:
            since = "parameters are new" if self._begun else "nothing has trained yet"
            raise ValueError(
                f"{told}, and {since}; load the same weights on every rank, or call "
                "torch.manual_seed(0) before you create the model"
            )
        if math.isinf(worst.largest):
            raise ValueError(
                f"{told}: one of them is infinite or NaN, as after a step that only some ranks skipped; start again "
                "from equal weights, and call sync_gradients before GradScaler.unscale_, so that all ranks find the "
                "same overflow"
            )
        raise ValueError(
            f"{told}: an optimizer stepped with gradients that were not summed over ranks, or stepped before their "
            "sum, or some ranks loaded or drew other weights; start again from equal weights, call "
            "seqpar.train.sync_gradients(model.parameters(), comm) before every step, and load weights on every rank"
        )

    def _compare_buffers(self, what: str) -> None:
        """Find the buffers behind unequal hashes, and warn once. A collective."""
        worst = difference(self.comm.gather(f"{what}: buffers", values(buffers_at(self._places or ()))))
        if worst is None:
            return
        self._places = None
        by = "" if math.isinf(worst.largest) else f" by up to {worst.largest:.3g}"
        self._warn(
            f"{what}: {worst.name} differs{by} between rank 0 and rank {worst.rank}: a buffer, which each rank has "
            "loaded or changed by itself; broadcast it from one rank, and make its changes from the tokens of all "
            "ranks, as by seqpar.train.token_mean"
        )

    def _warn(self, text: str) -> None:
        """Warn, on one rank."""
        if not self.comm.rank:
            warnings.warn(text, stacklevel=3)


def _digest(tokens: Tensor | None) -> bytes:
    """A hash of at most a few thousand values of the tokens, equal for equal tensors."""
    if tokens is None or not tokens.numel():
        return b""
    flat = tokens.detach().reshape(-1)
    some = flat[:: -(-len(flat) // 4096)].contiguous().cpu().view(torch.uint8)
    return hashlib.blake2b(f"{list(tokens.shape)}".encode() + some.numpy().tobytes(), digest_size=8).digest()


def loops_of(parameters: Sequence[Tensor]) -> list[Loop]:
    """The loops around models that have some of these parameters."""
    with _opening:
        every = list(_open)
    ids = {id(p) for p in parameters}
    return [loop for loop in every if loop.watches(ids)]
