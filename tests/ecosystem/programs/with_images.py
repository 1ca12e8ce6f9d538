"""Trainer on a model of images and text, with and without recomputed layers: a line of JSON for each, step by step."""

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Trainer, TrainingArguments

from tests.ecosystem.models import RANKS, document
from tests.ecosystem.trainers import arguments, on_all_ranks, report

IMAGE, START, END = 60, 61, 62


def vision_model():
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    config = Qwen3VLConfig(
        text_config=text | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": rope},
        vision_config={
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32,
            "patch_size": 4, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
        },
        image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config)


def example(number):
    """A document; one in three has an image of 16 x 32 pixels after its first token."""
    ids = [1 + token % 50 for token in document(number, 5 + 7 * number % 31)]
    return {"number": number, "ids": ids if number % 3 else [ids[0], START, *[IMAGE] * 8, END, *ids[1:]]}


def padded(examples):
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(each["ids"]) for each in examples], batch_first=True)
    mask = ids > 0
    batch = {"input_ids": ids, "attention_mask": mask.long(), "mm_token_type_ids": (ids == IMAGE).int()}
    batch["labels"] = ids.masked_fill(~mask | (ids == IMAGE), -100)
    if numbers := [each["number"] for each in examples if IMAGE in each["ids"]]:
        seeds = (torch.Generator().manual_seed(number) for number in numbers)
        batch["pixel_values"] = torch.cat([torch.randn(4 * 8, 3 * 2 * 4 * 4, generator=seed) for seed in seeds])
        batch["image_grid_thw"] = torch.tensor([[1, 4, 8]] * len(numbers))
    return batch


for recompute in (False, True):
    model = vision_model()
    on_all_ranks(model, average_over=RANKS)  # Trainer tells such models no number of items
    settings = arguments(
        TrainingArguments, gradient_checkpointing=recompute, gradient_accumulation_steps=1 + recompute,
        remove_unused_columns=False,
    )  # fmt: skip
    data = [example(number) for number in range(48)]
    trainer = Trainer(model, settings, train_dataset=data, data_collator=padded)
    trainer.train()
    report(f"recompute {recompute}", trainer)
