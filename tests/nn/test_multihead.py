"""MultiheadAttention is torch's, document by document."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import seqpar
from seqpar.comm import Comm, LocalComm
from seqpar.facts.layout import Layout
from seqpar.facts.mask import Mask
from seqpar.nn import MultiheadAttention
from seqpar.plan import Plan
from seqpar.testing import run_threads

LENGTHS, KEYS = (9, 1, 14), (5, 3, 12)
WIDTH, HEADS = 12, 3

OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "a key of zeros": {"add_zero_attn": True},
    "keys of another width": {"kdim": 5, "vdim": 7},
    "no bias, values of another width": {"vdim": 7, "bias": False},
}


def made(kind: type[nn.MultiheadAttention], options: dict[str, object]) -> nn.MultiheadAttention:
    """A module of random parameters, biases too; the same in every process."""
    module = kind(WIDTH, HEADS, dtype=torch.float64, **options)
    for n, parameter in enumerate(module.parameters()):
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(n)) / 2)
    return module


def inputs(options: dict[str, object], keys: tuple[int, ...]) -> list[Tensor]:
    widths = (WIDTH, options.get("kdim", WIDTH), options.get("vdim", WIDTH))
    sizes = (sum(LENGTHS), sum(keys), sum(keys))
    g = torch.Generator().manual_seed(9)
    return [torch.randn(n, w, generator=g, dtype=torch.float64) for n, w in zip(sizes, widths)]


def by_torch(
    options: dict[str, object], keys: tuple[int, ...], causal: bool, same: bool
) -> tuple[Tensor, list[Tensor]]:
    """torch's rows of all documents and the gradients of its parameters."""
    module = made(nn.MultiheadAttention, options)
    documents = (x.split(n) for x, n in zip(inputs(options, keys), (LENGTHS, keys, keys)))
    outs = []
    for q, k, v in zip(*documents):
        k, v = (q, q) if same else (k, v)
        mask = nn.Transformer.generate_square_subsequent_mask(len(q), dtype=q.dtype) if causal else None
        outs.append(module(q, k, v, need_weights=False, attn_mask=mask)[0])
    out = torch.cat(outs)
    out.square().sum().backward()
    return out.detach(), [p.grad for p in module.parameters()]


def on_a_rank(comm: Comm, plan: Plan, options: dict[str, object], keys: tuple[int, ...], same: bool) -> object:
    module = made(MultiheadAttention, options)
    q, k, v = inputs(options, keys)
    q = seqpar.shard(q, plan, comm.rank)
    k, v = (q, q) if same else (seqpar.shard(x, plan, comm.rank, side="kv") for x in (k, v))
    with seqpar.parallel(plan, comm):
        out, weights = module(q, k, v, need_weights=False)
    assert weights is None
    out.square().sum().backward()
    return out.detach(), [p.grad for p in module.parameters()]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("attends", ["causal", "full", "cross"])
@pytest.mark.sampled(3)
def test_rows_and_gradients_are_those_of_torch(attends, options, ranks) -> None:
    same = attends != "cross" and not OPTIONS[options].get("vdim")
    keys = KEYS if attends == "cross" else LENGTHS
    mask = Mask(LENGTHS, causal=attends == "causal", kv_lengths=None if keys is LENGTHS else keys)
    kv_layout = Layout.zigzag(keys, ranks) if attends == "cross" else None
    plan = Plan(mask, Layout.zigzag(LENGTHS, ranks), kv_layout=kv_layout, ulysses=ranks if options == "plain" else 1)
    expected, wanted = by_torch(OPTIONS[options], keys, attends == "causal", same)
    found = run_threads(ranks, on_a_rank, plan, OPTIONS[options], keys, same)
    for rank, (out, _) in enumerate(found):
        torch.testing.assert_close(out, expected[np.array(plan.layout.positions(rank))], rtol=1e-10, atol=1e-10)
    for n, grad in enumerate(wanted):
        torch.testing.assert_close(sum(grads[n] for _, grads in found), grad, rtol=1e-10, atol=1e-9)


