"""Loops that would train the wrong thing in silence: other weights on ranks, gradients not summed, or summed twice."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar import Comm, Layout, Mask, Plan
from seqpar.testing import run_processes, run_threads
from seqpar.train import clip_grad_norm, sync_gradients
from tests.integrations.hf.models import batches, build
from tests.integrations.plain import Attending
from tests.ranks import error_of, errors_on_copies, on_copies

RANKS = 2
MODEL, EVERY = build("llama"), batches("right", RANKS)


ATTENDED, ATTENDED_ROWS = Plan(Mask([8]), Layout.contiguous(8, 2)), torch.ones(1, 4, 8)


@contextmanager
def told(count: int | None) -> Any:
    """A block in which so many warnings are given by this package, or to the caller of it."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
    texts += [str(each.message) for each in found if issubclass(each.category, UserWarning)]
    texts[:] = [text for text in texts if ("ranks" in text or "seqpar" in text)]
    assert count is None or len(texts) == count, texts


def redrawn(model: nn.Module, only: str = "") -> None:
    """Other weights."""
    g = torch.Generator().manual_seed(99)
    for name, p in model.named_parameters():
        if only in name:
            with torch.no_grad():
                p.copy_(torch.randn(p.shape, generator=g))


def adapted(model: nn.Module) -> list[nn.Parameter]:
    """A frozen model with an adapter of two matrices at each projection of queries: LoRA, by hand."""
    model.requires_grad_(False)
    found = []
    for layer in model.model.layers:
        q, g = layer.self_attn.q_proj, torch.Generator().manual_seed(3)
        q.lora_A = nn.Parameter(torch.randn(2, 32, generator=g))
        q.lora_B = nn.Parameter(torch.zeros(32, 2))
        q.register_forward_hook(lambda module, args, out: out + args[0] @ module.lora_A.T @ module.lora_B.T)
        found += [q.lora_A, q.lora_B]
    return found


@pytest.mark.parametrize("other", ["", "lora_A", "mlp.down_proj"])
def test_other_weights_at_the_first_forward_are_an_error_on_every_rank(other: str) -> None:
    def step(own: Any, comm: Comm) -> tuple[str, float]:
        if other:
            adapted(own)
        before = copy.deepcopy(own.state_dict())
        if comm.rank:
            redrawn(own, other)
        said = error_of(own, **EVERY[comm.rank])
        own.load_state_dict(before)  # as the error says
        return said, float(own(**EVERY[comm.rank]).loss.detach())

    results = on_copies(MODEL, step)
    for text, _ in results:
        assert other in text and "between rank 0 and rank 1" in text and "and nothing has trained yet; load" in text
    assert results[0] == results[1]


def stepping_before_the_sum(own: Any, comm: Comm, optimizer: torch.optim.Optimizer) -> None:
    own(**EVERY[comm.rank]).loss.backward()
    optimizer.step()
    sync_gradients(own.parameters(), comm)
    optimizer.zero_grad()


def drifting(own: Any, comm: Comm, optimizer: torch.optim.Optimizer) -> None:
    """By a last digit."""
    plain(own, comm, optimizer, 0)
    if comm.rank:
        with torch.no_grad():
            own.lm_head.weight.copy_(torch.nextafter(own.lm_head.weight, torch.tensor(9.0)))


def loading_on_one_rank(own: Any, comm: Comm, optimizer: torch.optim.Optimizer) -> None:
    plain(own, comm, optimizer, 0)
    if comm.rank:
        redrawn(own)


@pytest.mark.parametrize("step", [stepping_before_the_sum, loading_on_one_rank, drifting])
def test_weights_that_differ_after_a_sum_are_an_error_that_names_both_causes(step: Any) -> None:
    def steps(own: Any, comm: Comm) -> None:
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        for _ in range(3):
            step(own, comm, optimizer)

    with told(0):
        (said,) = set(errors_on_copies(MODEL, steps))
    assert "or stepped before their sum, or some ranks loaded" in said


