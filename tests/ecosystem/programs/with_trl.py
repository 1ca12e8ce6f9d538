"""Trainers of TRL, one after the other: a line of JSON for each, with what it logged at every step."""

import sys
from itertools import product

import torch
from datasets import Dataset
from transformers import LlamaForSequenceClassification
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from tests.ecosystem import trainers
from tests.ecosystem.models import document, llama, lora, text, tokenizer
from tests.ecosystem.trainers import on_all_ranks

FIELDS = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens", "rewards/margins", "margin")
PACKING = {"padded": {}, "bfd": {"packing": True}, "wrapped": {"packing": True, "packing_strategy": "wrapped"}}


def arguments(kind, *, recompute, **more):
    accumulated = {"gradient_checkpointing": recompute, "gradient_accumulation_steps": 1 + recompute}
    return trainers.arguments(kind, **accumulated, **more)


def sft(packing, *, first, adapters, recompute):
    model = llama()
    if first == "parallelize":
        on_all_ranks(model)
    torch.manual_seed(1)  # of adapters
    data = Dataset.from_list([{"input_ids": document(n, 5 + 7 * n % 31)} for n in range(96)])
    settings = arguments(SFTConfig, recompute=recompute, max_length=40, eval_packing=False, **PACKING[packing])
    trainer = SFTTrainer(
        model, settings, train_dataset=data, eval_dataset=data.select(range(8)), processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
    )  # fmt: skip
    if first != "parallelize":
        on_all_ranks(trainer.model)
    trainer.train()
    return trainer, {"evaluation": trainer.evaluate()["eval_loss"]} if packing == "padded" else {}


def dpo(*, first, adapters, recompute):
    model, reference = llama(), None if adapters else llama()
    if first == "parallelize":
        on_all_ranks(model)
    torch.manual_seed(1)
    pairs = [
        {"prompt": text(n, 3 + n % 9), "chosen": text(n + 1, 4 + n % 7), "rejected": text(n + 2, 5)} for n in range(32)
    ]
    trainer = DPOTrainer(
        model, reference, arguments(DPOConfig, recompute=recompute), train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(), peft_config=lora() if adapters else None,
    )  # fmt: skip
    if first != "parallelize":
        on_all_ranks(trainer.model)
        if reference is not None:
            on_all_ranks(trainer.ref_model)
    trainer.train()
    return trainer, {}


def reward(*, first, adapters, recompute):
    config = llama().config
    config.num_labels = 1
    torch.manual_seed(0)
    model = LlamaForSequenceClassification(config)
    on_all_ranks(model)
    pairs = [{"chosen": text(n, 4 + n % 7), "rejected": text(n + 2, 5 + n % 3)} for n in range(32)]
    trainer = RewardTrainer(
        model, arguments(RewardConfig, recompute=recompute), train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(),
    )  # fmt: skip
    trainer.train()
    return trainer, {}


def report(name, made):
    trainer, more = made
    trainers.report(name, trainer, FIELDS, **more)


if "exhaustive" in sys.argv[0]:
    for packing, first, adapters, recompute in product(
        PACKING, ("parallelize", "trainer"), (False, True), (False, True)
    ):
        name = f"sft {packing}, {first} first, adapters {adapters}, recompute {recompute}"
        report(name, sft(packing, first=first, adapters=adapters, recompute=recompute))
    for first, adapters, recompute in product(("parallelize", "trainer"), (False, True), (False, True)):
        name = f"dpo, {first} first, adapters {adapters}, recompute {recompute}"
        report(name, dpo(first=first, adapters=adapters, recompute=recompute))
else:
    report("sft padded", sft("padded", first="trainer", adapters=False, recompute=False))
    report("sft packed", sft("bfd", first="parallelize", adapters=False, recompute=True))
    report("sft wrapped, adapters", sft("wrapped", first="trainer", adapters=True, recompute=True))
    report("dpo", dpo(first="trainer", adapters=False, recompute=False))
    report("dpo, adapters", dpo(first="parallelize", adapters=True, recompute=False))
    report("reward", reward(first="parallelize", adapters=False, recompute=False))
