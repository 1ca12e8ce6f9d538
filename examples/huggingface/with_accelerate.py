"""A transformers model trained with accelerate, on all ranks."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from transformers import LlamaConfig, LlamaForCausalLM

import seqpar


def padded(documents):
    """A batch of documents, padded on the right."""
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


torch.manual_seed(0)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
seqpar.parallelize(model, seqpar.GroupComm(), average_over=accelerator.num_processes)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
documents = [torch.randint(1, 64, (5 + 7 * n % 31,), generator=torch.Generator().manual_seed(n)) for n in range(16)]
loader = torch.utils.data.DataLoader(documents, batch_size=4, collate_fn=padded)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

for step, batch in enumerate(loader):
    loss = model(**batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step} loss {loss:.7f}")
accelerator.end_training()