@pytest.mark.parametrize(("sdpa", "begun"), [(False, 0), (True, 2)])
def test_a_layer_that_one_rank_freezes_is_named(sdpa: bool, begun: int) -> None:
    model = nn.Sequential(Attending()) if sdpa else MODEL

    def steps(own: Any, comm: Comm) -> None:
        frozen = own[0].linear if sdpa else own.model.layers[0].mlp
        for step in range(begun + 2):
            if comm.rank and step >= begun:
                frozen.requires_grad_(False)
            own(ATTENDED_ROWS) if sdpa else own(**EVERY[comm.rank])

    name = "0.linear.bias" if sdpa else "model.layers.0.mlp.down_proj.weight"
    for said in errors_on_copies(model, steps, **({"sdpa": True, "plan": ATTENDED} if sdpa else {})):
        assert f"ranks differ in what requires gradients: {name} is frozen on rank 1 and not on rank 0" in said


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "adapter"])
def test_a_step_by_gradients_that_nobody_summed_is_an_error(lora: bool) -> None:
    def steps(own: Any, comm: Comm) -> str:
        optimizer = torch.optim.AdamW(adapted(own) if lora else own.parameters(), lr=1e-2)
        before = copy.deepcopy(own.state_dict())
        own(**EVERY[comm.rank]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        said = error_of(own, **EVERY[comm.rank])
        own.load_state_dict(before)  # as the error says
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        for _ in range(2):
            plain(own, comm, optimizer, 0)
        return said

    (said,) = set(on_copies(MODEL, steps))
    assert re.search("not summed over ranks, .*; start again from equal weights", said), said


def summing_matrices(own: Any, comm: Comm) -> None:
    """As of one of an optimizer's groups."""
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    for _ in range(2):
        own(**EVERY[comm.rank]).loss.backward()
        sync_gradients([p for p in own.parameters() if p.dim() > 1], comm)
        optimizer.step()
        optimizer.zero_grad()


def stepping_in_backward(own: Any, comm: Comm) -> None:
    def step(parameter: Tensor) -> None:
        torch.optim.SGD([parameter], lr=1e-2).step()
        parameter.grad = None

    for parameter in own.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        own(**EVERY[comm.rank]).loss.backward()


def replacing_data(own: Any, comm: Comm) -> None:
    """By new data, of which no version tells."""
    for _ in range(2):
        own(**EVERY[comm.rank]).loss.backward()
        for parameter in own.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad
            parameter.grad = None


@pytest.mark.parametrize("steps", [summing_matrices, stepping_in_backward, replacing_data])
def test_steps_by_gradients_of_which_some_were_not_summed_are_an_error(steps: Callable[..., None]) -> None:
    for said in errors_on_copies(MODEL, steps):
        assert "stepped with gradients that were not summed over ranks" in said


def test_other_weights_in_a_parameter_that_is_new_are_an_error() -> None:
    def steps(own: Any, comm: Comm) -> str:
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        plain(own, comm, optimizer, 0)
        own.lm_head.bias = nn.Parameter(torch.full((own.lm_head.out_features,), float(comm.rank)))
        return error_of(plain, own, comm, optimizer, 1)

    for said in on_copies(MODEL, steps):
        assert re.search("lm_head.bias first .* parameters are new; load the same", said), said


@pytest.mark.parametrize(("sdpa", "step"), [(False, 2), (True, 0)])
def test_a_rank_that_leaves_out_its_backward_is_an_error_that_names_it(sdpa: bool, step: int) -> None:
    """Where no document is spread, no exchange of a backward tells."""
    plan = seqpar.Plan(seqpar.Mask([8] * RANKS), seqpar.Layout.contiguous(8 * RANKS, RANKS))

    def rank(comm: Comm) -> bool:
        own = nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True) if sdpa else copy.deepcopy(MODEL)
        if sdpa:
            for p in own.parameters():
                nn.init.constant_(p, 0.1)
        seqpar.parallelize(own, comm, **({"sdpa": True} if sdpa else {"plan": lambda lengths, ranks: alone(lengths)}))
        for number in range(3):
            own.zero_grad()
            with seqpar.parallel(plan.with_mask(seqpar.Mask([8] * RANKS, causal=False)), comm):
                loss = own(torch.rand(1, 8, 8)).sum() if sdpa else own(**EVERY[comm.rank]).loss
            if not comm.rank:
                loss.backward()
            if number == step:
                with pytest.raises(ValueError, match="rank 1 has computed a forward .* no gradient of any parameter"):
                    sync_gradients(own.parameters(), comm)
            if comm.rank:
                loss.backward()
            sync_gradients(own.parameters(), comm)
        own.zero_grad()
        sync_gradients(own.parameters(), comm)
        return all(p.grad is None for p in own.parameters())

    assert run_threads(RANKS, rank) == [True] * RANKS


