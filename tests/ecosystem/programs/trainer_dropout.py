"""Trainer on a model with dropout of hidden rows: what this rank drops first, and its batches, as a line of JSON."""

import json
import warnings

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.ecosystem.models import document
from tests.ecosystem.trainers import comm, on_all_ranks

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, embd_pdrop=0.5))
on_all_ranks(model)
torch.manual_seed(comm.rank + 1)  # which is in vain here, as Trainer sets the seed again
dropped, batches = [], []
warnings.filterwarnings("ignore", "transformer.drop of a parallel .* was given a hook of your own")
model.transformer.drop.register_forward_hook(lambda module, args, out: dropped.append((out == 0)[0, :8].tolist()))


def together(examples):
    ids = torch.tensor(examples)
    batches.extend(examples)
    return {"input_ids": ids, "labels": ids}


arguments = TrainingArguments(
    "out", use_cpu=True, num_train_epochs=2, per_device_train_batch_size=2, report_to="none", save_strategy="no",
    disable_tqdm=True,
)  # fmt: skip
arguments.seed, arguments.data_seed = comm.rank + 1, 0  # as the pages say
data = [document(number, 16) for number in range(8)]
Trainer(model, arguments, train_dataset=data, data_collator=together).train()
print(json.dumps({"dropped": dropped, "examples": [data.index(each) for each in batches]}))
