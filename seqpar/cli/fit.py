"""`seqpar fit`: how long a document fits, on which rung, and how many ranks pay. Needs numpy, no device and no comm."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from seqpar.cli.flags import integer, refuse
from seqpar.cli.lengths import add_lengths, documents
from seqpar.cli.output import CommandError, print_table
from seqpar.cli.plan import hardware, in_flags, model_of

if TYPE_CHECKING:
    from seqpar.planner import ModelShape, Training

EXAMPLES = """examples:
  seqpar fit --lengths 131072,9000,30000,4000 --ranks 8 --model llama-8b --hardware h100
  seqpar fit --lengths lengths.csv --ranks 64 --model config.json --host-gb 200
  seqpar fit --lengths 1000000 --ranks 8 --fused-norms --reshard 8
"""


def _reshard(text: str) -> bool | int:
    """The value of --reshard."""
    known = {"true": True, "false": False}
    return known[text.lower()] if text.lower() in known else integer(text)


def add_command(commands: Any) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "fit",
        help="how long a document fits, what to recompute, and how many ranks pay",
        description="From document lengths, a model and a machine: what each layer recomputes or keeps on the\n"
        "host, how many ranks pay, how long a document fits, and the lines that set it up.",
        epilog=EXAMPLES,
    )
    add_lengths(parser)
    parser.add_argument("--ranks", type=integer, default=8, help="ranks that there are (default: 8)")
    parser.add_argument(
        "--model",
        metavar="NAME|FILE",
        default="llama-8b",
        help="model, a preset of ModelShape or a Hugging Face config.json (default: llama-8b)",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        default="h100",
        help="machine, a preset or a file of seqpar calibrate (default: h100)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.15,
        metavar="X",
        help="take the fewest ranks whose step is at most 1 + X times the shortest (default: 0.15)",
    )
    parser.add_argument(
        "--trace", action="store_true", help="measure the layers of transformers' model on tensors without memory"
    )
    parser.add_argument("--rungs", metavar="NAME,...", help="rungs that may be taken (default: all that fit the host)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    state = parser.add_argument_group("training (default: AdamW in float32 under FSDP2 over all ranks)")
    state.add_argument("--state-bytes", type=integer, metavar="N", help="bytes of state a parameter (default: 16)")
    state.add_argument("--shards", type=integer, metavar="N", help="ranks that share the state (default: all)")
    state.add_argument("--weights", help="dtype of gathered weights (default: bfloat16)")
    state.add_argument("--reductions", help="dtype of gradients and their sums (default: float32)")
    state.add_argument(
        "--reshard", metavar="true|false|N", type=_reshard, help="reshard_after_forward of the layers (default: true)"
    )
    state.add_argument("--fused-norms", action="store_true", default=None, help="norms keep no float32 copy")
    state.add_argument("--host-gb", type=integer, metavar="N", help="GB of the host's memory for a rank (default: 0)")
    state.add_argument(
        "--no-training", action="store_true", help="count no weights and no optimizer's state, gradients alone"
    )
    parser.set_defaults(call=show)


def show(args: Any) -> int:
    """Print the ladder, the choice and the lines to paste; returns 0."""
    from seqpar.planner import fit
    from seqpar.planner.fitting import HEADER

    rungs = None if args.rungs is None else args.rungs.split(",")
    try:
        training = _training(args)
        ladder = fit(
            documents(args), args.ranks, model=_traced(args, training) if args.trace else model_of(args.model),
            hardware=hardware(args.hardware), training=training, tolerance=args.tolerance, rungs=rungs,
        )  # fmt: skip
    except (ValueError, NotImplementedError) as error:
        raise CommandError(in_flags(str(error))) from None
    if args.json:
        print(json.dumps(ladder.facts(), indent=2))
        return 0
    print(ladder.headline, end="\n\n")
    print_table("what fits on each rung, and this batch on it", HEADER, ladder.rows())
    print(ladder.reasons, end="\n\n")
    print(ladder.lines)
    return 0


def _traced(args: Any, training: Training) -> ModelShape:
    """The model of a config.json with the bytes of transformers' layers, in the dtype of gathered weights."""
    shape = model_of(args.model)
    if isinstance(shape, str):
        raise CommandError(f"--trace needs --model FILE, a config.json of transformers, got {args.model}")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise CommandError(f"--trace needs transformers: {error}") from None
    import torch

    from seqpar.private.torch import FakeTensorMode
    from seqpar.train.trace import trace_layers

    config, dtype = AutoConfig.from_pretrained(args.model), getattr(torch, training.weights)
    try:
        with FakeTensorMode():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
            several = (m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == shape.layers)
            ids = torch.zeros((1, 31), dtype=torch.int64, device="cpu")
            layers = next(several, None)
            if layers is None:
                raise CommandError(f"--trace: {type(model).__name__} has no list of {shape.layers} layers")
            blocks = trace_layers(layers, lambda: model(input_ids=ids, use_cache=False))
    except (ValueError, RuntimeError) as error:  # NotImplementedError is one
        kind, without, _ = (why := str(error)).partition(" does not support an attention implementation")
        if without:
            why = (
                f"transformers has no {kind} with F.scaled_dot_product_attention, and its other attention keeps scores"
            )
        raise CommandError(f"--trace: {why}; without --trace, layers are counted from the config") from None
    return replace(shape, blocks=tuple(blocks))


def _training(args: Any) -> Any:
    """The `Training` of the flags; those that are not given keep its defaults."""
    from seqpar.plan.traffic import DTYPE_BYTES
    from seqpar.planner import Training

    given = {name: getattr(args, name) for name in ("state_bytes", "shards", "weights", "reductions", "fused_norms")}
    given = {name: value for name, value in given.items() if value is not None}
    if args.reshard is not None:
        given["reshard"] = args.reshard
    if args.host_gb is not None:
        given["host_bytes"] = args.host_gb * 10**9
    if args.no_training:
        refuse(args, ("state_bytes",), "is not for --no-training")
        given["state_bytes"] = DTYPE_BYTES.get(args.reductions or "float32", 4)
    return Training(**given)