def alone(lengths: Any) -> seqpar.Plan:
    """A plan of whole documents, half of them on each of two ranks."""
    half = len(lengths) // 2
    first = int(lengths[:half].sum())
    return seqpar.Plan(seqpar.Mask(lengths), seqpar.Layout([range(first), range(first, int(lengths.sum()))]))


@pytest.mark.parametrize("skipping", ["no rows", "a part", "no backward on any rank"])
def test_a_rank_without_gradients_of_rows_or_of_a_part_counts_as_zero(skipping: str) -> None:
    def step(own: Any, comm: Comm) -> bool:
        loss = own(**EVERY[comm.rank]).loss
        if skipping == "no backward on any rank":
            sync_gradients(own.parameters(), comm)
            return own.lm_head.weight.grad is None
        if skipping == "a part" or not comm.rank:
            loss.backward()
        several = list(own.model.layers[0].mlp.parameters())
        if skipping == "a part" and comm.rank:  # as an image tower on a rank with text
            for p in several:
                p.grad = None
        sync_gradients(several, comm)
        return all(p.grad is not None for p in several)

    assert on_copies(MODEL, step, plan=lambda lengths, ranks: of_first(lengths)) == [True] * RANKS


def of_first(lengths: Any) -> seqpar.Plan:
    """A plan of all documents on the first of two ranks; the other one has a pad."""
    tokens = int(lengths.sum())
    return seqpar.Plan(seqpar.Mask(lengths), seqpar.Layout([range(tokens), []]))


def wrapped(comm: Comm, how: str, average_over: int, group: str) -> list[str]:
    """What is said of two steps in a wrapper over all ranks, whose comm has all of them or each rank alone."""
    mesh = init_device_mesh("cpu", (1, comm.size) if group == "sp" else (comm.size, 1), mesh_dim_names=("dp", "sp"))
    model = build("llama", num_hidden_layers=1)
    seqpar.parallelize(model, seqpar.GroupComm(mesh["sp"]), average_over=average_over)
    if how.startswith("ddp"):
        whole: nn.Module = DistributedDataParallel(model)
    else:
        whole = fully_shard(model, mesh=mesh["dp", "sp"]._flatten("dp_sp"))
        if how == "fsdp summing":
            whole.set_gradient_divide_factor(1.0)
            whole.set_force_sum_reduction_for_comms(True)  # gloo has no other
    more = {"num_items_in_batch": torch.tensor(1000)} if "items" in how else {}
    with told(None) as texts:
        for _ in range(2):
            with whole.no_sync() if "no_sync" in how else nullcontext():
                whole(**EVERY[comm.rank], **more).loss.backward()
    return texts


# what wraps, average_over, whether the comm is of all ranks or of one, and the average_over that is to be given instead
WRAPPED = (
    ("ddp", 1, "sp", 2), ("ddp", 2, "sp", None), ("ddp no_sync", 1, "sp", None), ("ddp items", 1, "sp", None),
    ("fsdp", 1, "sp", 2), ("fsdp", 2, "sp", None), ("fsdp summing", 1, "sp", None), ("fsdp items", 1, "sp", None),
    ("ddp", 2, "dp", 1), ("fsdp", 2, "dp", 1), ("fsdp", 1, "dp", None),
)  # fmt: skip


def every_wrapper(comm: Comm) -> list[list[str]]:
    return [wrapped(comm, *case[:3]) for case in WRAPPED]


