"""The same gradients and parameters as one process: plain, DDP and FSDP2, dp x sp, accumulated, resumed."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import seqpar
from seqpar.comm import Comm, GroupComm
from seqpar.data import Share, micro_batches
from seqpar.testing import run_processes, run_threads
from seqpar.train import clip_grad_norm, grad_norm, linear_cross_entropy, sync_gradients
from tests.train.model import IGNORED, Decoder, Documents, decoder, loss_of, single

CLOSE = 1e-4  # of the largest parameter, after 20 steps


def close(got: dict[str, Tensor], expected: dict[str, Tensor], relative: float) -> None:
    """Every tensor, relative to its largest, with a floor of 1e-6 of the model's largest."""
    floor = 1e-6 * max(float(x.abs().max()) for x in expected.values())
    for name, reference in expected.items():
        error = float((got[name] - reference).abs().max())
        assert error <= relative * max(float(reference.abs().max()), floor), name


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name."""
    found = {}
    for name, p in model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        found[name.removeprefix("module.")] = grad.clone()
    return found


def wrapped(kind: str, flat: DeviceMesh, model: Decoder) -> nn.Module:
    """The model under what reduces its gradients over the ranks of a mesh; "hsdp" takes one of two dimensions."""
    if "recomputing" in kind:
        model.checkpoint = "reentrant" in kind
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=flat.get_group())
    if kind.startswith(("fsdp", "hsdp")):
        for layer in model.layers:
            fully_shard(layer, mesh=flat)
        fully_shard(model, mesh=flat)
        if kind == "fsdp summing":
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(1.0)
    return model


def meshes(dp: int, sp: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The mesh of both dimensions, and all its ranks in one: over these parameters are sharded."""
    mesh = init_device_mesh("cpu", (dp, sp), mesh_dim_names=("dp", "sp"))
    return mesh, mesh._flatten("dp_sp")


def counted(share: Share, dp: Comm) -> int:
    """Labels that count over all replicas: those of one are in its share."""
    return sum(dp.gather("valid labels", share.valid))


def one_step(comm: Comm, kind: str, dp: int, sp: int) -> tuple[float, dict[str, Tensor], float]:
    mesh, flat = meshes(dp, sp)
    sequence, data = GroupComm(mesh["sp"], check="call"), GroupComm(mesh["dp"])
    model = wrapped(kind, mesh if kind == "hsdp" else flat, decoder())
    here = Documents.of(0).part(data.rank, dp).part(sequence.rank, sp).share(sequence)
    average_over = 1 if kind in ("plain", "fsdp summing") else comm.size
    loss = loss_of(model, here, valid=counted(here, data), average_over=average_over)
    loss.backward()
    if kind == "plain":
        sync_gradients(model.parameters(), comm)
    norm = grad_norm(model.parameters())
    total = sum(comm.gather("losses", loss.item() / average_over))
    found = gradients(model)
    assert float(clip_grad_norm(model.parameters(), 0.5)) == pytest.approx(float(norm), rel=1e-12)
    assert float(grad_norm(model.parameters())) == pytest.approx(0.5, rel=1e-4)
    return total, found, float(norm)


@pytest.mark.parametrize("dp_sp", [(2, 2), (1, 2)], ids=["dp2 x sp2", "sp2"])
@pytest.mark.parametrize(
    "kind", ["plain", "ddp", "fsdp", "fsdp summing", "hsdp", "fsdp recomputing", "fsdp recomputing reentrant"]
)
@pytest.mark.sampled(5)
def test_gradients_are_those_of_one_process(kind: str, dp_sp: tuple[int, int]) -> None:
    losses, grads, _ = single(1)
    norm = torch.nn.utils.get_total_norm(grads.values())
    for loss, found, total in run_processes(dp_sp[0] * dp_sp[1], one_step, kind, *dp_sp):
        assert loss == pytest.approx(losses[0], rel=1e-12)
        assert total == pytest.approx(float(norm), rel=1e-10)
        close(found, grads, 1e-10)


