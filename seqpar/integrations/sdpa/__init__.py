"""PyTorch's own attention functions under a plan: ``with sdpa(plan, comm):``, and `parallelize` for a whole model."""

from seqpar.integrations.sdpa.model import parallelize
from seqpar.integrations.sdpa.reroute import sdpa

__all__ = ["parallelize", "sdpa"]