def test_a_wrapper_that_averages_otherwise_than_the_loss_says_is_a_warning_with_the_line_to_give() -> None:
    for (*case, expected), first, other in zip(WRAPPED, *run_processes(RANKS, every_wrapper)):
        assert len(first) == (expected is not None), (case, first)
        assert all(f"average_over={expected})" in text for text in first), (case, first)
        assert "dp" in case or not other, "one rank of a comm says it"


def meshed(
    comm: Comm, how: str, over: str, average_over: int, summed: str = "", drift: float = 0.0
) -> tuple[str, list[str], list[Tensor]]:
    """Two steps of 2 x 2 ranks under a wrapper over a dimension of the mesh, with a sum over another, if over any.

    drift: what one rank of each comm adds to a weight after a step. The error, what is said, and the weights.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    comms = {name: seqpar.GroupComm(mesh[name]) for name in ("dp", "sp")}
    model, every = build("llama"), batches("right", comm.size)
    seqpar.parallelize(model, comms["sp"], average_over=average_over)
    if how == "ddp":
        whole: nn.Module = DistributedDataParallel(model, process_group=mesh[over].get_group())
    else:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh[over])
        whole = fully_shard(model, mesh=mesh[over])
    optimizer, error = torch.optim.SGD(model.parameters(), lr=0.1), ""
    with told(None) as texts:
        try:
            for _ in range(2):
                whole(**every[comm.rank]).loss.backward()
                if summed:
                    several = [p for p in model.parameters() if "matrices" not in summed or p.dim() > 1]
                    sync_gradients(several, comms[summed.split()[0]])
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    model.lm_head.weight.add_(drift * comms["sp"].rank)
        except ValueError as refused:
            error = str(refused)
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in model.parameters()]
    return error, texts, weights


def of_replicas(scale: float) -> list[Tensor]:
    """The weights after two steps by the sum of two replicas' means, times a scale, in one process."""
    model, every = build("llama"), batches("right", 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for replica in (every[:2], every[2:]):
            counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in replica]
            for batch, count in zip(replica, counts):
                (model(**batch).loss * count / sum(counts) * scale).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_gradients_that_a_wrapper_averages_over_replicas_are_summed_over_the_comm(how: str) -> None:
    expected = of_replicas(0.5)
    for error, texts, found in run_processes(4, meshed, how, "dp", 1, "sp"):
        assert not error and not texts
        for weight, other in zip(found, expected, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)


def test_gradients_that_a_wrapper_averages_over_the_comm_are_summed_over_replicas() -> None:
    expected = of_replicas(1.0)
    for error, texts, found in run_processes(4, meshed, "fsdp", "sp", 2, "dp"):
        assert not error and not texts
        for weight, other in zip(found, expected, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-5)


# average_over, the sum, the drift of a weight after a step, and what is said
WRONG = (
    (1, "", 0.0, "stepped with gradients that were not summed over ranks"),
    (1, "sp matrices", 0.0, "stepped with gradients that were not summed over ranks"),
    (2, "sp", 0.0, "leave sync_gradients out under a wrapper over these ranks"),
    (1, "sp", 1e-3, "lm_head.weight first (1 in all)"),
)


def every_mistake(comm: Comm, how: str) -> list[str]:
    return [meshed(comm, how, "dp", *case[:3])[0] for case in WRONG]


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_a_wrapper_over_replicas_does_not_stand_for_the_sum_over_the_comm(how: str) -> None:
    for found in run_processes(4, every_mistake, how):
        assert all(says in error for error, (*_, says) in zip(found, WRONG, strict=True)), found


