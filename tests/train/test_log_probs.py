"""Log-probabilities and entropies of rows: those of dense logits, forward and backward, without the whole of them."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from seqpar import Comm
from seqpar.data import back, share
from seqpar.testing import relative_rms, run_threads
from seqpar.train import cross_entropy, linear_cross_entropy, token_log_probs
from tests.train.rows import IGNORED, E, T, V, given, grads


def dense(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, temperature: float = 1.0, cap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Both results, by torch, from all logits."""
    logits = F.linear(hidden, weight, bias)
    if cap:
        logits = cap * torch.tanh(logits / cap)
    log_p = (logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits).div(temperature)
    log_p = log_p.log_softmax(-1)
    keep = labels != IGNORED
    chosen = log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return chosen * keep, -(log_p.exp() * log_p).sum(-1) * keep


FACTORS = torch.randn(2, T, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
FACTORS[:, 5] = 0.0
USED = {"log_probs": (1, 0), "entropies": (0, 1), "both": (1, 1)}


def weighted(results: tuple[Tensor, Tensor], used: tuple[int, int]) -> Tensor:
    """A loss that weighs every row's results by other factors."""
    return sum((f.to(x.dtype) * x).sum() for f, x, u in zip(FACTORS[:, : len(results[0])], results, used) if u)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("used", USED.values(), ids=USED)
@pytest.mark.parametrize(("temperature", "cap", "biased"), [(1.0, 0.0, False), (0.7, 0.0, True), (1.3, 2.0, True)])
def test_results_and_gradients_are_those_of_dense_logits(
    frozen: bool, used: tuple[int, int], temperature: float, cap: float, biased: bool
) -> None:
    hidden, weight, bias, labels = given()
    leaves = [hidden.requires_grad_()] if frozen else [x.requires_grad_() for x in (hidden, weight, bias)[: 2 + biased]]
    bias = bias if biased else None
    expected = dense(hidden, weight, bias, labels, temperature=temperature, cap=cap)
    options: dict[str, Any] = {"bias": bias, "temperature": temperature, "softcap": cap, "chunk": 4}
    found = token_log_probs(hidden, weight, labels, entropy=True, **options)
    assert all(torch.equal(x == 0, labels == IGNORED) for x in found)
    for got, reference in zip(found, expected):
        torch.testing.assert_close(got, reference, rtol=1e-12, atol=1e-12)
    wanted = grads(weighted(expected, used), *leaves)
    for got, reference in zip(grads(weighted(found, used), *leaves), wanted, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-10, atol=1e-12)
    alone = token_log_probs(hidden, weight, labels, **options)
    assert torch.equal(alone, found[0])
    alone.mul_(1)  # results are tensors of their own
    if used == USED["log_probs"]:
        for got, reference in zip(grads(weighted((alone,), used), *leaves), wanted, strict=True):
            torch.testing.assert_close(got, reference, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("used", USED.values(), ids=USED)
def test_a_token_with_a_bias_of_minus_infinity_is_not_there(frozen: bool, used: tuple[int, int]) -> None:
    hidden, weight, bias, labels = given()
    bias[-2:], labels = -math.inf, labels.clamp(max=V - 3)
    leaves = [x.requires_grad_(x is hidden or not frozen) for x in (hidden, weight, bias)]
    leaves = leaves[:1] if frozen else leaves
    expected = dense(hidden, weight[:-2], bias[:-2], labels)
    found = token_log_probs(hidden, weight, labels, bias=bias, entropy=True)
    for got, reference in zip(found, expected):
        torch.testing.assert_close(got, reference, rtol=1e-12, atol=1e-12)
    wanted = grads(weighted(expected, used), *leaves)
    for got, reference in zip(grads(weighted(found, used), *leaves), wanted, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("needs", [combination for combination in product((False, True), repeat=3) if any(combination)])
def test_gradients_that_nobody_needs_are_not_made(needs: tuple[bool, ...]) -> None:
    *leaves, labels = given()
    leaves = [x.requires_grad_(need) for x, need in zip(leaves, needs)]
    asked = [x for x in leaves if x.requires_grad]
    expected = grads(weighted(dense(*leaves, labels), (1, 0)), *asked)
    made: list[tuple[int, ...]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            made.extend([tuple(out.shape)] if isinstance(out, Tensor) else [])
            return out

    with Watch():
        found = grads(token_log_probs(*leaves[:2], labels, bias=leaves[2]) @ FACTORS[0], *asked)
    for got, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-10, atol=1e-12)
    products = [shape for shape in made if shape == (V, E)]
    assert bool(products) == needs[1], "a weight that does not train costs no product"


def test_without_gradients_nothing_is_kept() -> None:
    hidden, weight, bias, labels = given()
    log_probs, entropies = token_log_probs(hidden, weight, labels, bias=bias, entropy=True)
    assert not log_probs.requires_grad and not entropies.requires_grad


@pytest.mark.parametrize("rows", [0, T])
@pytest.mark.parametrize("entropy", [False, True])
def test_a_rank_without_labels_has_zeros_that_lead_to_its_rows(entropy: bool, rows: int) -> None:
    hidden, weight, _, _ = given()
    hidden = hidden[:rows].requires_grad_()
    for leaves in ((hidden,), (hidden, weight.requires_grad_())):
        found = token_log_probs(hidden, weight, torch.full((rows,), IGNORED), entropy=entropy)
        results = found if entropy else (found,)
        for result in results:
            assert result.shape == (rows,) and not result.any() and result.requires_grad
            assert not result.signbit().any(), "0, not -0"
        for grad, leaf in zip(grads(sum(x.sum() for x in results), *leaves), leaves):
            assert torch.equal(grad, torch.zeros_like(leaf))


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_low_precision_errs_no_more_than_torch_does(dtype: torch.dtype, autocast: bool, frozen: bool) -> None:
    hidden, weight, _, labels = given()
    leaves = [x.to(torch.float32 if autocast else dtype).requires_grad_() for x in (hidden, weight)]
    leaves[1].requires_grad_(not frozen)
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in leaves]
    expected = dense(*exact, None, labels, temperature=0.9)
    with torch.autocast("cpu", dtype, enabled=autocast and dtype != torch.float32):
        naive = dense(*leaves, None, labels, temperature=0.9)
        ours = token_log_probs(*leaves, labels, temperature=0.9, entropy=True, chunk=7)
    # torch's sums of fp32 have another order on each processor, so one rounding more or less is no error
    least = torch.finfo(dtype).eps / (1 if dtype == torch.float32 else 4)
    for got, *others in zip(ours, naive, expected):
        other, reference = (x.detach() for x in others)
        assert got.dtype == torch.float32
        assert relative_rms(got.detach(), reference) <= 1.05 * relative_rms(other, reference) + least
    for used in USED.values():
        for got, other, reference, leaf in zip(
            *(
                torch.autograd.grad(weighted(f, used), [y for y in x if y.requires_grad], retain_graph=True)
                for f, x in ((ours, leaves), (naive, leaves), (expected, exact))
            ),
            leaves,
        ):
            assert got.dtype == leaf.dtype
            assert relative_rms(got, reference) <= 1.5 * relative_rms(other, reference) + least


def test_half_precision_gradients_do_not_underflow_by_the_size_of_factors() -> None:
    hidden, weight, _, labels = given()
    for size in (1e-9, 1e7):
        leaves = [x.to(torch.float16).requires_grad_() for x in (hidden, weight)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        factors = FACTORS * size
        ours = token_log_probs(*leaves, labels, entropy=True)
        found = torch.autograd.grad(ours, leaves, [f.float() for f in factors])
        expected = torch.autograd.grad(dense(*exact, None, labels), exact, list(factors))
        for got, reference in zip(found, expected):
            same = got.double() if size > 1 else got.double().where(reference.abs() > 1e-6, reference)
            assert relative_rms(same.clamp(-6e4, 6e4), reference.clamp(-6e4, 6e4)) < 2e-3


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [1e9, math.inf, math.nan])
def test_gradients_of_rows_that_do_not_count_have_no_effect(size: float, dtype: torch.dtype, frozen: bool) -> None:
    hidden, weight, _, labels = given(dtype=dtype)
    leaves = [x.requires_grad_(need) for x, need in zip((hidden, weight), (True, not frozen))]
    found = token_log_probs(*leaves, labels, entropy=True)
    asked = [x for x in leaves if x.requires_grad]
    for used in ((0,), (1,), (0, 1)):
        results, factors = [found[n] for n in used], [FACTORS[n].float() for n in used]
        several = [factors, [f.masked_fill(labels == IGNORED, size) for f in factors]]
        plain, large = (torch.autograd.grad(results, asked, each, retain_graph=True) for each in several)
        assert all(torch.equal(*pair) and bool(pair[0].any()) for pair in zip(plain, large))
        alone = token_log_probs(*leaves, labels)  # keeps less for backward
        plain, large = (torch.autograd.grad(alone, asked, each[0], retain_graph=True) for each in several)
        assert all(torch.equal(*pair) for pair in zip(plain, large))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_call_has_one_graph_and_the_same_gradients(dynamic: bool | None) -> None:
    """Also at a temperature that changes from step to step, which a compiler makes a number of its own."""

    def both(hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> Tensor:
        log_probs, entropies = token_log_probs(hidden, weight, labels, entropy=True, chunk=8)
        scored = entropies * token_log_probs(hidden, weight, labels, temperature=temperature)
        loss = linear_cross_entropy(hidden, weight, labels, valid=T, chunk=8, z_loss=0.1, softcap=30.0)
        return (log_probs.exp() + scored).sum() + loss + cross_entropy(hidden @ weight.t(), labels, valid=T)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    hidden, weight, _, labels = given()
    hidden.requires_grad_(), weight.requires_grad_()
    for rows, temperature in ((T, 1.0), (9, 0.9), (9, 0.8)):
        arguments = (hidden[:rows], weight, labels[:rows], temperature)
        got, expected = (grads(f(*arguments), hidden, weight) for f in (compiled, both))
        for a, b in zip(got, expected):
            torch.testing.assert_close(a, b)


def test_what_cannot_be_is_refused() -> None:
    hidden, weight, _, labels = given()
    for temperature in (0.0, -1.0, math.nan, math.inf, None):
        with pytest.raises(ValueError, match=f"token_log_probs: temperature={temperature}"):
            token_log_probs(hidden, weight, labels, temperature=temperature)
    for rows, kept in ((hidden[None], labels[None]), (hidden, labels[1:]), (hidden, labels.int())):
        with pytest.raises(ValueError, match=r"expected \[T, n\]"):
            token_log_probs(rows, weight, kept)
    with pytest.raises(ValueError, match=r"token_log_probs: .*expected \[T, E\], \[V, E\]"):
        token_log_probs(hidden, weight.t(), labels)
    with pytest.raises(ValueError, match=r"token_log_probs: bias \[10\].*expected floating point \[11\]"):
        token_log_probs(hidden, weight, labels, bias=torch.zeros(V - 1))
    for options in ({"chunk": 0}, {"softcap": -1.0}):
        with pytest.raises(ValueError, match="token_log_probs: softcap=.*, chunk="):
            token_log_probs(hidden, weight, labels, **options)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("form", ["padded", "packed", "list"])
def test_rows_travel_with_what_belongs_to_them_and_results_go_home(form: str, ranks: int) -> None:
    """Advantages, masks and old log-probabilities lie beside the labels, and results come back beside them too."""
    lengths = [[9, 4], [17], [1, 2, 5]][:ranks]
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(V, E, generator=g, dtype=torch.float64, requires_grad=True)

    def batch_of(own: list[int], seed: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(seed)
        rows = [
            {
                "inputs_embeds": torch.randn(n, E, generator=g, dtype=torch.float64),
                "shift_labels": torch.cat([torch.randint(V, (n - 1,), generator=g), torch.tensor([IGNORED])]),
                "advantages": torch.randn(1, generator=g).double().expand(n).clone(),
                "old_log_probs": -torch.rand(n, generator=g).double(),
                "completion": torch.rand(n, generator=g) < 0.7,
            }
            for n in own
        ]
        if form == "list":
            return {name: [row[name] for row in rows] for name in rows[0]}
        if form == "packed":
            cu = torch.tensor([0, *np.cumsum(own)], dtype=torch.int32)
            return {name: torch.cat([row[name] for row in rows])[None] for name in rows[0]} | {"cu_seqlens": cu}
        width = max(own)
        pads = {"shift_labels": IGNORED}

        def padded(x: Tensor, fill: float) -> Tensor:
            return torch.cat([x, x.new_full((width - len(x), *x.shape[1:]), fill)])

        batch = {name: torch.stack([padded(row[name], pads.get(name, 0)) for row in rows]) for name in rows[0]}
        return batch | {"attention_mask": (torch.arange(width) < torch.tensor(own)[:, None]).long()}

    every = [batch_of(own, seed) for seed, own in enumerate(lengths)]

    def flat(batch: dict[str, Any], name: str) -> Tensor:
        if form == "list":
            return torch.cat(batch[name])
        return batch[name][batch["attention_mask"].bool()] if form == "padded" else batch[name][0]

    def loss(log_probs: Tensor, old: Tensor, advantages: Tensor, completion: Tensor) -> Tensor:
        ratio = (log_probs - old).exp()
        return -(torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) * completion).sum()

    names = ("old_log_probs", "advantages", "completion")
    whole = torch.zeros((), dtype=torch.float64)
    expected = []
    for batch in every:
        log_probs, _ = dense(flat(batch, "inputs_embeds"), weight, None, flat(batch, "shift_labels"))
        expected.append(log_probs.detach())
        whole = whole + loss(log_probs, *(flat(batch, name) for name in names))
    (expected_grad,) = torch.autograd.grad(whole, weight)

    def rank(comm: Comm) -> tuple[Any, Tensor, Tensor, bool]:
        mine = share(every[comm.rank], comm)
        own = weight.detach().clone().requires_grad_()
        rows = mine.tensors
        log_probs = token_log_probs(rows["inputs_embeds"], own, rows["labels"], chunk=5)
        part = loss(log_probs, *(rows[name] for name in names))
        part.backward()
        home = back(mine, log_probs.detach())
        again = share(every[comm.rank] | {"found": home}, comm)
        same = torch.equal(again.tensors["found"], log_probs.detach())
        return home, part.detach(), own.grad, same

    found = run_threads(ranks, rank)
    for (home, *_, same), batch, whole_rows in zip(found, every, expected, strict=True):
        assert same, "what went home is at the same rows when it travels again"
        torch.testing.assert_close(flat({**batch, "home": home}, "home"), whole_rows, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(part for _, part, _, _ in found), whole.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(grad for _, _, grad, _ in found), expected_grad, rtol=1e-10, atol=1e-12)


class _Stop(torch.autograd.Function):
    """A function without a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("entropy", [True, False])
def test_a_result_without_a_gradient_gives_none(frozen: bool, entropy: bool) -> None:
    hidden, weight = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=not frozen)
    found = token_log_probs(hidden, weight, torch.arange(4), entropy=entropy)
    results = found if entropy else (found,)
    (sum(_Stop.apply(x).sum() for x in results) + hidden.sum()).backward()
    assert torch.equal(hidden.grad, torch.ones(4, 3)) and (weight.grad is None or not weight.grad.any())
