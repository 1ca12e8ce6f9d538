"""Trainers of TRL that generate, or compare with a reference model: a line of JSON for each, with what it logged.

What is sampled must be the same on any number of ranks. So a row draws by its place among the rows of all ranks.
"""

import math
import sys
from itertools import product

import torch
from datasets import Dataset
from transformers import GenerationMixin, LlamaForCausalLM, Seq2SeqTrainer, Seq2SeqTrainingArguments
from trl import GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer

from tests.ecosystem import trainers
from tests.ecosystem.models import RANKS, document, llama, lora, text, tokenizer
from tests.ecosystem.trainers import arguments, on_all_ranks, state

FIELDS = (
    "loss", "grad_norm", "entropy", "num_tokens", "reward", "reward_std", "completions/mean_length", "kl",
    "clip_ratio/region_mean", "rewards/chosen", "rewards/rejected", "logps/chosen",
)  # fmt: skip
if state.is_main_process:
    llama().save_pretrained("tiny")
state.wait_for_everyone()

made = {"calls": 0, "tokens": 0}
generate = GenerationMixin.generate


def generate_anew(*args, **named):
    made.update(calls=made["calls"] + 1, tokens=0)
    return generate(*args, **named)


def draw(probabilities, num_samples):
    made["tokens"] += 1
    row = torch.arange(len(probabilities)) + len(probabilities) * state.process_index
    at = (row * 0.618 + made["tokens"] * 0.7549 + made["calls"] * 0.4302).remainder(1.0)
    return (probabilities.cumsum(-1) < at[:, None]).sum(-1, keepdim=True).clamp(max=probabilities.shape[1] - 1)


GenerationMixin.generate, torch.multinomial = generate_anew, draw


def score(completion_ids, **_):
    """A reward that differs between answers."""
    return [sum(n % 7 for n in ids) / 10 - len(ids) / 20 for ids in completion_ids]


PROMPTS = [{"prompt": text(n, 3 + 5 * n % 9)} for n in range(24)]
ANSWER = 11  # tokens at most
ONLINE = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
# Advantages of a group sum up to 0, and so does a loss whose ratios are 1. A ratio is made of a token's
# log-probability, of about 1, or of an answer's, which rounds as all of its tokens do.
CANCELS = {"grpo": 1.0, "rloo": ANSWER * math.log(tokenizer().vocab_size)}


def online(name, *, first, adapters, recompute, beta):
    trainer_of, config = ONLINE[name]
    made.update(calls=0)
    model = LlamaForCausalLM.from_pretrained("tiny")
    if first == "parallelize":
        on_all_ranks(model)
    torch.manual_seed(1)  # of adapters
    settings = arguments(
        config, num_generations=2, max_completion_length=ANSWER, num_iterations=2, steps_per_generation=1, beta=beta,
        gradient_checkpointing=recompute,
    )  # fmt: skip
    trainer = trainer_of(
        model, score, settings, train_dataset=Dataset.from_list(PROMPTS), processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
    )  # fmt: skip
    if first != "parallelize":
        on_all_ranks(trainer.model)
    if trainer.ref_model is not None:  # TRL has loaded it itself
        on_all_ranks(trainer.ref_model)
    trainer.train()
    return trainer


def kto(*, first, adapters, recompute, loss_type):
    model = LlamaForCausalLM.from_pretrained("tiny")
    if first == "parallelize":
        on_all_ranks(model)
    torch.manual_seed(1)
    answers = [
        {"prompt": text(n, 3 + n % 9), "completion": text(n + 1, 4 + n % 7), "label": n % 2 == 0} for n in range(24)
    ]
    trainer = KTOTrainer(
        model, None if adapters else LlamaForCausalLM.from_pretrained("tiny"),
        arguments(KTOConfig, gradient_checkpointing=recompute, loss_type=loss_type),
        train_dataset=Dataset.from_list(answers), processing_class=tokenizer(),
        peft_config=lora() if adapters else None,
    )  # fmt: skip
    if first != "parallelize":
        on_all_ranks(trainer.model)
        if not adapters:
            on_all_ranks(trainer.ref_model)
    trainer.train()
    return trainer


def predicted():
    """Trainer's own `predict_with_generate`: a loss over all ranks, and tokens that each rank makes by itself."""
    model = LlamaForCausalLM.from_pretrained("tiny")
    on_all_ranks(model)
    ids = [torch.tensor(document(n, 9)) for n in range(24)]
    data = [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": x} for x in ids]
    settings = arguments(
        Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=9 + 6,
        per_device_eval_batch_size=8 // RANKS,
    )  # fmt: skip

    def metrics(found):
        return {"made": float(found.predictions[:, 9:].clip(0).sum())}

    trainer = Seq2SeqTrainer(model, settings, train_dataset=data, eval_dataset=data[:8], compute_metrics=metrics)
    trainer.train()
    found = trainer.evaluate()
    assert found["eval_made"] > 0
    return trainer, found["eval_loss"] + found["eval_made"]


def report(name, trainer, **more):
    if any("reward" in entry for entry in trainer.state.log_history):
        more["cancels"] = {"loss": CANCELS[name.split(",")[0]]}
    trainers.report(name, trainer, FIELDS, **more)


if "exhaustive" in sys.argv[0]:
    for first, adapters, recompute in product(("parallelize", "trainer"), (False, True), (False, True)):
        about = f"{first} first, adapters {adapters}, recompute {recompute}"
        options = {"first": first, "adapters": adapters, "recompute": recompute}
        for name in ONLINE:
            report(f"{name}, {about}", online(name, beta=0.1, **options))
        report(f"kto, {about}", kto(loss_type="apo_zero_unpaired", **options))
else:
    report("grpo", online("grpo", first="parallelize", adapters=False, recompute=False, beta=0.0))
    report("grpo, reference", online("grpo", first="parallelize", adapters=False, recompute=True, beta=0.1))
    report("rloo, adapters", online("rloo", first="trainer", adapters=True, recompute=False, beta=0.1))
    report("kto", kto(first="trainer", adapters=False, recompute=False, loss_type="apo_zero_unpaired"))
    trainer, evaluation = predicted()
    report("predict_with_generate", trainer, evaluation=evaluation)
