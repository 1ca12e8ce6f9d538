"""What every rank derives from a plan without a message: rows, degrees, steps and bytes, equal on all ranks.

A call consists of parts, one for each Ulysses width among the documents. A part consists of steps: in each, keys arrive
and queries attend to them. `residence` locates the documents, `parts` is the exchange of tokens for heads, `routes` and
`hierarchy` move keys inside a part. This file numbers the steps of one rank::

    widths 1 and 4, "fetch"    |        part of width 1         |        part of width 4         |
    step                       |  0 own keys  | 1 | 2 | ...     |  n own keys  | n + 1 | ...     |

Ranks and groups: inside a part of width w, routes number groups of w ranks. Group ``g`` stands for rank
``g * w + share``, whose share of the heads is the same as this rank's.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seqpar.facts.intervals import Holders
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.facts.value import Fact, Ints, cached, integer, is_integer
from seqpar.plan.fetched import Fetched
from seqpar.plan.hierarchy import fetch_by_node
from seqpar.plan.parts import head_share, part_of, replicated
from seqpar.plan.residence import Residence
from seqpar.plan.routes import LOCAL, Demand, StepRoute, gather, ring
from seqpar.plan.steps import Entry, Part, Rows, Step, count
from seqpar.plan.traffic import HeadShape, traffic

NOMINAL_ROW_BYTES = 4096  # of one token's keys and values: 8 heads of 128 in bf16


class Prediction(Protocol):
    """A forecast of a step as plans show it: planners make forecasts, plans only carry them."""

    @property
    def node(self) -> int:
        """Ranks of a node of the machine."""

    @property
    def call(self) -> dict[str, Any]:
        """A layer's heads, key heads, dims and dtype, as `Plan.bytes` takes them."""

    @property
    def phases(self) -> dict[str, NDArray[np.float64]]:
        """Seconds of every rank in a step, by activity."""

    @property
    def least(self) -> float:
        """A lower bound on the seconds of any plan."""

    @property
    def what(self) -> str:
        """The model and the machine, in a few words."""

    @property
    def headline(self) -> str:
        """Seconds of the slowest rank and the gap to the bound, in a few words."""


