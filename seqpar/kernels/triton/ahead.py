"""The tile tables of a step before its first launch, on the host."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from seqpar.kernels.protocol import CallSpec, StepFacts
from seqpar.kernels.triton import Triton
from seqpar.kernels.triton.config import Descriptor, generation
from seqpar.kernels.triton.tables import key_table, query_table


def host_tables(kernel: Triton, spec: CallSpec, facts: StepFacts) -> dict[Hashable, Any]:
    """The tables that the launches of a call look up, by their keys in the step's memory.

    facts: of the step, on the CPU. A value is a tensor, or a tuple that begins with tensors.
    """
    tables: dict[Hashable, Any] = {}
    facts = replace(facts, memo=lambda key, make: tables[key] if key in tables else tables.setdefault(key, make()))
    device = generation(spec.capability) if spec.device == "cuda" else 0
    for direction in ("forward", "dq", "dkdv") if spec.grads else ("forward",):
        config = kernel.configure(Descriptor(direction, spec.dim, spec.v_dim, spec.dtype.itemsize, device))
        if len(facts.pos) and (len(facts.key_pos) or direction == "forward"):
            (key_table if direction == "dkdv" else query_table)(facts, config)
    return tables
