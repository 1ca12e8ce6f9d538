"""Dropout: known answers, committed vectors, statistics, and the same pairs at any number of ranks.

The oracle is written here from the definition in numpy's unsigned integers, and shares no code with the kernels.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import seqpar
from seqpar import Layout, Mask, Plan
from seqpar.comm import Comm
from seqpar.facts.value import Memo
from seqpar.kernels import dropout
from seqpar.testing import run_threads

M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: list[np.ndarray], key: tuple[int, int]) -> list[np.ndarray]:
    """Philox4x32-10, all four words."""
    with np.errstate(over="ignore"):
        c = [np.asarray(x, np.uint32) for x in counter]
        k = [np.uint32(x) for x in key]
        for _ in range(10):
            p0, p1 = M0 * c[0].astype(np.uint64), M1 * c[2].astype(np.uint64)
            high0, high1 = ((p >> np.uint64(32)).astype(np.uint32) for p in (p0, p1))
            c = [high1 ^ c[1] ^ k[0], p1.astype(np.uint32), high0 ^ c[3] ^ k[1], p0.astype(np.uint32)]
            k = [k[0] + np.uint32(WEYL[0]), k[1] + np.uint32(WEYL[1])]
    return c


def mix(x: np.ndarray) -> np.ndarray:
    """The hash of a pair's word."""
    with np.errstate(over="ignore"):
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))


def kept(seed: int, heads: int, queries: np.ndarray, keys: np.ndarray, p: float) -> np.ndarray:
    """Which pairs are kept, [heads, queries, keys]."""
    seed %= 1 << 64
    key = (seed & 0xFFFFFFFF, seed >> 32)
    result = []
    for head in range(heads):
        a = philox([queries, np.full_like(queries, head), 0 * queries, 0 * queries], key)[0]
        b = philox([keys, np.full_like(keys, head), 0 * keys + 1, 0 * keys], key)[0]
        result.append(mix(a[:, None] ^ b[None]).astype(np.uint64) >= np.uint64(int(p * 2**32)))
    return np.stack(result)


def unsigned(words: torch.Tensor) -> list[int]:
    return [int(w) % (1 << 32) for w in words.flatten()]


# Random123's kat_vectors: counter, key, answer.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_known_answers(counter, key, answer) -> None:
    assert [int(w) for w in philox([np.array(c) for c in counter], key)] == list(answer)
    assert int(dropout.philox(tuple(torch.tensor(c) for c in counter), key)) == answer[0]


# (seed, head, position) -> words a and b. Every kernel in every language must give these.
WORDS = {
    (0, 0, 0): (0x6627E8D5, 0x844515E1),
    (0, 0, 1): (0xF8E4CCA4, 0xCA7CF69E),
    (0, 1, 0): (0x6AD0C5EC, 0x79D48E11),
    (1, 0, 0): (0xE3E80670, 0x07071C12),
    (4294967296, 0, 0): (0xFDDE3E0B, 0x7F6C13FF),
    (1311768467463790320, 5, 131071): (0x510FF5AE, 0x397C3FE1),
    (-1, 127, 2147483647): (0x6E92EE09, 0xFCE35F25),
    (1234567890123, 3, 1048575): (0x54ADA101, 0xBED7E2C3),
}


@pytest.mark.parametrize(("seed", "head", "position"), WORDS)
def test_committed_words(seed, head, position) -> None:
    at, heads = torch.tensor([position], dtype=torch.int32), range(head, head + 1)
    got = tuple(unsigned(word)[0] for word in dropout.words(at, at, heads, seed))
    assert got == WORDS[seed, head, position]
    assert all(map(torch.equal, dropout.words(at, at, heads, seed), dropout.words(at, at, heads, seed + 2**64)))


@given(
    st.integers(-(2**63), 2**64 - 1),
    st.integers(0, 200),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([2.0**-33, 2.0**-32, 1 - 2.0**-32, 1 - 2.0**-53])),
)
def test_words_and_pairs_follow_the_definition(seed, first, queries, keys, p) -> None:
    heads = range(first, first + 2)
    a, b = dropout.words(*(torch.tensor(x, dtype=torch.int32) for x in (queries, keys)), heads, seed)
    got = dropout.keep(a[..., None], b[:, None], p).numpy()
    np.testing.assert_array_equal(got, kept(seed, first + 2, np.array(queries), np.array(keys), p)[first:])


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_the_share_of_kept_pairs_is_one_less_p(p) -> None:
    at = torch.arange(600)
    heads = range(4)
    a, b = dropout.words(at, at, heads, 7)
    keep = dropout.keep(a[..., None], b[:, None], p).double()
    sigma = (p * (1 - p) / keep[0].numel()) ** 0.5
    assert ((keep.mean((1, 2)) - (1 - p)).abs() < 5 * sigma).all(), "each head"
    line = (p * (1 - p) / len(at)) ** 0.5
    for dim in (1, 2):
        shares = keep.mean(dim)
        assert (shares - (1 - p)).abs().max() < 6 * line, "each query and each key"
        assert shares.var() < 1.25 * line**2
    flat = (keep - keep.mean()).flatten(1)
    assert (torch.corrcoef(flat) - torch.eye(4, dtype=torch.float64)).abs().max() < 5 / flat.shape[1] ** 0.5
    for lag in (1, 2, 16):
        for x, y in ((keep[:, lag:], keep[:, :-lag]), (keep[:, :, lag:], keep[:, :, :-lag])):
            joint = ((x - (1 - p)) * (y - (1 - p))).mean()
            assert joint.abs() < 6 * p * (1 - p) / x.numel() ** 0.5, f"neighbours at distance {lag}"


