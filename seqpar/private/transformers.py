"""transformers' private names. Attributes of models and configs are read; nothing here imports transformers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from seqpar.private import PrivateNames

names = PrivateNames(
    "transformers", "5.12 to 5.24", globals(), {
        "transformers.loss.loss_utils": "ForCausalLMLoss ForMaskedLMLoss ForTokenClassification",
    },
)  # fmt: skip
__getattr__ = names.__getattr__

# of a config; what sets it is the second
attention_of, ATTENTION = names.attribute("_attn_implementation"), names.key("_attn_implementation_internal")
# of a class of models
can_set_attention = names.attribute("_can_set_attn_implementation")
recorded_of = names.attribute("_can_record_outputs")  # by name, the modules whose outputs it can return
is_stateful = names.attribute("_is_stateful")
SLICES_MASKS = "_maybe_slice_kv_shared_inputs"  # a method of Gemma 4, which releases before 5.13 have not
# of a model
LOSS_FUNCTION = "_loss_function"  # where one was set
RECORDING = "_output_capturing_hooks_installed"  # a mark of modules that record what they return
tensor_parallel_size = names.attribute("_tp_size")
# of the registries of attention and masks
registered = names.attribute("_global_mapping")
# methods of layers of attention that know no interface
ATTEND = "_attn"  # GPT-J and CodeGen before 5.24, GPT Neo
reshape = names.attribute("_reshape")  # BLOOM
split_heads = names.attribute("_split_heads")  # Falcon
# Factories of masks in `masking_utils`, and what the functions that they make close over.
FACTORIES = {
    "and_masks": "mask_functions", "or_masks": "mask_functions", "blockwise_overlay": "block_sequence_ids",
    "causal_mask_function": "", "bidirectional_mask_function": "", "sliding_window_overlay": "sliding_window",
    "sliding_window_bidirectional_overlay": "sliding_window", "chunked_overlay": "chunk_size",
    "packed_sequence_mask_function": "packed_sequence_mask", "remap_positions_for_packed_sequence": "mask_function",
}  # fmt: skip


def factory_of(function: Callable[..., Any]) -> tuple[str, Mapping[str, Any]]:
    """The factory of `masking_utils` that made a mask function, or that it is, and what it was given; else ""."""
    name, _, inner = function.__qualname__.partition(".<locals>")
    given = inspect.getclosurevars(function).nonlocals if inner else {}
    return name if function.__module__ == "transformers.masking_utils" and name in FACTORIES else "", given