def replicated(comm: Comm, layer: str) -> list[str]:
    """What HSDP, whose replicas are the comm's ranks, hears of other weights in one layer, and then of equal ones."""
    mesh = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("sp", "dp"))
    found = []
    for other in (layer, "nothing"):
        model = build("llama")
        if comm.rank:
            redrawn(model, other)
        seqpar.parallelize(model, seqpar.GroupComm(mesh["sp"]), average_over=comm.size)
        for each in (*model.model.layers, model):
            fully_shard(each, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with told(0):
            try:
                for _ in range(3):
                    model(**EVERY[comm.rank]).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
            except ValueError as error:
                found.append(str(error))
    return found


def test_replicas_of_what_is_sharded_are_compared() -> None:
    for said in run_processes(RANKS, replicated, "layers.1.mlp.down_proj"):
        assert len(said) == 1, said
        assert "layers.1.mlp.down_proj.weight first (1 in all)" in said[0] and "nothing has trained yet" in said[0]


def plain(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    own(**EVERY[comm.rank]).loss.backward()
    sync_gradients(own.parameters(), comm)
    clip_grad_norm(own.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 2 == 0)


def accumulating(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    for _ in range(3):
        (own(**EVERY[comm.rank]).loss / 3).backward()
    sync_gradients(own.parameters(), comm)
    optimizer.step()
    optimizer.zero_grad()


def summing_in_groups(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    own(**EVERY[comm.rank]).loss.backward()
    sync_gradients(own.model.parameters(), comm)
    sync_gradients(own.lm_head.parameters(), comm)
    optimizer.step()
    optimizer.zero_grad()


def sharpness_aware(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """SAM: two forwards for each step, weights apart from where they were in the second."""
    own(**EVERY[comm.rank]).loss.backward()
    sync_gradients(own.parameters(), comm)
    away = [0.01 * p.grad for p in own.parameters()]
    with torch.no_grad():
        torch._foreach_add_(list(own.parameters()), away)
    optimizer.zero_grad()
    own(**EVERY[comm.rank]).loss.backward()
    with torch.no_grad():
        torch._foreach_sub_(list(own.parameters()), away)
    sync_gradients(own.parameters(), comm)
    optimizer.step()
    optimizer.zero_grad()


def skipping(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """As GradScaler does with gradients that overflow."""
    (own(**EVERY[comm.rank]).loss * (float("inf") if step < 2 else 1.0)).backward()
    sync_gradients(own.parameters(), comm)
    if step >= 2:
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def with_a_frozen_tower(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    own.model.requires_grad_(step % 2 == 1)
    plain(own, comm, optimizer, step)


def with_an_adapter(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:  # after a step of the whole model
        optimizer.param_groups[0]["params"] = adapted(own)
    plain(own, comm, optimizer, step)


def with_evaluation_between(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    own(**EVERY[comm.rank]).loss  # noqa: B018  nobody asks for its gradient
    plain(own, comm, optimizer, step)
    own.eval()
    with torch.no_grad():
        own(**EVERY[comm.rank])
    torch.autograd.grad(own(**EVERY[comm.rank]).loss, own.lm_head.weight)
    own.train()


def dropping_what_was_not_summed(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    own(**EVERY[comm.rank]).loss.backward()
    optimizer.zero_grad()
    plain(own, comm, optimizer, step)


def summing_by_hand(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    own(**EVERY[comm.rank]).loss.backward()
    for p in own.parameters():
        p.grad = seqpar.train.all_sum(p.grad, comm)
    optimizer.step()
    optimizer.zero_grad()


def without_an_optimizer(own: Any, comm: Comm, optimizer: torch.optim.Optimizer, step: int) -> None:
    """By data and zeros, of which no version tells."""
    own(**EVERY[comm.rank]).loss.backward()
    sync_gradients(own.parameters(), comm)
    for p in own.parameters():
        p.data -= 0.1 * p.grad
        p.grad.zero_()


RIGHT = (
    plain, accumulating, summing_in_groups, sharpness_aware, skipping,
    with_a_frozen_tower, with_an_adapter, with_evaluation_between, dropping_what_was_not_summed, summing_by_hand,
    without_an_optimizer,
)  # fmt: skip


@pytest.mark.parametrize("step", RIGHT, ids=lambda step: step.__name__)
@pytest.mark.sampled(3)
def test_loops_that_are_right_hear_nothing(step: Callable[..., None]) -> None:
    def steps(own: Any, comm: Comm) -> list[Tensor]:
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        for number in range(3):
            step(own, comm, optimizer, number)
        return [p.detach() for p in own.parameters()]

    with told(0):
        one, other = on_copies(MODEL, steps)
    assert all(torch.equal(a, b) for a, b in zip(one, other))