@pytest.mark.parametrize("options", OPTIONS)
def test_parameters_begin_and_travel_as_torchs(options) -> None:
    modules = []
    for kind in (nn.MultiheadAttention, MultiheadAttention):
        torch.manual_seed(5)
        modules.append(kind(WIDTH, HEADS, dropout=0.1, **OPTIONS[options]))
    theirs, ours = modules
    assert isinstance(ours, nn.MultiheadAttention)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    ours.load_state_dict(theirs.state_dict(), strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    for module in modules:
        torch.manual_seed(6)
        module._reset_parameters()
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def plan_of(*lengths: int) -> tuple[Plan, LocalComm]:
    return Plan(Mask(lengths, causal=False), Layout.contiguous(sum(lengths), 1)), LocalComm()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_an_encoder_layer_of_torch_attends_under_the_plan(batch_first, training, batched) -> None:
    """In eval torch's layer has a path that takes parameters out of its attention and never calls it."""
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=batch_first).train(training).requires_grad_(False)
    (plan, comm), x = plan_of(9, 5), torch.randn(14, WIDTH)
    expected = torch.cat([layer(part) for part in x.split([9, 5])])
    ours = MultiheadAttention(WIDTH, 2, batch_first=batch_first)
    ours.load_state_dict(layer.self_attn.state_dict())
    layer.self_attn = ours.train(training).requires_grad_(False)
    dim = 0 if batch_first else 1
    given = x.unsqueeze(dim) if batched else x
    with seqpar.parallel(plan, comm):
        out = layer(given)
        stacked = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)(given)
        assert torch.equal(stacked, layer(layer(given)))
    assert out.shape == given.shape
    torch.testing.assert_close(out.squeeze(dim) if batched else out, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="no plan surrounds"):
        layer(given)


def test_bound_copied_and_dropping() -> None:
    (plan, comm), x = plan_of(9, 5), torch.randn(14, WIDTH)
    module = MultiheadAttention(WIDTH, HEADS, 0.5)
    module.bind(plan, comm, seed=1)
    out = module(x, x, x, need_weights=False)[0]
    assert torch.equal(out, module(x, x, x, need_weights=False)[0])
    module.bind(plan, comm, seed=2)
    assert not torch.equal(out, module(x, x, x, need_weights=False)[0])
    module.dropout = 0.0
    out = module(x, x, x, need_weights=False)[0]
    assert torch.equal(out, module.eval()(x, x, x, need_weights=False)[0])
    module.unbind()
    for other in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with pytest.raises(RuntimeError, match="no plan surrounds"):
            other(x, x, x, need_weights=False)
        with seqpar.parallel(plan, comm):
            assert torch.equal(out, other(x, x, x, need_weights=False)[0])


def test_autocast_computes_as_torchs() -> None:
    (plan, comm), x = plan_of(14), torch.randn(14, WIDTH)
    theirs, ours = nn.MultiheadAttention(WIDTH, 2), MultiheadAttention(WIDTH, 2)
    ours.load_state_dict(theirs.state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16), seqpar.parallel(plan, comm):
        out, expected = ours(x, x, x, need_weights=False)[0], theirs(x, x, x, need_weights=False)[0]
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_what_is_refused_is_named() -> None:
    (plan, comm), x = plan_of(14), torch.randn(14, WIDTH)
    module, mask = MultiheadAttention(WIDTH, HEADS), torch.zeros(14, 14, dtype=torch.bool)
    with pytest.raises(NotImplementedError, match="add_bias_kv"):
        MultiheadAttention(WIDTH, HEADS, add_bias_kv=True)
    refused = {
        "need_weights": {"need_weights": True},
        "attn_mask": {"attn_mask": mask},
        "key_padding_mask": {"key_padding_mask": mask[0]},
        "is_causal": {"is_causal": True},
    }
    with seqpar.parallel(plan, comm):
        for name, option in refused.items():
            with pytest.raises(NotImplementedError, match=name):
                module(x, x, x, **{"need_weights": False} | option)
        with pytest.raises(NotImplementedError, match="need_weights"):
            module(x, x, x, need_weights=True)
        expected = module(x, x, x, need_weights=False)[0]
        assert torch.equal(module(x, x, x)[0], expected) and module(x, x, x)[1] is None
        with pytest.raises(NotImplementedError, match="nested tensors"):
            nested = torch.nested.nested_tensor([x[:5], x[5:]], layout=torch.jagged)
            module(nested, nested, nested, need_weights=False)
        for shape in ((2, 14, WIDTH), (1, 14, WIDTH)):  # the batch is dim 1
            with pytest.raises(ValueError, match="rows .T, E. or a batch of one"):
                module(*[torch.randn(shape)] * 3, need_weights=False)
