"""A training loop for a model of images and text, on all ranks."""

import os

import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

import seqpar.train

rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
IMAGE, START, END = 60, 61, 62
text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
config = Qwen3VLConfig(
    text_config=text | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": rope},
    vision_config={
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    image_token_id=IMAGE,
    vision_start_token_id=START,
    vision_end_token_id=END,
)
torch.manual_seed(0)
model = Qwen3VLForConditionalGeneration(config)
torch.distributed.init_process_group()  # GPUs: after torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
comm = seqpar.GroupComm()
seqpar.parallelize(model, comm)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(step):
    """This rank's part of four documents, as a processor makes it; only the first has an image."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 50, (4, 40), generator=generator)
    pixels = torch.randn(4 * 8, 3 * 2 * 4 * 4, generator=generator)  # patches of an image of 16 x 32 pixels
    mask = torch.arange(40) < torch.tensor([[40], [7], [33], [21]])
    ids[0, 5:15] = torch.tensor([START] + [IMAGE] * 8 + [END])
    ids, mask = ids[rank::ranks], mask[rank::ranks].long()
    labels = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels, "mm_token_type_ids": (ids == IMAGE).int()}
    if (ids == IMAGE).any():
        inputs |= {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 8]])}
    return inputs


for step in range(4):
    loss = model(**batch(step)).loss
    loss.backward()
    seqpar.train.sync_gradients(model.parameters(), comm)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss:.7f}")
