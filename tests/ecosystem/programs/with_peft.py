"""A loop of accelerate over adapters of peft, which come before and after `parallelize`: losses and norms as JSON."""

import json

import torch
from accelerate import Accelerator
from peft import get_peft_model

import seqpar
from tests.ecosystem.models import RANKS, document, llama, lora, padded


def losses(order, recompute):
    """The losses and norms of three steps of two batches each."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama()
    if recompute:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    options = {"average_over": RANKS}
    if RANKS > 1 and order == "before":
        seqpar.parallelize(model, seqpar.GroupComm(), **options)
    torch.manual_seed(1)  # of the adapters
    model = get_peft_model(model, lora())
    if RANKS > 1 and order == "after":
        seqpar.parallelize(model, seqpar.GroupComm(), **options)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    documents = [document(n, 5 + 7 * n % 31) for n in range(24)]
    loader = torch.utils.data.DataLoader(documents, batch_size=4 // RANKS, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    found = []
    for rows in loader:
        with accelerator.accumulate(model):
            loss = model(**rows).loss
            accelerator.backward(loss)
            norm = None
            if accelerator.sync_gradients:
                norm = float(accelerator.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
        found.append({"loss": float(loss.detach())} | ({} if norm is None else {"grad_norm": norm}))
    return found


for name, order, recompute in (("before", "before", False), ("after", "after", True)):
    print(json.dumps({"case": name, "steps": losses(order, recompute)}))
