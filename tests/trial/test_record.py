"""The record of a run of a model that other threads use meanwhile."""

import torch
from torch import nn

from seqpar.trial.record import RunRecord


def test_a_hook_that_another_thread_has_not_fully_registered_fails_no_call():
    """torch adds a hook first and then that it takes kwargs; a call between the two gives it none."""
    model = nn.Sequential(nn.Linear(2, 3))
    record = RunRecord(model, None)
    with record.hooked():
        for module in model.modules():
            module._forward_pre_hooks_with_kwargs.clear()
        assert model(torch.ones(1, 2)).shape == (1, 3)
    assert record.events == [] and not model[0]._forward_pre_hooks
