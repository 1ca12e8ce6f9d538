"""Two pipeline stages, each over ranks that share sequences: torch's `Schedule1F1B` around seqpar's attention.

The mesh has two stages and half of the ranks for sequences. Each stage has half of a decoder's blocks; its ranks hold
equal shares of every micro-batch. Micro-batches are packed differently, so each has a plan of its own, and `bind` gives
it to the attention of a stage. Loss and gradients must be those of one process.

Run ``torchrun --nproc-per-node 4 examples/pipeline.py``.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from decoder import Config, Decoder, rotations
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import seqpar
from seqpar.nn import Attention
from seqpar.train import all_sum, cross_entropy, sync_gradients

TOKENS = 96  # of each micro-batch: a schedule sends tensors of one shape
MICRO_BATCHES = ([96], [40, 56], [13, 50, 33], [7, 89])  # lengths of documents
CONFIG = Config(vocabulary=64, dim=32, layers=4, heads=4, kv_heads=2, head_dim=8, hidden=48)


class Stage(nn.Module):
    """The first or the second half of a decoder: ``[1, rows]`` tokens or ``[1, rows, E]`` -> that, or logits."""

    def __init__(self, model: Decoder, last: bool, plans: list[seqpar.Plan], comm: seqpar.Comm) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.embedding, self.norm, self.head = (None, model.norm, model.head) if last else (model.embedding, None, None)
        self.blocks = nn.ModuleList([*model.blocks][half:] if last else [*model.blocks][:half])
        self.attention, self.plans, self.comm = Attention(), plans, comm

    def forward(self, x: Tensor, number: Tensor, positions: Tensor) -> Tensor:
        """number: that of the micro-batch ``[1]``. positions ``[1, rows]``: inside each document."""
        self.attention.bind(self.plans[int(number)], self.comm)
        x = x[0] if self.embedding is None else F.embedding(x[0], self.embedding)
        angles = rotations(positions[0], CONFIG, x.dtype)
        for block in self.blocks:
            x = block(x, angles, self.attention)
        return torch.stack([x if self.head is None else self.head(self.norm(x))])  # zero bubble refuses views


def whole_model(model: Decoder, ids: Tensor, targets: Tensor, positions: Tensor) -> float:
    """The loss of one process, which leaves gradients in `model`: torch's attention, document by document."""
    total = 0.0
    for lengths, *rows in zip(MICRO_BATCHES, ids, positions, targets, strict=True):

        def attend(*qkv: Tensor, lengths: list[int] = lengths) -> Tensor:
            documents = zip(*(x.transpose(0, 1).split(lengths, dim=1) for x in qkv), strict=True)
            outs = [F.scaled_dot_product_attention(*each, is_causal=True, enable_gqa=True) for each in documents]
            return torch.cat(outs, dim=1).transpose(0, 1)

        loss = F.cross_entropy(model(*rows[:2], attend), rows[2], reduction="sum") / ids.numel()
        loss.backward()
        total += loss.item()
    return total


def main() -> None:
    """One rank's part."""
    if int(os.environ.get("WORLD_SIZE", "1")) % 2:
        raise SystemExit("two stages need an even number of ranks: torchrun --nproc-per-node 4 examples/pipeline.py")
    torch.set_default_dtype(torch.float64)
    # on GPUs: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then "cpu:gloo,cuda:nccl"
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("pp", "sp"))
    comm, index = seqpar.GroupComm(mesh["sp"]), mesh["pp"].get_local_rank()
    torch.manual_seed(0)  # every rank makes the same model and batch
    model, expected = (Decoder(CONFIG, torch.float64) for _ in range(2))
    expected.load_state_dict(model.state_dict())
    ids, targets = torch.randint(CONFIG.vocabulary, (2, len(MICRO_BATCHES), TOKENS))
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in MICRO_BATCHES])
    expected_loss = whole_model(expected, ids, targets, positions)

    layout = seqpar.Layout.striped(TOKENS, comm.size)  # the same number of rows on each rank, whatever the documents
    plans = [seqpar.Plan(seqpar.Mask(lengths), layout) for lengths in MICRO_BATCHES]
    mine = [seqpar.shard(x.T, plans[0], comm.rank).T.contiguous() for x in (ids, targets, positions)]
    stage = Stage(model, index == 1, plans, comm)
    schedule = Schedule1F1B(
        PipelineStage(stage, index, 2, torch.device("cpu"), group=mesh["pp"].get_group()),
        n_microbatches=len(plans),
        loss_fn=lambda logits, labels: cross_entropy(logits[0], labels[0], valid=ids.numel()),
        scale_grads=False,  # losses are shares of one mean over all micro-batches
    )
    losses: list[Tensor] = []
    data = {"number": torch.arange(len(plans)), "positions": mine[2]}  # cut into micro-batches, as tokens are
    if index == 0:
        schedule.step(mine[0], **data)
    else:
        schedule.step(target=mine[1], losses=losses, **data)
    sync_gradients(stage.parameters(), comm)

    loss = all_sum(sum(losses, torch.zeros(())).detach(), seqpar.GroupComm()).item()
    places = {id(p): name for name, p in model.named_parameters()}
    found = [(p.grad, expected.get_parameter(places[id(p)]).grad) for p in stage.parameters()]
    error = max(abs(loss - expected_loss), *(float((a - b).abs().max()) for a, b in found))
    passed = error < 1e-12
    verdict = "PASS" if passed else "FAIL"
    print(f"{verdict}: stage {index}, rank {comm.rank} of {comm.size}, loss {loss:.7f}, gradients within {error:.1e}")
    assert passed, f"stage {index}, rank {comm.rank}: off by {error:.1e}"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
