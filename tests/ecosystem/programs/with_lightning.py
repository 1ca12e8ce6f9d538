"""A LightningModule under DDP, and with callbacks that average weights: losses and norms as JSON."""

import json
import logging
import os

os.environ |= {"TORCHELASTIC_RUN_ID": "0", "GROUP_RANK": "0"}  # as torchrun says them
import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

import seqpar
from tests.ecosystem.models import RANKS, document, llama, padded


class Training(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.steps = llama(), []

    def configure_model(self):  # ranks know each other by now, and DDP comes later
        if RANKS > 1 and "forward" not in self.model.__dict__:
            seqpar.parallelize(self.model, seqpar.GroupComm(), average_over=RANKS)

    def validation_step(self, rows, number):
        self.log("loss", self.model(**rows).loss)

    def configure_optimizers(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.1)

    def training_step(self, rows, number):
        loss = self.model(**rows).loss
        self.steps.append({"loss": float(loss.detach())})
        return loss

    def on_before_optimizer_step(self, optimizer):
        norm = torch.stack([p.grad.norm() for p in self.model.parameters()]).norm()
        self.steps[-1]["grad_norm"] = float(norm)


class Copied(Training):
    """Parallel from its setup, before which callbacks copy it, to its teardown."""

    def configure_model(self):
        pass

    def setup(self, stage):
        self.handle = seqpar.parallelize(self.model, seqpar.GroupComm(), average_over=RANKS) if RANKS > 1 else None

    def teardown(self, stage):
        if self.handle is not None:
            self.handle.undo()
        self.handle = None


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
documents = [document(n, 5 + 7 * n % 31) for n in range(24)]
rank, each = int(os.environ.get("RANK", 0)), 4 // RANKS
own = [4 * step + each * rank + n for step in range(6) for n in range(each)]  # the same four documents in every step
loader = torch.utils.data.DataLoader(documents, batch_size=each, sampler=own, collate_fn=padded)
evaluated = torch.utils.data.DataLoader(documents[: 4 * RANKS], batch_size=each, sampler=own[:each], collate_fn=padded)
cases = {
    "ddp": (Training, []),
    "moving average": (Copied, [EMAWeightAveraging(decay=0.5)]),
    "average of epochs": (Copied, [StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)]),
}
for case, (kind, callbacks) in cases.items():
    training = kind()
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp" if RANKS > 1 else "auto", max_epochs=3,
        limit_train_batches=2, logger=False, use_distributed_sampler=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(training, loader, evaluated)
    (found,) = trainer.validate(training, evaluated, verbose=False)
    print(json.dumps({"case": case, "steps": training.steps, "evaluation": found["loss"]}))
