"""What runs do to a state that enters: logarithms of factors, or matrices that multiply from the left."""

from __future__ import annotations

from torch import Tensor


def applied(maps: Tensor, states: Tensor) -> Tensor:
    """Maps [N, H], [N, H, K] or [N, H, K, K], as `state_scan` takes them, of states [N, H, K, V]."""
    return maps @ states if maps.dim() == 4 else factors(maps) * states


def applied_transposed(maps: Tensor, grads: Tensor) -> Tensor:
    """The gradient of the states, from that of what `applied` returns."""
    return maps.mT @ grads if maps.dim() == 4 else factors(maps) * grads


def gradient_of_maps(maps: Tensor, states: Tensor, grads: Tensor) -> Tensor:
    """The gradient of the maps, from that of what `applied` returns."""
    if maps.dim() == 4:
        return grads @ states.mT
    return (factors(maps) * states * grads).sum(tuple(range(maps.dim(), 4)))


def factors(maps: Tensor) -> Tensor:
    """Factors of states [N, H, K, V] from their logarithms."""
    return maps.exp()[(..., *[None] * (4 - maps.dim()))]
