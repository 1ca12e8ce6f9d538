"""Transformers of diffusers under a plan."""

from seqpar.integrations.diffusers.model import parallelize

__all__ = ["parallelize"]
