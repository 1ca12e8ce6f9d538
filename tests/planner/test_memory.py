"""The bytes of a rank: what every device has, and what NCCL and its third stage of keys add."""

from __future__ import annotations

from dataclasses import replace

from seqpar.planner import Hardware, ModelShape
from seqpar.planner.memory import Memory

SHAPE = ModelShape.preset("llama-8b")
STAGE = 64 << 20


def test_nccl_takes_buffers_and_a_third_stage_of_keys() -> None:
    machine = Hardware.preset("h100")
    alone = replace(machine, inside=replace(machine.inside, channels=None))
    buffers = 7 * 32 * (4 << 20)  # 7 peers of a node, 32 channels to each, 4 MiB a channel
    more = Memory.of(SHAPE, machine, STAGE).fixed - Memory.of(SHAPE, alone, STAGE).fixed
    assert more == buffers + STAGE
    one = replace(machine, node=1)
    assert Memory.of(SHAPE, machine, STAGE).fixed - Memory.of(SHAPE, one, STAGE).fixed == buffers
    assert Memory.of(SHAPE, machine, STAGE).rows < Memory.of(SHAPE, alone, STAGE).rows


def test_a_stage_has_keys_and_the_gradients_of_two() -> None:
    """On the CPU two of keys in bfloat16 and two of gradients in float32."""
    machine = Hardware.preset("cpu")
    assert Memory.of(SHAPE, machine, 2 * STAGE).fixed - Memory.of(SHAPE, machine, STAGE).fixed == 6 * STAGE
    machine = Hardware.preset("h100")
    assert Memory.of(SHAPE, machine, 2 * STAGE).fixed - Memory.of(SHAPE, machine, STAGE).fixed == 7 * STAGE
