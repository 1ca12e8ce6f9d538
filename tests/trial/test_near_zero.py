"""Parameters that hide what they multiply have other values in a trial; the others, and memory, stay as they are."""

from __future__ import annotations

import torch
from torch import nn

from seqpar.trial.near_zero import in_place_of_zeros, without_zeros


class Parts(nn.Module):
    """Parameters that are zero everywhere, nearly, in part, or where a zero hides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(4))
        self.scale = nn.Parameter(torch.full((2, 3), 1e-6))
        self.both = nn.Parameter(torch.tensor([1.0, 0.0]))
        self.columns = nn.Parameter(torch.tensor([[1.0, 0.0], [2.0, 0.0]]))
        self.sparse = nn.Parameter(torch.eye(3))
        self.linear = nn.Linear(3, 3)
        nn.init.zeros_(self.linear.bias)
        self.table = nn.Embedding(5, 3, padding_idx=0)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight


def test_zeros_are_replaced_where_they_hide_something() -> None:
    model = Parts()
    others = in_place_of_zeros(model)
    names = {name for name, p in model.named_parameters() if id(p) in others}
    assert names == {"gate", "scale", "both", "columns"}
    assert all((others[id(p)].abs() > 1e-3).all() for p in (model.gate, model.scale, model.both, model.columns))
    assert others[id(model.both)][0] == 1
    assert torch.equal(others[id(model.columns)][:, 0], model.columns[:, 0])


def test_a_model_is_as_before_afterwards() -> None:
    model = Parts()
    loss = (model.gate * model.gate).sum()
    before = {name: (p.data_ptr(), p._version, p.detach().clone()) for name, p in model.named_parameters()}
    with without_zeros(model):
        assert model.gate.all()
    for name, p in model.named_parameters():
        memory, version, values = before[name]
        assert (p.data_ptr(), p._version) == (memory, version) and torch.equal(p, values), name
    loss.backward()  # a graph from before the trial
    assert torch.equal(model.gate.grad, torch.zeros(4))


def test_parameters_that_cannot_be_replaced_stay() -> None:
    with torch.inference_mode():
        model = Parts()
    with without_zeros(model):
        assert not model.gate.any()
    with without_zeros(Parts().to("meta")):
        pass
