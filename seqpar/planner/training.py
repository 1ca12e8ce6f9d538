"""How a model is trained: the bytes of its state, and how FSDP2 shards and gathers its weights."""

from __future__ import annotations

from dataclasses import dataclass

from seqpar.facts.value import integer
from seqpar.plan.traffic import DTYPE_BYTES


@dataclass(frozen=True)
class Training:
    """What a rank keeps of the model besides activations.

    state_bytes: bytes of weight, gradient and optimizer state a parameter; 16 is AdamW in float32. shards: ranks that
    share the state, by default all ranks of a plan. weights: dtype in which weights are gathered and computed with.
    reductions: dtype in which gradients are kept and summed. reshard: `reshard_after_forward` of FSDP2's layers: True
    gathers a layer's weights again in backward, False keeps them, and an integer keeps them sharded over that many
    ranks. fused_norms: whether norms keep no float32 copy of their input, as Liger's; transformers' own keep one.
    host_bytes: bytes of the host's memory that a rank may take. state_on_host: whether the state is kept there, as by
    FSDP2's `CPUOffloadPolicy`. accumulates: whether gradients of another micro-batch are there already; `fit` and
    `plan_step` set it for several micro-batches.

    Raises: ValueError for values out of range.
    """

    state_bytes: int = 16
    shards: int | None = None
    weights: str = "bfloat16"
    reductions: str = "float32"
    reshard: bool | int = True
    fused_norms: bool = False
    host_bytes: int = 0
    state_on_host: bool = False
    accumulates: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("weights", "reductions"):
            if getattr(self, name) not in DTYPE_BYTES:
                raise ValueError(
                    f"Training {name} must be one of {', '.join(DTYPE_BYTES)}, got {getattr(self, name)!r}"
                )
        for name in ("fused_norms", "state_on_host", "accumulates"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"Training {name} must be True or False, got {getattr(self, name)!r:.60}")
        integer("Training state_bytes", self.state_bytes, DTYPE_BYTES[self.reductions])
        integer("Training host_bytes", self.host_bytes, 0)
        if self.shards is not None:
            integer("Training shards", self.shards, 1)
        if not isinstance(self.reshard, bool):
            integer("Training reshard", self.reshard, 1)
            if self.shards is not None:
                self._check_reshard(self.shards)

    def over(self, ranks: int) -> int:
        """The ranks that share the state. Raises ValueError where shards do not divide the ranks."""
        shards = ranks if self.shards is None else self.shards
        if ranks % shards:
            raise ValueError(f"Training shards={shards} does not divide the {ranks} ranks")
        if not isinstance(self.reshard, bool):
            self._check_reshard(shards)
        return shards

    def _check_reshard(self, shards: int) -> None:
        if shards % self.reshard:
            raise ValueError(f"Training reshard={self.reshard} is no divisor of the {shards} shards")
