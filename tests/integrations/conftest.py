"""Settings of tests of integrations."""

from seqpar.launch import PRELOADED
from tests.spreading import spread

__all__ = ["spread"]

PRELOADED.append("transformers.models.llama.modeling_llama")  # else each new process would import it, for seconds
