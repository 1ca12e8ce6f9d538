"""Wrappers that average gradients, around models whose callers compute the loss: a loss that does not fit is told."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import seqpar
from seqpar import Comm
from seqpar.testing import run_processes
from seqpar.train import cross_entropy, linear_cross_entropy
from tests.dsp.models import WEATHER, Weather
from tests.dsp.models import made as made_of
from tests.dsp.passes import GRID
from tests.integrations.diffusers_models import loss_of, made

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


def said(comm: Comm, run: Callable[[Comm, str, bool], None], how: str, told: bool) -> list[str]:
    """The warnings of two steps that speak of averages."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(comm, how, told)
    return [str(each.message) for each in caught if "average_over" in str(each.message)]


@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
@pytest.mark.parametrize("run", [by_sdpa, by_tokens, by_stages])
def test_a_loss_that_is_not_made_for_its_wrapper_is_told_once(run: Callable[..., None], how: str) -> None:
    every = run_processes(2, said, run, how, False)
    assert sum(map(len, every)) == (2 if run is by_sdpa else 1)  # each rank has a loss of its own
    for text in sum(every, []):
        assert "divides the sum of 2 ranks' gradients by 2, so that they are 1/2 of this loss's; give" in text
        assert "average_over=2" in text


@pytest.mark.parametrize("how", ["ddp", "fully_shard"])
@pytest.mark.parametrize("run", [by_sdpa, by_tokens, by_stages])
def test_a_loss_that_is_made_for_it_is_not(run: Callable[..., None], how: str) -> None:
    assert run_processes(2, said, run, how, True) == [[], []]


def summed(comm: Comm) -> list[str]:
    """A wrapper over other ranks, beside which gradients are summed."""
    torch.manual_seed(0)
    model, x = Decoder(), torch.randn(1, TOKENS, E)
    plan = seqpar.plan_batch([TOKENS], comm.size)
    seqpar.parallelize(model, comm, sdpa=True, plan=plan)
    alone = [torch.distributed.new_group([rank]) for rank in range(comm.size)][comm.rank]
    net = nn.parallel.DistributedDataParallel(model, process_group=alone)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = seqpar.shard(torch.arange(TOKENS) % VOCABULARY, plan, comm.rank)
        cross_entropy(net(seqpar.shard(x, plan, comm.rank, dim=1))[0], rows, valid=TOKENS).backward()
    return [str(each.message) for each in caught if "average_over" in str(each.message)]


def test_a_wrapper_over_other_ranks_asks_for_nothing() -> None:
    assert run_processes(2, summed) == [[], []]