TOKENS, HEADS, KV_HEADS, P, SEED = 45, 6, 3, 0.4, -98765432109876543


def pattern(comm: Comm, plan: Plan, kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Which pairs this rank's queries keep, [rows, H, keys], and which its keys' gradients saw, [rows, H_kv, queries].

    Values are unit vectors, so that the output is the matrix of probabilities after dropout; likewise for the
    gradients of the output and of values.
    """
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(TOKENS, HEADS, 4, generator=g), torch.randn(plan.mask.kv_tokens, KV_HEADS, 4, generator=g)
    v = torch.eye(plan.mask.kv_tokens)[:, None].expand(-1, KV_HEADS, -1)
    q, k, v = (seqpar.shard(x, plan, comm.rank, side=s).contiguous() for x, s in ((q, "q"), (k, "kv"), (v, "kv")))
    v.requires_grad_()
    out = seqpar.attention(q, k, v, plan, comm, dropout_p=P, dropout_seed=SEED, kernel=kernel)
    dout = torch.zeros_like(out)
    at = torch.from_numpy(plan.positions(comm.rank))
    dout[torch.arange(len(at)), :, at % out.shape[2]] = 1.0
    out.backward(dout)
    return out.detach() > 0, v.grad > 0


def gathered(parts: list[torch.Tensor], layout: Layout) -> np.ndarray:
    whole = np.zeros((layout.total, *parts[0].shape[1:]), bool)
    for rank, part in enumerate(parts):
        whole[layout.positions(rank)] = part.numpy()
    return whole


SPREADS = [
    (1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (8, 1), (8, 2), (8, 8),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "ulysses"), SPREADS)
@pytest.mark.parametrize(("layout", "transport"), [("zigzag", "fetch"), ("striped", "ring")])
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.sampled(3)
def test_the_same_pairs_are_dropped_at_any_number_of_ranks(ranks, ulysses, layout, transport, kernel) -> None:
    lengths = [30, 1, 14]
    made = Layout.zigzag(lengths, ranks) if layout == "zigzag" else Layout.striped(TOKENS, ranks)
    plan = Plan(Mask(lengths), made, ulysses=ulysses, transport=transport, stage_bytes=10 * 4096)
    results = run_threads(ranks, pattern, plan, kernel)
    lo, hi = plan.mask.bounds(np.arange(TOKENS))
    keys = np.arange(TOKENS)
    seen = (keys >= lo[:, None]) & (keys < hi[:, None])
    keep = kept(SEED, HEADS, keys, keys, P) & seen
    np.testing.assert_array_equal(gathered([out for out, _ in results], made), keep.transpose(1, 0, 2))
    # A gradient of key j at column i is that of query i, and of any of the query heads that read the key head.
    saw = keep.reshape(KV_HEADS, HEADS // KV_HEADS, TOKENS, TOKENS).any(1)
    np.testing.assert_array_equal(gathered([dv for _, dv in results], made), saw.transpose(2, 0, 1))


def test_positions_of_cross_attention_are_those_of_keys() -> None:
    """Query i of n against m keys stands at key i + m - n, as for ALiBi."""
    plan = Plan(
        Mask([TOKENS], kv_lengths=[60]), Layout.contiguous(TOKENS, 2), kv_layout=Layout.striped(60, 2), transport="ring"
    )
    results = run_threads(2, pattern, plan, "auto")
    at, keys = np.arange(TOKENS) + 15, np.arange(60)
    keep = kept(SEED, HEADS, at, keys, P) & (keys <= at[:, None])
    np.testing.assert_array_equal(gathered([out for out, _ in results], plan.layout), keep.transpose(1, 0, 2))


def test_threads_of_other_seeds_share_a_steps_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each finds its own: a thread that takes out another one's would leave it without."""
    monkeypatch.setattr(dropout, "words", lambda queries, keys, heads, seed: seed)
    facts: Any = Memo()
    facts.pos = facts.key_pos = None
    facts._memo = {}

    def found(thread: int) -> bool:
        seeds = [thread + 4 * (n % 2) for n in range(20_000)]
        return all(dropout.step_words(facts, range(2), seed) == seed for seed in seeds)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(found, range(4)))
    finally:
        sys.setswitchinterval(before)
