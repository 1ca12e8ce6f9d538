"""What programs of Trainer and TRL share: their ranks, their settings, and a line of JSON with what each logged."""

from __future__ import annotations

import json
import math
from typing import Any

from accelerate import PartialState

import seqpar
from seqpar.integrations.hf import planning
from tests.ecosystem.models import RANKS

planning.SPREADING = -math.inf  # documents as short as these would stay where they are

state = PartialState(cpu=True)  # ranks know each other from here on
comm = seqpar.GroupComm() if RANKS > 1 else None


def on_all_ranks(model: Any, **options: Any) -> None:
    """Make the model parallel if there are several ranks."""
    if comm is not None:
        seqpar.parallelize(model, comm, **options)


def arguments(kind: Any, **more: Any) -> Any:
    """The settings of three steps of four documents."""
    settings = {
        "use_cpu": True, "bf16": False, "max_steps": 3, "per_device_train_batch_size": 4 // RANKS, "logging_steps": 1,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "optim": "sgd", "learning_rate": 0.1,
    }  # fmt: skip
    return kind("out", **settings | more)


def report(name: str, trainer: Any, fields: tuple[str, ...] = ("loss", "grad_norm"), **more: Any) -> None:
    """Print these fields of all steps, and what moved between ranks."""
    logged = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    if trainer.is_world_process_zero():
        steps = [{field: float(entry[field]) for field in fields if field in entry} for entry in logged]
        sent = comm.stats.bytes_sent if comm is not None else 0
        print(json.dumps({"case": name, "steps": steps, "sent": sent} | more))
    if comm is not None:
        comm.stats.reset()
