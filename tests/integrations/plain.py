"""A model of plain PyTorch, for what every kind of model shares."""

from __future__ import annotations

from torch import Tensor, nn


class Attending(nn.Module):
    """Attention of rows [1, T, 8] by PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)[:, 0]
