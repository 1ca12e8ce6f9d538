"""Run in an environment that has seqpar installed and nothing of this tree on its path: does the installation work?

Prints JSON: where seqpar is, whether the compiled extension loads, which kernel serves, and the error of one training
step against dense attention in float64.
"""

import json
import sys

import torch

import seqpar
from seqpar import native
from seqpar.kernels import call_spec, choose
from seqpar.kernels.protocol import Score
from seqpar.testing import dense_attention, relative_rms


def main() -> None:
    torch.manual_seed(0)
    lengths = [40, 3, 85]
    mask = seqpar.Mask(lengths)
    q, k, v, dout = (torch.randn(sum(lengths), heads, 16, requires_grad=True) for heads in (4, 2, 2, 4))
    plan = seqpar.Plan(mask, seqpar.Layout.contiguous(mask.tokens, 1))
    out = seqpar.attention(q, k, v, plan, seqpar.LocalComm())
    got = [out, *torch.autograd.grad((out * dout).sum(), (q, k, v))]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(*exact, mask)
    wanted = [out, *torch.autograd.grad((out * dout.detach().double()).sum(), exact)]
    call = call_spec(q, k, v, Score(0.25), grads=True, deterministic=True, merges=False)
    found = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "seqpar": seqpar.__file__,
        "missing": native.missing(),
        "without cuda": native.without_cuda(),
        "kernel": choose("auto", call).name,
        "error": max(relative_rms(a.detach(), b.detach()) for a, b in zip(got, wanted)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
