"""Plans acted out on pairs of tokens, without a tensor."""

from __future__ import annotations

import numpy as np

from seqpar.plan import Plan, Step
from seqpar.testing import seen_pairs


def rounds(plan: Plan) -> list[list[Step | None]]:
    """Step number -> rank -> step."""
    by_rank = [{s.number: s for s in plan.steps(r)} for r in range(plan.ranks)]
    numbers = sorted({n for steps in by_rank for n in steps})
    return [[steps.get(n) for steps in by_rank] for n in numbers]


def act_out(plan: Plan) -> np.ndarray:
    """Runs the exchanges on token numbers; returns how often each (query, key) was computed, and checks buffers."""
    seen = np.zeros((plan.mask.tokens, plan.mask.kv_tokens), int)
    before: list[np.ndarray | None] = [None] * plan.ranks
    entered: list[np.ndarray | None] = [None] * plan.ranks  # with the round before
    for steps in rounds(plan):
        entries = [None if step is None or step.entry is None else enter(steps, r) for r, step in enumerate(steps)]
        buffers: list[np.ndarray | None] = [None] * plan.ranks
        for rank, step in enumerate(steps):
            if step is None:
                continue
            if step.local:
                buffers[rank] = step.part.keys
                continue
            buffer = np.full(step.pos.size, -7)
            if step.own is not None:
                buffer[step.own] = step.part.keys
            for peer, rows in step.recvs.items():
                theirs = steps[peer]
                assert theirs is not None, f"rank {peer} sends nothing that rank {rank} expects"
                source = before[peer] if theirs.relay else theirs.part.keys
                if theirs.relay and before[peer] is None:
                    source = theirs.part.keys
                if theirs.spread is not None:
                    source = entered[peer]
                buffer[rows] = source[theirs.sends[rank]]
            for peer in step.sends:
                assert rank in steps[peer].recvs, f"rank {peer} does not expect what rank {rank} sends"
            if step.spread is not None:
                assert (buffer[step.spread.place] == -7).all(), "what enters here comes from nobody else"
                buffer[step.spread.place] = entered[rank]
            buffers[rank] = buffer
        for rank, step in enumerate(steps):
            if step is None:
                continue
            assert (np.diff(step.pos) > 0).all()
            np.testing.assert_array_equal(buffers[rank], step.pos)
            queries = inside_queries(plan, rank, step)
            for band in step.bands:
                pairs = (step.pos >= band.lo[:, None]) & (step.pos < band.hi[:, None])
                if band.until is not None:
                    pairs &= band.at[:, None] < band.until
                if step.part.share == 0:
                    seen[np.ix_(queries, step.pos)] += pairs
            before[rank] = step.pos
        entered = entries
    return seen


def enter(steps: list[Step | None], rank: int) -> np.ndarray:
    """The keys of a rank's entry."""
    entry = steps[rank].entry
    got = [np.zeros(0, int)]
    for peer, rows in entry.recvs.items():
        assert rows.start == sum(x.size for x in got), "consecutive, in this order"
        got.append(steps[peer].part.keys[steps[peer].entry.sends[rank]])
        assert got[-1].size == rows.stop - rows.start > 0
    for peer in entry.sends:
        assert rank in steps[peer].entry.recvs, f"rank {peer} does not expect what rank {rank} sends"
    return np.concatenate(got)


def inside_queries(plan: Plan, rank: int, step: Step) -> np.ndarray:
    """Global query numbers of the inside rows."""
    inside = np.full(step.part.q.rows, -1)
    for member, dest in step.part.q.dest.items():
        at = plan.layout.positions(member)
        width = plan.widths[plan.mask.documents(at)]
        inside[dest] = np.sort(at[width == step.part.width])
    return inside


def dense(plan: Plan) -> np.ndarray:
    """How often each pair should be computed: once if attended."""
    return seen_pairs(plan.mask).astype(int)


def check_gradients(plan: Plan) -> None:
    """Each rank adds 1 to the gradient of every key row it holds; the owner must end up with the number of holders."""
    home = {}
    wanted = {}
    carried: dict[int, np.ndarray] = {}
    for steps in rounds(plan):
        grads = {}
        sums = {}
        for rank, step in enumerate(steps):
            if step is None:
                continue
            key = (rank, step.part.width)
            home.setdefault(key, np.zeros(step.part.keys.size, int))
            held = wanted.setdefault((step.part.width, step.part.share), np.zeros(plan.mask.kv_tokens, int))
            held[step.pos] += 1
            grad = np.ones(step.pos.size, int)
            if step.local:
                home[key] += grad
            else:
                grad += carried.pop(rank, 0)
                if step.own is not None:
                    home[key] += grad[step.own]
                grads[rank] = grad
        for rank, step in enumerate(steps):
            if step is None or step.local:
                continue
            target = home[rank, step.part.width]
            if step.spread is not None:
                target = sums[rank] = grads[rank][step.spread.place].copy()
            for peer, rows in step.grad_recvs.items():
                target[rows] += grads[peer][steps[peer].grad_sends[rank]]
            for peer in step.grad_sends:
                assert rank in steps[peer].grad_recvs or steps[peer].carry == rank
            if step.carry is not None:
                sent = steps[step.carry].grad_sends.get(rank)
                if sent is not None:
                    carried[rank] = grads[step.carry][sent]
        for rank, step in enumerate(steps):
            if step is not None and step.spread is not None:
                for peer, rows in step.spread.sends.items():
                    theirs = steps[peer].spread.recvs[rank]
                    home[rank, step.part.width][rows] += sums[peer][theirs]
    for (rank, width), got in home.items():
        part = next(s.part for s in plan.steps(rank) if s.part.width == width)
        np.testing.assert_array_equal(got, wanted[width, part.share][part.keys])
