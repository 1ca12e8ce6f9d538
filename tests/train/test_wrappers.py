"""Wrappers that average gradients, around models whose callers compute the loss: a loss that does not fit is told."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import seqpar
from seqpar import Comm
from seqpar.testing import run_processes
from seqpar.train import cross_entropy, linear_cross_entropy, sync_gradients
from tests.dsp.models import WEATHER, Weather
from tests.dsp.models import made as made_of
from tests.dsp.passes import GRID
from tests.integrations.diffusers_models import loss_of, made
from tests.integrations.hf.models import build

E, TOKENS, VOCABULARY = 8, 7, 5


class Decoder(nn.Module):
    """One layer of causal attention, over rows [1, T, E]."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.head = nn.Linear(E, 3 * E), nn.Linear(E, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0])


def by_sdpa(comm: Comm, how: str, told: bool) -> None:
    torch.manual_seed(0)
    model, x, labels = Decoder(), torch.randn(1, TOKENS, E), torch.arange(TOKENS) % VOCABULARY
    plan = seqpar.plan_batch([TOKENS], comm.size)
    seqpar.parallelize(model, comm, sdpa=True, plan=plan)
    net = around(model, how)
    own, wanted = seqpar.shard(x, plan, comm.rank, dim=1), seqpar.shard(labels, plan, comm.rank)
    scale = {"average_over": comm.size} if told else {}
    for _ in range(2):
        out = net(own)[0]
        if how == "ddp":
            cross_entropy(out, wanted, valid=TOKENS, **scale).backward()
        else:
            weight = torch.eye(VOCABULARY, requires_grad=True)
            linear_cross_entropy(out, weight, wanted, valid=TOKENS, **scale).backward()


def by_tokens(comm: Comm, how: str, told: bool) -> None:
    model, given = made("flux", torch.float32)
    seqpar.parallelize(model, comm, **({"average_over": comm.size} if told else {}))
    net = around(model, how)
    for _ in range(2):
        loss_of(net, given)[1].backward()


def by_stages(comm: Comm, how: str, told: bool) -> None:
    model = made_of(Weather)
    seqpar.parallelize(model, comm, spec=WEATHER, **({"average_over": comm.size} if told else {}))
    net = around(model, how)
    for _ in range(2):
        net(GRID).square().sum().backward()


def around(model: nn.Module, how: str) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model) if how == "ddp" else fully_shard(model)


@contextmanager
def listening() -> Iterator[list[str]]:
    """The warnings inside that speak of averages, when it ends."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [text for each in caught if "average_over" in (text := str(each.message))]


def said(comm: Comm, run: Callable[[Comm, str, bool], None], how: str, told: bool) -> list[str]:
    """The warnings of two steps that speak of averages."""
    with listening() as found:
        run(comm, how, told)
    return found


@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
@pytest.mark.parametrize("run", [by_sdpa, by_tokens, by_stages])
def test_a_loss_that_is_not_made_for_its_wrapper_is_told_once(run: Callable[..., None], how: str) -> None:
    every = run_processes(2, said, run, how, False)
    assert sum(map(len, every)) == (2 if run is by_sdpa else 1)  # each rank has a loss of its own
    for text in sum(every, []):
        assert "divides the sum of 2 ranks' gradients by 2, so that they are 1/2 of this loss's" in text
        assert "average_over=2" in text


@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
@pytest.mark.parametrize("run", [by_sdpa, by_tokens, by_stages])
def test_a_loss_that_is_made_for_it_is_not(run: Callable[..., None], how: str) -> None:
    assert run_processes(2, said, run, how, True) == [[], []]


class WithLoss(Decoder):
    """Computes its loss too."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        out = super().forward(x)
        return out if labels is None else cross_entropy(out[0], labels, valid=TOKENS)


def step_of(which: str) -> Callable[[nn.Module, Tensor, Tensor], None]:
    """A step of a wrapped model, by what it computes of the model's rows and labels."""

    def scaled(out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out, labels, reduction="sum") / TOKENS * 2

    def step(net: nn.Module, x: Tensor, labels: Tensor) -> None:
        if which == "inside":
            net(x, labels).backward()
        elif which == "two forwards":
            first, second = net(x)[0], net(x / 2)[0]
            (cross_entropy(first, labels, valid=TOKENS) + scaled(second, labels)).backward()
        elif which == "after a teacher":
            out = net(x)[0]
            with torch.no_grad():
                net(x)
            cross_entropy(out, labels, valid=TOKENS).backward()
        else:
            out = net(x)[0]
            if which == "for a log":
                cross_entropy(out.detach(), labels, valid=TOKENS)
                with torch.no_grad():
                    cross_entropy(out, labels, valid=TOKENS)
            scaled(out, labels).backward()

    return step


def heard(comm: Comm, which: str) -> list[str]:
    torch.manual_seed(0)
    model, x, labels = WithLoss(), torch.randn(1, TOKENS, E), torch.arange(TOKENS) % VOCABULARY
    plan = seqpar.plan_batch([TOKENS], comm.size)
    seqpar.parallelize(model, comm, sdpa=True, plan=plan)
    net, step = nn.parallel.DistributedDataParallel(model), step_of(which)
    own, wanted = seqpar.shard(x, plan, comm.rank, dim=1), seqpar.shard(labels, plan, comm.rank)
    with listening() as found:
        for _ in range(2):
            step(net, own, wanted)
    return found


@pytest.mark.parametrize(
    ("which", "count"), [("inside", 1), ("two forwards", 1), ("after a teacher", 1), ("for a log", 0)]
)
def test_a_loss_is_told_wherever_it_is_computed(which: str, count: int) -> None:
    assert [len(texts) for texts in run_processes(2, heard, which)] == [count, count]


