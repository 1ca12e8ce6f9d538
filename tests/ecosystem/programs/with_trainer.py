"""Trainer and a loader that gives all ranks the same batches: a line of JSON for each way, step by step."""

import json
import math

import torch
from accelerate import PartialState
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import seqpar
from seqpar.integrations.hf import planning
from tests.ecosystem.models import RANKS, document

planning.SPREADING = -math.inf  # documents as short as these would stay where they are

PartialState(cpu=True)  # ranks know each other from here on
comm = seqpar.GroupComm() if RANKS > 1 else None


class Replicated(Trainer):
    """The same batches on every rank."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)

    def get_eval_dataloader(self, eval_dataset=None):
        return DataLoader(self.eval_dataset, batch_size=2, collate_fn=self.data_collator)


def padded(documents):
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


data = [torch.tensor(document(number, 5 + 7 * number % 31)) for number in range(24)]
for accumulated in (1, 3):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    model = GPT2LMHeadModel(config)
    if comm is not None:
        seqpar.parallelize(model, comm, source="replicated")
    arguments = TrainingArguments(
        "out", use_cpu=True, max_steps=3, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True,
        optim="sgd", learning_rate=0.1, gradient_accumulation_steps=accumulated,
    )  # fmt: skip
    trainer = Replicated(model, arguments, train_dataset=data, eval_dataset=data[:7], data_collator=padded)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    evaluation = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        steps = [{field: float(entry[field]) for field in ("loss", "grad_norm")} for entry in logged]
        print(json.dumps({"case": f"accumulated {accumulated}", "steps": steps, "evaluation": evaluation}))
