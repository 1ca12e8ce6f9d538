"""A training loop for a transformers model, on all ranks."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import seqpar.train

torch.manual_seed(0)
sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
torch.distributed.init_process_group()  # GPUs: after torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
comm = seqpar.GroupComm()
seqpar.parallelize(model, comm, source="replicated")  # all load the same batch; leave out if each loads its own
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

for step in range(4):
    ids = torch.randint(1, 64, (4, 30 + step), generator=torch.Generator().manual_seed(step))
    mask = torch.arange(ids.shape[1]) < torch.tensor([[9], [30], [17], [25]])  # padded on the right
    loss = model(input_ids=ids, attention_mask=mask.long(), labels=ids.masked_fill(~mask, -100)).loss
    loss.backward()
    seqpar.train.sync_gradients(model.parameters(), comm)  # right after the last backward, before clipping
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss:.7f}")