class Derived(Fact):
    """A plan's facts and everything derived from them; `Plan` creates and checks them.

    widths: the Ulysses width of each document. forecast: the planner's prediction, not part of the plan's identity.
    """

    mask: Mask
    layout: Layout
    kv_layout: Layout
    ranks: int
    ulysses: int | tuple[int, ...]
    widths: Ints
    transport: str
    node: int | None
    stage_bytes: int
    forecast: Prediction | None
    _rows: Ints

    @property
    def residence(self) -> Residence:
        """The location of the documents, and the ranks that hold some of each; cached."""
        return self.memo("residence", lambda: Residence(self.mask, self.layout, self.kv_layout))

    @property
    def degrees(self) -> Ints:
        """Number of ranks that hold tokens of each document, [documents]."""
        return self.residence.degrees

    @property
    @cached
    def merges(self) -> bool:
        """Whether some row's keys come in several steps or bands, whose results are merged. Equal on all ranks."""
        if len(self.mask.bands) > 1:
            return True
        if self.transport == "gather" or (self.widths == self.ranks).all():
            return False
        if not self.mask.within_documents:
            return True
        if self.residence.one_side and (self.degrees == 1).all():
            return False
        queries, keys = (self.residence.groups(side, self.widths) for side in ("q", "kv"))
        return len(queries) != len(self.mask.lengths) or not np.array_equal(queries, keys)

    def sums_key_gradients(self, heads: int, kv_heads: int) -> bool:
        """Whether some key's gradient may be a sum over ranks: several hold the key or share its head."""
        if self.merges or any(replicated(heads, kv_heads, w) for w in set(self.widths.tolist())):
            return True
        return self.transport == "gather" and bool((self.widths < self.ranks).any())

    def rows(self, rank: int, side: str = "q") -> int:
        """Rows of a rank's tensors, pads included; ``side`` "q" or "kv"."""
        if side not in ("q", "kv"):
            raise ValueError(f'side must be "q" or "kv", got {side!r}')
        self._check_rank(rank)
        if side == "kv" and self.kv_layout is not self.layout:
            return self.kv_layout.tokens(rank)
        return int(self._rows[rank])

    def _check_rank(self, rank: int) -> None:
        if not is_integer(rank) or not 0 <= rank < self.ranks:
            raise ValueError(
                f"rank {rank!r} is not one of the plan's {self.ranks} ranks; give 0 to {self.ranks - 1}, or make the "
                "plan for all ranks of the comm"
            )

    def positions(self, rank: int, side: str = "q") -> Ints:
        """Global positions [rows] of a rank's rows, -1 for pads."""
        at = self.residence.layout_of(side).positions(rank)
        return np.append(at, np.full(self.rows(rank, side) - at.size, -1, np.int64))

    def rope_positions(self, rank: int) -> Ints:
        """Positions [rows] of a rank's query rows inside their documents, in trees along their paths; 0 for pads."""
        return np.maximum(self.mask.depths(self.positions(rank)), 0)

    def steps(self, rank: int, *, row_bytes: int = NOMINAL_ROW_BYTES) -> list[Step]:
        """The steps of a rank, part after part. row_bytes: of a token's keys and values; alike on all ranks."""
        self._check_rank(rank)
        stage_rows = max(1, self.stage_bytes // integer("row_bytes", row_bytes, 1))
        if self.transport != "fetch":
            stage_rows = 0  # the other transports have no stages
        return self._steps(rank, stage_rows)

    @cached
    def _steps(self, rank: int, stage_rows: int) -> list[Step]:
        steps: list[Step] = []
        for width in np.flatnonzero(np.bincount(self.widths)).tolist():
            part = self.memo(("part", rank, width), partial(part_of, self.residence, self.widths, rank, width))
            routes = self._routes(part, rank // width, stage_rows)
            steps += _numbered(part, len(steps), routes, relay="ring" in self.transport)
        return steps

    def _routes(self, part: Part, group: int, stage_rows: int) -> list[StepRoute]:
        """The routes of one part's keys to a group of ranks, one per step."""
        demand = self.demand(part.width)
        if self.transport == "gather":
            return list(gather(demand, group, part.keys))
        inner = demand.groups if self.node is None else self.node // part.width
        if self.transport == "fetch":
            return [LOCAL, *fetch_by_node(demand, group, part.keys, stage_rows, inner)]
        if self.transport == "ring":
            inner = demand.groups
        elif self.node is None:
            inner = max(d for d in range(1, int(demand.groups**0.5) + 1) if demand.groups % d == 0)
        return [LOCAL, *ring(demand, group, part.keys, inner)]

    @cached
    def demand(self, width: int) -> Demand:
        """The keys that groups need and own in the documents of one width; cached."""
        return Demand.of(self.mask, self._holders(width, "q"), self._holders(width, "kv"), self.ranks // width)

    def _holders(self, width: int, side: str) -> Holders:
        """The groups that hold the rows of the documents of one width."""
        layout = self.residence.layout_of(side)
        if (self.widths == width).all():
            held = layout.holders()
            return held if width == 1 else Holders(held.runs, held.holder // np.int32(width), held.total)
        piece, rank, document = self.residence.pieces(side)
        kept = self.widths[document] == width
        return Holders(piece.pick(kept), (rank[kept] // width).astype(np.int32), layout.total)

    def fetched(self, rank: int) -> Fetched:
        """The keys that `seqpar.fetch` brings a rank: those that its own query rows see, at any width; a copy."""
        return deepcopy(self.fetch_table(rank))

    @cached
    def fetch_table(self, rank: int) -> Fetched:
        """`fetched` as all calls share it; cached."""
        self._check_rank(rank)
        demand = self._demand_of_ranks()
        return Fetched.of(self.mask, demand, rank, self.positions(rank), self.kv_layout.positions(rank))

    @cached
    def _demand_of_ranks(self) -> Demand:
        """The keys that each rank's own queries see, of all documents."""
        if (self.widths == 1).all():
            return self.demand(1)
        return Demand.of(self.mask, self.layout.holders(), self.kv_layout.holders(), self.ranks)

    def fetch_bytes(self, rank: int, *, row_bytes: int, backward: bool = False) -> int:
        """Bytes that a rank sends in one `seqpar.fetch`: in forward, or with ``backward`` in backward.

        row_bytes: of one row of the fetched tensor or tensors; in backward of those that require a gradient. Counts
        tensor contents, as `Comm.stats` does.
        """
        return self.fetch_table(rank).sent(rank, backward=backward) * integer("row_bytes", row_bytes, 0)

    def row_bytes(self, heads: int, kv_heads: int, dim: int, v_dim: int, size: int) -> int:
        """Bytes of one token's keys and values on the rank with most key heads; this bounds the stages of all ranks."""

        def most() -> int:
            shares = (head_share(heads, kv_heads, w, s)[1] for w in set(self.widths.tolist()) for s in range(w))
            return max(s.stop - s.start for s in shares)

        return max(1, int(self.memo(("key heads", heads, kv_heads), most)) * (dim + v_dim) * size)

    def traffic(self, rank: int, **shape: Any) -> dict[int, int]:
        """Bytes that a rank sends to each peer in one attention call; arguments as in `bytes`."""
        s = HeadShape(**shape)
        steps = self.steps(rank, row_bytes=self.row_bytes(s.heads, s.kv_heads, *s.wire, s.size))
        return traffic(steps, rank, s)

    def bytes(
        self,
        rank: int,
        *,
        heads: int,
        kv_heads: int,
        dim: int,
        v_dim: int | None = None,
        dtype: str = "bfloat16",
        backward: bool = False,
        return_lse: bool = False,
        kv_grads: bool = True,
        latent: tuple[int, int] | None = None,
    ) -> int:
        """Bytes that a rank sends in one attention call: in forward, or with ``backward`` in backward.

        Counts tensor contents, as `Comm.stats` does. dtype: "float64", "float32", "bfloat16" or "float16".
        kv_grads: whether keys or values require a gradient. latent: (R, E) of `seqpar.latent_attention`, with dim
        D_n + E, v_dim D_v and kv_heads=1.
        """
        sent = self.traffic(
            rank, heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim, dtype=dtype, backward=backward,
            return_lse=return_lse, kv_grads=kv_grads, latent=latent,
        )  # fmt: skip
        return sum(sent.values())


def _numbered(part: Part, number: int, routes: list[StepRoute], *, relay: bool) -> list[Step]:
    """The steps of one part, numbered from ``number``.

    Every rank has every number, even where it moves nothing: exchanges are posted in the order of the numbers, which
    must be one order on all ranks.
    """
    last = max((n for n, route in enumerate(routes) if route.pos.size), default=0)
    steps: list[Step] = []
    for n, route in enumerate(routes):
        local = route is LOCAL
        onward = routes[n + 1].pos.size if route.carry is not None else 0
        sends, recvs = _by_rank(part, route.sends), _by_rank(part, route.recvs)
        if (entry := route.entry) is not None:
            entry = Entry(_by_rank(part, entry.sends), _by_rank(part, entry.recvs), entry.place)
        # Gradients mostly return the way the keys came: thousands of messages are renamed only once.
        grad_sends = recvs if route.grad_sends is route.recvs else _by_rank(part, route.grad_sends)
        grad_recvs = sends if route.grad_recvs is route.sends else _by_rank(part, route.grad_recvs)
        steps.append(
            Step(
                part, number + n, part.keys if local else route.pos, local=local, own=route.own, relay=relay,
                entry=entry, spread=steps[-1].entry if steps else None, sends=sends, recvs=recvs, grad_sends=grad_sends,
                grad_recvs=grad_recvs,
                carry=None if route.carry is None else route.carry * part.width + part.share, carry_rows=onward,
                first=n == 0, last=n == last, ends=n == len(routes) - 1,
            )
        )  # fmt: skip
    return steps


def _by_rank(part: Part, by_group: Mapping[int, Rows]) -> dict[int, Rows]:
    """Messages by group, readdressed to the group's rank with the same share of the heads."""
    return {g * part.width + part.share: rows for g, rows in sorted(by_group.items()) if count(rows)}
