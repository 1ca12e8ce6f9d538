"""Answers that share a prompt, as in GRPO, on one tree: the prompt is computed once, and nothing is duplicated.

One prompt has eight answers of different lengths, each with a weight, as an advantage is. The loss is the weighted
log-likelihood of the answers. It and all gradients equal those of eight separate sequences in one process.

Run ``torchrun --nproc-per-node 2 examples/shared_prefix.py``; plain ``python examples/shared_prefix.py`` runs one rank.
"""

import os

import torch
import torch.distributed as dist
from decoder import Config, Decoder
from torch import Tensor
from torch.nn.functional import cross_entropy

import seqpar
from seqpar import recurrent
from seqpar.data import share
from seqpar.train import all_sum, sync_gradients

PROMPT, ANSWERS = 120, [31, 64, 8, 57, 1, 40, 22, 75]


def dense_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence, q ``[T, H, D]``."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


def separately(model: Decoder, prompt: Tensor, answers: list[Tensor], weights: Tensor) -> Tensor:
    """The loss of a sequence for each answer."""
    loss = torch.zeros((), dtype=torch.float64)
    for answer, weight in zip(answers, weights, strict=True):
        tokens = torch.cat([prompt, answer])
        logits = model(tokens, torch.arange(len(tokens)), dense_attention)
        loss = loss + weight * cross_entropy(logits[len(prompt) - 1 : -1], answer, reduction="sum")
    return loss


def on_a_tree(model: Decoder, prompt: Tensor, answers: list[Tensor], weights: Tensor, comm: seqpar.Comm) -> Tensor:
    """This rank's share of the same loss."""
    nodes = [prompt, *answers]
    batch = {
        "input_ids": nodes,
        "labels": nodes,
        "weights": [torch.zeros(len(prompt)).double(), *(w.expand(len(a)) for w, a in zip(weights, answers))],
        "parents": [-1] + [0] * len(answers),
    }
    mine = share(batch if comm.rank == 0 else None, comm)  # one rank brings the group; others would bring theirs
    logits = model(
        mine.tensors["input_ids"], mine.positions, lambda q, k, v: seqpar.attention(q, k, v, mine.plan, comm)
    )
    # the logits of the token before, along the path: those of the prompt's last token go to every answer's first
    before = recurrent.shift(logits, mine.plan, comm)
    losses = cross_entropy(before, mine.tensors["labels"], ignore_index=-100, reduction="none")
    return (losses * mine.tensors["weights"]).sum()


def main() -> None:
    """One rank's part."""
    if "RANK" in os.environ:
        # on GPUs: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then "cpu:gloo,cuda:nccl"
        dist.init_process_group("gloo")
    comm = seqpar.GroupComm() if dist.is_initialized() else seqpar.LocalComm()
    torch.manual_seed(0)  # every rank makes the same model
    torch.set_default_dtype(torch.float64)
    config = Config(dim=64, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=96)
    model = Decoder(config, torch.float64)
    prompt, *answers = torch.randint(0, config.vocabulary, (PROMPT + sum(ANSWERS),)).split([PROMPT, *ANSWERS])
    weights = torch.randn(len(ANSWERS))

    expected = separately(model, prompt, answers, weights)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    expected = expected.detach()

    loss = on_a_tree(model, prompt, answers, weights, comm)
    loss.backward()
    sync_gradients(model.parameters(), comm)  # sums over ranks
    total = all_sum(loss.detach(), comm)
    worst = max(
        float((p.grad - g).abs().max() / g.abs().max()) for p, g in zip(model.parameters(), gradients, strict=True)
    )
    assert abs(float(total - expected)) < 1e-9 * abs(float(expected)), f"rank {comm.rank}: {total} is not {expected}"
    assert worst < 1e-9, f"rank {comm.rank}: a gradient is off by {worst:.1e}"
    if comm.rank == comm.size - 1:
        tree, apart = PROMPT + sum(ANSWERS), sum(PROMPT + n for n in ANSWERS)
        print(
            f"PASS: {len(ANSWERS)} answers on one prompt over {comm.size} ranks, loss {float(total):.6f}, gradients "
            f"within {worst:.1e}; {tree} tokens computed instead of {apart}"
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
