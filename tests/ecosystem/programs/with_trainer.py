"""Trainer and a loader that gives all ranks the same batches: a line of JSON for each way, step by step."""

import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.ecosystem.models import document, padded
from tests.ecosystem.trainers import arguments, on_all_ranks, report


class Replicated(Trainer):
    """The same batches on every rank."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=2, collate_fn=self.data_collator)

    def get_eval_dataloader(self, eval_dataset=None):
        return DataLoader(self.eval_dataset, batch_size=2, collate_fn=self.data_collator)


data = [document(number, 5 + 7 * number % 31) for number in range(24)]
for accumulated in (1, 3):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    model = GPT2LMHeadModel(config)
    on_all_ranks(model, source="replicated")
    settings = arguments(TrainingArguments, gradient_accumulation_steps=accumulated, per_device_train_batch_size=8)
    trainer = Replicated(model, settings, train_dataset=data, eval_dataset=data[:7], data_collator=padded)
    trainer.train()
    report(f"accumulated {accumulated}", trainer, evaluation=trainer.evaluate()["eval_loss"])
