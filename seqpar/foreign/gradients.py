"""Sketches of the gradient of a model's output, by which ranks find out that their losses differ."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seqpar.comm import Comm
from seqpar.foreign.fingerprint import CHUNK, pseudo_random

SUMS = 32  # of a `sketch`
# Ranks' gradients of the output may be further apart than bits: where each rank's kernels round in another order, as in
# a loss behind a decoder. All of bfloat16's last digits differ by 0.4 % of the norm, other targets by the norm itself.
SAME_GRADIENT = 0.01  # of the norm


def sketch(x: Tensor) -> list[float]:
    """A tensor's sum of squares, and `SUMS` sums of its elements with random signs.

    The squared differences of these sums between two tensors add up to the squared norm of the tensors' difference, on
    average over signs, and nearly so where many elements differ. An element that stands in another place goes unnoticed
    once in `2 * SUMS` pairs of places, which have a sum and a sign in common.
    """
    x = x.detach()
    x = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(-1)
    sums = torch.zeros(1 + SUMS, dtype=torch.float64, device=x.device)
    for n, chunk in enumerate(x.split(CHUNK)):
        wide, random = chunk.double(), pseudo_random(n * CHUNK, len(chunk), x.device)
        sums[0] += wide.square().sum()
        sums[1:].index_add_(0, (random >> 32) % SUMS, torch.where(random < 0, -wide, wide))
    return sums.tolist()  # type: ignore[no-any-return]


def check_gradient(room: str, comm: Comm, grad: Tensor, *, of: str = "", more: str = "") -> None:
    """Raise ValueError on every rank if the gradient of a model's output differs between ranks. A collective.

    room: begins the message. of: says whose output, as " of Latte". more: what else may be done about it.
    """
    every = comm.gather(f"{room}: backward{of}", sketch(grad))
    for rank, other in enumerate(every):
        if (apart := _apart(every[0], other)) > SAME_GRADIENT:
            raise ValueError(
                f"{room}: the gradient of the output{of} differs between rank 0 and rank {rank}, by about {apart:.0%} "
                f"of its norm; compute the whole loss on every rank, from the same target{more}"
            )


def _apart(first: list[float], second: list[float]) -> float:
    """The norm of the difference of two tensors, relative to the larger norm, from their sketches."""
    squares, larger = (first[0], second[0]), max(first[0], second[0])
    if not any(map(math.isfinite, squares)):
        return 0.0  # an overflow happens on all ranks, and a gradient scaler will skip the step
    if not all(map(math.isfinite, squares)):
        return math.inf
    return math.dist(first[1:], second[1:]) / larger**0.5 if larger else 0.0
