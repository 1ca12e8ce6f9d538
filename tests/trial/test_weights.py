"""A model has random weights of 32 bits in a trial; its own, and their memory, stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from seqpar.trial.weights import drawn, quantised


class Layer(nn.Linear):
    """A layer that returns its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight


class Parts(nn.Module):
    """Weights that are zero, tied, of 16 bits, or codes if so asked."""

    def __init__(self, codes: bool = False) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(4))
        self.narrow = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
        if codes:
            self.codes = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("table", torch.ones(3, dtype=torch.float16))
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.layers = nn.ModuleList(Layer(3, 3) for _ in range(2))

    def forward(self, x: Tensor) -> list[Tensor]:
        """The weights of the layers while they are called."""
        return [layer(x) for layer in self.layers]


def test_a_model_has_the_same_random_weights_in_every_run() -> None:
    model = Parts()
    runs = []
    for _ in range(2):
        with drawn(model):
            runs.append([model.gate, model.narrow, model.embedding.weight, *model(torch.ones(1, 3))])
            assert model.narrow.dtype == model.table.dtype == torch.float32 and model.head.weight is runs[-1][2]
            assert not any(map(torch.equal, (layer.weight for layer in model.layers), runs[-1][3:]))
    assert all(map(torch.equal, *runs)) and runs[0][0].all()
    assert not torch.equal(runs[0][3], runs[0][4])


def test_weights_larger_than_the_numbers_drawn_have_no_equal_rows() -> None:
    model = nn.Linear(1000, 1500)
    with drawn(model):
        assert len(model.weight.unique(dim=0)) == 1500


def test_a_model_is_as_before_afterwards() -> None:
    model = Parts()
    loss = (model.gate * model.gate).sum()
    before = {name: (x, x._version, x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
    with drawn(model):
        model(torch.ones(1, 3))
    for name, x in model.state_dict(keep_vars=True).items():
        same, version, values = before[name]
        assert x is same and x._version == version and torch.equal(x, values), name
    loss.backward()  # a graph from before the trial
    assert torch.equal(model.gate.grad, torch.zeros(4))


def test_what_cannot_be_drawn_stays() -> None:
    model = Parts(codes=True)
    assert quantised(model) and not quantised(Parts())
    with drawn(model):
        assert torch.equal(model.codes, torch.arange(3)) and model.narrow.dtype == torch.bfloat16
        assert model.gate.all()
    with drawn(Parts().to("meta")):
        pass
