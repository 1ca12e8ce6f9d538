"""Tests of what a release of another library does not have, does otherwise, or cannot run itself.

`make test` runs all but the last, with the versions of `constraints.txt`; with one before that of `NEWER` its tests are
skipped. What such a release refuses where a later one does not is no fault of it: a model on ranks is right there, or
refused by name.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import pytest

HF = "integrations/hf/"
ADAPTERS = f"{HF}test_adapters.py::"
# library and release -> beginnings of test names, and why releases before it are not tested
NEWER: dict[tuple[str, tuple[int, int]], dict[str, str]] = {("peft", (0, 21)): {
    f"{ADAPTERS}test_adapters_that_compute_each_row_may_come_late[hira": "HiRA",
    f"{ADAPTERS}test_adapters_that_compute_each_row_may_come_late[supertuning": "supertuning",
    f"{ADAPTERS}test_a_second_model_is_refused": "Shadow",
    f"{ADAPTERS}test_layers_that_mix_rows_are_refused": "Lily",
    f"{ADAPTERS}test_layers_that_did_not_act_in_the_trial": "Lily",
    f"{ADAPTERS}test_a_projection_on_the_mean_of_rows": "VeLoRA",
    "advice/test_adapters.py::test_a_term_that_an_adapter_adds_to_the_loss": "AdaLoRA takes no orth_reg_weight of 0",
}, ("matplotlib", (3, 8)): {
    "plan/test_plot.py::test_a_mask_of_bands_and_documents_of_several_widths": "its layout collapses",
}, ("torch", (2, 13)): {
    "train/test_activations.py::test_tiles_of_a_recomputed_layer_take_little_memory_and_time": "tiles are repeated",
    "integrations/test_diffusers_wrapped.py::test_blocks_are_compiled_between_attentions": "more graphs",
}, ("transformers", (5, 24)): {
    f"{HF}test_vision.py::test_every_family_spread_and_form[mistral_large4": "Mistral Large 4",
    f"{HF}test_absent.py::test_what_is_absent_means_what_it_means_on_one_process[mistral_large4": "Mistral Large 4",
    "planner/test_recurrent.py::test_parameters_of_a_config_are_those_of_its_model[BailingHybrid": "Ling 3",
    f"{HF}test_split_": "generate takes no cache by that name",
    "test_docs.py::test_its_program_trains_on_two_ranks_as_on_one[inference-1": "generate takes no cache by that name",
}, ("transformers", (5, 23)): {
    f"{HF}test_towers.py::test_pooled_images_come_home": "LFM 3 VL",
    f"{HF}test_towers.py::test_an_output_that_nobody_knows": "LFM 3 VL",
    f"{HF}test_towers.py::test_features_of_sound": "VibeVoice",
    f"{HF}test_towers.py::test_a_model_that_trains_only_with_token_types": "Molmo 2",
    f"{HF}test_vision.py::test_accumulated_micro_batches": "Qwen3 VL ignores num_items_in_batch",
    f"{HF}test_vision.py::test_classifiers_of_sequences_with_images[qwen3_5": "it convolves inside its text model",
    f"{HF}test_calls.py::test_hidden_states_beside_logits": "Moshi has attention of its own",
    f"{HF}test_heads.py::test_a_loss_that_is_a_sum_with_a_count": "Zamba 2 has no limit of time steps",
    f"{HF}test_mixers.py::test_a_document_does_not_know_of_another[recurrent_gemma": "it has attention of its own",
    f"{HF}test_mixers.py::test_places_that_recurrent_gemma_reads": "it has attention of its own",
    f"{HF}test_positions.py::test_inside_local_lengths_grow": "dynamic rotary embeddings forget lengths",
    f"{HF}test_recurrent.py::test_a_model_on_ranks_is_each_document_alone[olmo_hybrid": "three convolutions a layer",
    f"{HF}test_recurrent.py::test_a_model_on_ranks_is_each_document_alone[zamba": "it needs kernels for GPUs",
    f"{HF}test_refusals.py::test_models_are_refused_by_name_and_left_as_they_were[a learned bias": "T5 adds it itself",
    "trial/test_acceptance.py::test_a_bad_model_is_refused_by_name[transformers, a learned bias": "T5 adds it itself",
    f"{HF}test_refusals.py::test_an_encoder_alone_is_not_refused": "UMT5 and LongT5 add a bias themselves",
    f"{HF}test_twin.py::test_weights_that_are_sharded_already": "transformers shards by other tensors",
    f"{HF}test_rewritten_attention.py::test_a_model_on_ranks_is_the_model_of_one_process[falcon": "Falcon makes a mask",
    "planner/test_recurrent.py::test_parameters_of_a_config_are_those_of_its_model[NemotronH": "layers had other names",
    "planner/test_recurrent.py::test_parameters_of_a_config_are_those_of_its_model[Granite": "layers had other names",
}}  # fmt: skip

# the same of one release
LLAMA4 = "Llama 4 with images fails on one process: 'MoeCausalLMOutputWithPast' object has no attribute 'image_outputs'"
BROKEN = {
    "5.24.0": {
        f"{HF}test_vision.py::test_every_family_spread_and_form[llama4-": LLAMA4,
        f"{HF}test_vision.py::test_losses_and_gradients_are_those_of_one_process[llama4-": LLAMA4,
        f"{HF}test_absent.py::test_what_is_absent_means_what_it_means_on_one_process[llama4]": LLAMA4,
    },
}  # fmt: skip


def skip_newer(items: list[pytest.Item]) -> None:
    """Skip the tests of `NEWER` where a library is older, and of `BROKEN` with that release of transformers."""
    skipped: dict[str, str] = {}
    for (library, since), tests in NEWER.items():
        with suppress(PackageNotFoundError):
            installed = version(library)
            if tuple(map(int, installed.split(".")[:2])) < since:
                skipped |= tests
            if library == "transformers":
                skipped |= BROKEN.get(installed, {})
    for item in items:
        name = item.nodeid.partition("tests/")[2] or item.nodeid
        if why := next((why for start, why in skipped.items() if name.startswith(start)), ""):
            item.add_marker(pytest.mark.skip(reason=f"not in this release: {why}"))
