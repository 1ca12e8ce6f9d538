"""Settings of tests of integrations."""

from seqpar.launch import PRELOADED
from tests.spreading import spread

__all__ = ["spread"]

PRELOADED.append("transformers.models.llama.modeling_llama")  # seconds of every process whose rank fails