def frozen(comm: Comm) -> list[str]:
    """What is sharded is not trained: FSDP2 reduces nothing, and the gradient of an input is summed."""
    model, given = made("flux", torch.float32)
    model.requires_grad_(False)
    seqpar.parallelize(model, comm)
    net = fully_shard(model)
    given["encoder_hidden_states"].requires_grad_(True)
    with listening() as found:
        loss_of(net, given)[1].backward()
    return found


def test_frozen_shards_ask_for_nothing() -> None:
    assert run_processes(2, frozen) == [[], []]


def sharded_later(comm: Comm) -> list[str]:
    """A model runs before it is sharded, and so does a copy of it."""
    model, given = made("flux", torch.float32)
    seqpar.parallelize(model, comm)
    loss_of(model, given)
    with listening() as found:
        for each in (copy.deepcopy(model), model):
            loss_of(fully_shard(each), given)[1].backward()
    return found


def test_models_that_are_sharded_after_a_forward_are_told_too() -> None:
    assert [len(texts) for texts in run_processes(2, sharded_later)] == [2, 0]


def replicas(comm: Comm) -> tuple[list[str], float]:
    """DDP over 4 ranks, of which 2 share a sequence: warnings, and how far the advised gradient is from one process."""
    torch.manual_seed(0)
    model, x, labels = Decoder(), torch.randn(1, TOKENS, E), torch.arange(TOKENS) % VOCABULARY
    plain = copy.deepcopy(model)
    F.cross_entropy(plain(x)[0], labels).backward()
    pair = seqpar.GroupComm(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))["sp"])
    plan = seqpar.plan_batch([TOKENS], 2)
    seqpar.parallelize(model, pair, sdpa=True, plan=plan)
    net = nn.parallel.DistributedDataParallel(model)
    with listening() as found:
        own, wanted = seqpar.shard(x, plan, pair.rank, dim=1), seqpar.shard(labels, plan, pair.rank)
        cross_entropy(net(own)[0], wanted, valid=2 * TOKENS).backward()
    net.zero_grad()
    cross_entropy(net(own)[0], wanted, valid=2 * TOKENS, average_over=4).backward()
    apart = float((model.qkv.weight.grad - plain.qkv.weight.grad).abs().max())
    return found, apart


def test_the_labels_that_count_decide() -> None:
    for (text,), apart in run_processes(4, replicas):
        assert apart < 1e-6
        assert "divides the sum of 4 ranks' gradients by 4, so that they are 1/2 of this loss's" in text
        assert text.endswith("give it average_over=2 (or 4, where `valid` counts the labels of all 4 ranks)")


def summed(comm: Comm) -> list[str]:
    """A wrapper over other ranks, beside which gradients are summed."""
    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(1, TOKENS, E)
    plan = seqpar.plan_batch([TOKENS], comm.size)
    seqpar.parallelize(model, comm, sdpa=True, plan=plan)
    alone = [torch.distributed.new_group([rank]) for rank in range(comm.size)][comm.rank]
    net = nn.parallel.DistributedDataParallel(model, process_group=alone)
    with listening() as found:
        rows = seqpar.shard(torch.arange(TOKENS) % VOCABULARY, plan, comm.rank)
        cross_entropy(net(seqpar.shard(x, plan, comm.rank, dim=1))[0], rows, valid=TOKENS).backward()
        sync_gradients(net.parameters(), comm)
    return found


def test_a_wrapper_over_other_ranks_asks_for_nothing() -> None:
    assert run_processes(2, summed) == [[], []]


def left_in(comm: Comm, kind: str, synced: bool) -> list[float]:
    """How far gradients are from one process's, of DDP with no_sync or without, where they are summed beside it."""
    torch.manual_seed(0)
    model, x, labels = Decoder(), torch.randn(1, TOKENS, E), torch.arange(TOKENS) % VOCABULARY
    ids = (torch.arange(TOKENS) % 61)[None]
    if kind == "transformers":
        model = build("llama")
    plain = copy.deepcopy(model)
    loss = F.cross_entropy(plain(x)[0], labels) if kind == "sdpa" else plain(input_ids=ids, labels=ids).loss
    loss.backward()
    plan = seqpar.plan_batch([TOKENS], comm.size)
    seqpar.parallelize(model, comm, **({"sdpa": True, "plan": plan} if kind == "sdpa" else {"source": "replicated"}))
    net = nn.parallel.DistributedDataParallel(model)
    times = comm.size if synced else 1
    with nullcontext() if synced else net.no_sync():
        if kind == "sdpa":
            own, wanted = seqpar.shard(x, plan, comm.rank, dim=1), seqpar.shard(labels, plan, comm.rank)
            cross_entropy(net(own)[0], wanted, valid=TOKENS, average_over=times).backward()
        else:  # as Trainer does, which scales the loss
            (net(input_ids=ids, labels=ids, num_items_in_batch=comm.size * (TOKENS - 1)).loss * times).backward()
    if synced:
        with pytest.raises(ValueError, match="DistributedDataParallel reduces the gradients of .* over these ranks"):
            sync_gradients(net.parameters(), comm)
    else:
        sync_gradients(net.parameters(), comm)
    return [float((p.grad - q.grad).abs().max()) for p, q in zip(model.parameters(), plain.parameters())]


@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize("kind", ["sdpa", "transformers"])
def test_a_sum_beside_a_wrapper_that_reduces_is_refused_and_one_in_its_place_is_not(kind: str, synced: bool) -> None:
    assert max(max(each) for each in run_processes(2, left_in, kind, synced)) < 1e-5