def trained(
    comm: Comm, dp: int, sp: int, steps: range, resume: Path | None, save: Path | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and whole parameters after AdamW steps under FSDP2, from a checkpoint and into one."""
    mesh, flat = meshes(dp, sp)
    sequence, data = GroupComm(mesh["sp"]), GroupComm(mesh["dp"])
    model = wrapped("fsdp", flat, decoder(torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if resume is not None:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.load(states, checkpoint_id=resume)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    losses = []
    for step in steps:
        here = Documents.of(step).part(data.rank, dp).part(sequence.rank, sp).share(sequence)
        optimizer.zero_grad()
        loss = loss_of(model, here, valid=counted(here, data), average_over=comm.size)
        loss.backward()
        losses.append(sum(comm.gather("losses", loss.item() / comm.size)))
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
    if save is not None:
        dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer))), checkpoint_id=save)
    return losses, {name: p.detach().full_tensor() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def twenty() -> tuple[list[float], dict[str, Tensor]]:
    losses, _, parameters = single(20, torch.float32)
    return losses, parameters


def check_trained(
    results: list[tuple[list[float], dict[str, Tensor]]], twenty: tuple[list[float], dict[str, Tensor]]
) -> None:
    losses, parameters = twenty
    largest = max(float(p.abs().max()) for p in parameters.values())
    for found, values in results:
        assert found == pytest.approx(losses[-len(found) :], rel=1e-5)
        assert max(float((values[name] - p).abs().max()) for name, p in parameters.items()) <= CLOSE * largest


@pytest.mark.exhaustive
def test_twenty_steps_of_fsdp_are_those_of_one_process(twenty) -> None:
    check_trained(run_processes(4, trained, 2, 2, range(20), None, None), twenty)


@pytest.mark.parametrize(("before", "after"), [((2, 2), (1, 2)), ((2, 1), (2, 2))], ids=["4 to 2", "2 to 4"])
@pytest.mark.exhaustive
def test_a_run_goes_on_with_another_number_of_ranks(before, after, twenty, tmp_path: Path) -> None:
    run_processes(before[0] * before[1], trained, *before, range(12), None, tmp_path / "checkpoint")
    results = run_processes(after[0] * after[1], trained, *after, range(12, 20), tmp_path / "checkpoint", None)
    check_trained(results, twenty)


def accumulated(comm: Comm, kind: str) -> dict[str, Tensor]:
    """The planner's micro-batches of one global batch, each loss divided by the labels of all of them."""
    model = wrapped(kind, meshes(1, comm.size)[1], decoder())
    batch = Documents.of(0).part(comm.rank, comm.size)
    plan = partial(seqpar.plan_step, micro_batches=3)
    shares = micro_batches({"input_ids": batch.tokens, "labels": batch.labels}, comm, shift="document", plan=plan)
    assert len(shares) == 3 and len({each.valid for each in shares}) > 1
    valid = sum(each.valid for each in shares)
    for index, each in enumerate(shares):
        last = index == len(shares) - 1
        if kind == "fsdp":
            model.set_requires_gradient_sync(last)
        with model.no_sync() if kind == "ddp" and not last else nullcontext():
            loss_of(model, each, valid=valid, average_over=1 if kind == "plain" else comm.size).backward()
    if kind == "plain":
        sync_gradients(model.parameters(), comm)
    return gradients(model)


@pytest.mark.parametrize("kind", ["plain", "ddp", "fsdp"])
@pytest.mark.sampled(3)
def test_micro_batches_accumulate_to_the_batch(kind: str) -> None:
    _, grads, _ = single(1)
    for found in run_processes(2, accumulated, kind):
        close(found, grads, 1e-10)


def unlabelled(comm: Comm, kind: str) -> tuple[float, dict[str, Tensor]]:
    """Rank 0 holds a document without labels."""
    documents = Documents.of(0)
    documents.labels[0] = torch.full_like(documents.tokens[0], IGNORED)
    lengths = [len(t) for t in documents.tokens]
    cuts = [0, lengths[0], sum(lengths)] if comm.size == 2 else [0, sum(lengths)]
    layout = seqpar.Layout([np.arange(*cut) for cut in pairwise(cuts)])
    plan = seqpar.Plan(seqpar.Mask(lengths), layout)
    model = decoder()
    if kind == "fsdp":
        model = wrapped(kind, meshes(1, comm.size)[1], model)
    here = documents.share(comm, source="replicated", plan=lambda *_: plan)
    loss = loss_of(model, here, valid=here.valid, average_over=comm.size if kind == "fsdp" else 1)
    loss.backward()
    if kind == "plain":
        sync_gradients(model.parameters(), comm)
    if comm.size > 1:
        assert (loss.item() == 0.0) == (comm.rank == 0)
    return loss.item() / (comm.size if kind == "fsdp" else 1), gradients(model)


@pytest.mark.parametrize("kind", ["plain", "fsdp"])
def test_a_rank_without_labels_takes_part(kind: str) -> None:
    ((loss, grads),) = run_threads(1, unlabelled, "plain")
    results = run_processes(2, unlabelled, kind)
    assert sum(part for part, _ in results) == pytest.approx(loss, rel=1e-12)
    for _, found in results:
        close(found, grads, 1e-10)


def beside_tensor_parallel(comm: Comm) -> tuple[float, dict[str, Tensor], float]:
    """sp2 x tp2: the heads and the MLP over tp, FSDP2 over sp, the comm of the ranks with the same heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    sequence = GroupComm(mesh["sp"], check="call")
    model = decoder()
    for layer in model.layers:
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        parallelize_module(layer, mesh["tp"], columns | {"out": RowwiseParallel(), "down": RowwiseParallel()})
    model = wrapped("fsdp", mesh["sp"], model)
    here = Documents.of(0).part(sequence.rank, 2).share(sequence)
    loss = loss_of(model, here, valid=here.valid, average_over=2)
    loss.backward()
    return sum(sequence.gather("losses", loss.item() / 2)), gradients(model), float(grad_norm(model.parameters()))


def test_tensor_parallel_beside_it_changes_nothing() -> None:
    losses, grads, _ = single(1)
    norm = torch.nn.utils.get_total_norm(grads.values())
    for loss, found, total in run_processes(4, beside_tensor_parallel):
        assert loss == pytest.approx(losses[0], rel=1e-12)
        assert total == pytest.approx(float(norm), rel=1e-10)
        close(found, grads, 1e-10)


def summed_beside_tensor_parallel(comm: Comm) -> tuple[dict[str, Tensor], str]:
    """sp2 x tp2 without FSDP2: what lies on a rank, of DTensors too, is summed over sp, twice with zeros between."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    sequence, model = GroupComm(mesh["sp"]), decoder()
    for layer in model.layers:
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
        parallelize_module(layer, mesh["tp"], columns | {"out": RowwiseParallel(), "down": RowwiseParallel()})
    here = Documents.of(0).part(sequence.rank, 2).share(sequence)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, here, valid=here.valid).backward()
        sync_gradients(model.parameters(), sequence)
        optimizer.step()
    found = gradients(model)
    weight = model.layers[0].down.weight
    weight.grad = DTensor.from_local(weight.grad.full_tensor() / 2, mesh["tp"], [Partial()])
    with pytest.raises(NotImplementedError, match="and its gradient has .*Partial") as raised:
        sync_gradients([weight], sequence)
    weight.grad = weight.grad.redistribute(placements=weight.placements)  # as the error says
    sync_gradients([weight], sequence)
    return found, str(raised.value)


def test_gradients_are_summed_beside_tensor_parallel() -> None:
    _, grads, _ = single(1)
    for found, text in run_processes(4, summed_beside_tensor_parallel):
        close(found, grads, 1e-10)
        assert "; give it p.grad = p.grad.redistribute(placements=p.placements)" in text


def mixed(comm: Comm) -> tuple[float, float]:
    """Loss and norm of bf16 computation with fp32 gradients."""
    _, flat = meshes(1, comm.size)
    model = decoder(torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=flat, mp_policy=policy)
    here = Documents.of(0).part(comm.rank, comm.size).share(comm)
    loss = loss_of(model, here, valid=here.valid, average_over=comm.size)
    assert loss.dtype == torch.float32
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return sum(comm.gather("losses", loss.item() / comm.size)), float(grad_norm(model.parameters()))


def test_mixed_precision_is_close_to_full() -> None:
    losses, grads, _ = single(1)
    for loss, norm in run_processes(2, mixed):
        assert loss == pytest.approx(losses[0], rel=1e-2)
        assert norm == pytest.approx(float(torch.nn.utils.get_total_norm(grads.values())), rel=3e-2)


def piped(comm: Comm) -> tuple[float, dict[str, Tensor]]:
    """pp2 x sp2: each stage a layer, a comm for each stage, two micro-batches one forward and one backward in turn."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "sp"))
    sequence, stage, other = GroupComm(mesh["sp"]), mesh.get_local_rank("pp"), (comm.rank + 2) % 4
    model, documents = decoder(), Documents.of(0)
    shares = [documents.part(index, 2).share(sequence, source="replicated") for index in range(2)]
    valid = sum(each.valid for each in shares)
    losses, held, sends = [], [], []

    def forward(here: Share) -> None:
        x = torch.empty(len(here.positions), 16, dtype=torch.float64)
        if stage == 0:
            x = model.embedding(here.tensors["input_ids"])
        else:
            dist.recv(x, other)
            x.requires_grad_()
        with seqpar.parallel(here.plan, here.comm):
            y = model.layers[stage](x, here.positions)
        if stage == 0:
            sends.append(dist.isend(y.detach(), other))
        else:
            y, labels = model.norm(y), here.tensors["labels"]
            y = linear_cross_entropy(y, model.head.weight, labels, valid=valid)
            losses.append(y.item())
        held.append((x, y))

    def backward() -> None:
        x, y = held.pop(0)
        if stage == 0:
            grad = torch.empty_like(y)
            dist.recv(grad, other)
            y.backward(grad)
        else:
            y.backward()
            sends.append(dist.isend(x.grad, other))

    order = [forward, forward, backward, backward] if stage == 0 else [forward, backward, forward, backward]
    pending = iter(shares)
    for work in order:
        work(next(pending)) if work is forward else work()
    for send in sends:
        send.wait()
    mine = [p for p in model.parameters() if p.grad is not None]
    sync_gradients(mine, sequence)
    return sum(losses), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_pipeline_stages_have_comms_of_their_own() -> None:
    losses, grads, _ = single(1)
    results = run_processes(4, piped)
    assert sum(loss for loss, _ in results) == pytest.approx(losses[0], rel=1e-12)
    for first, last in zip(results[:2], results[2:]):
        assert not first[1].keys() & last[1].keys()
        close(first[1] | last[1], grads, 1e-10)
