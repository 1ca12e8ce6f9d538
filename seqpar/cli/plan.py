"""`seqpar plan`: what a plan computes and sends, from document lengths alone. Needs numpy, no device and no comm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqpar.cli.flags import content, integer, integers, refuse, shown
from seqpar.cli.lengths import add_lengths, documents
from seqpar.cli.output import CommandError, need, print_table, size

if TYPE_CHECKING:
    from seqpar.facts.mask import Mask
    from seqpar.plan import Plan
    from seqpar.plan.counts import Load
    from seqpar.planner import Forecast, ModelShape

DTYPES = ("bfloat16", "float16", "float32", "float64")
RANKS = 1 << 16  # at most: ranks are reported one by one
STRIPED = 1 << 24  # at most: striped layouts deal tokens out one by one
# Flags that set what the planner chooses, and flags that only the planner reads.
CHOSEN = ("transport", "ulysses", "heads", "kv_heads", "dim", "dtype")
PLANNERS = ("hardware", "token_slack", "max_tokens_per_rank", "recompute", "no_training")
# Phases of a forecast in words.
PHASES = {
    "attention": "attention", "recurrent": "recurrent layers", "exposed": "exposed transfers",
    "linear": "linear layers", "head": "the head",
}  # fmt: skip
# The meaning of each row and column: of all plans, and of those that list every rank.
LEGEND = """legend:
  rows              tokens of a rank, which linear layers and memory depend on; in the list of ranks with padding
  area              attended pairs of a query and a key that a rank computes; "of mean" is relative to the mean
  pieces            stretches of consecutive tokens of one document
  keys fetched      keys that a rank receives in a layer's forward
  max/mean          the most loaded rank relative to the mean: 1.05 means that 5 % of the time is lost""".splitlines()
LEGEND_OF_RANKS = """
  tokens            rows without padding
  keys in, from     keys that a rank receives in a layer's forward, and the number of ranks that send to it
  steps             computations in a layer's forward: with the rank's own keys, then each time that keys arrive
  forward, backward bytes that a rank sends in one layer, to the ranks in the last column""".splitlines()[1:]

EXAMPLES = """examples:
  seqpar plan --lengths 131072,30000,500,1200 --ranks 64 --model llama-8b --hardware h100
  seqpar plan --lengths lengths.csv --column tokens --ranks 16 --plot plan.png
  seqpar plan --random 200 --ranks 64 --model llama-70b --hardware h200 --json
  seqpar plan --lengths 30000,500,1200 --ranks 8 --layout zigzag --transport ring
"""


def add_command(commands: Any) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "plan",
        help="plan a batch and show what each rank computes and sends",
        description="Plan a batch from its document lengths: which ranks share each document, the predicted time of\n"
        "the step, and its distance from a lower bound; or show a fixed layout.",
        epilog=EXAMPLES,
    )
    add_lengths(parser)
    parser.add_argument("--full", action="store_true", help="attend to every key of the document, not only causally")
    parser.add_argument(
        "--window",
        type=integers,
        metavar="W",
        help="keys that a token sees in addition to its own, in all layers: W to the left, and with --full W to the "
        "right; or LEFT,RIGHT (default: the model's windows)",
    )
    parser.add_argument("--ranks", type=integer, default=8, help="ranks that share the batch (default: 8)")
    parser.add_argument("--node", type=integer, metavar="G", help="ranks per node (default: the hardware's)")
    parser.add_argument(
        "--layout",
        choices=("planned", "contiguous", "zigzag", "striped"),
        default="planned",
        help="which rank holds which tokens; planned is plan_batch's choice (default)",
    )
    parser.add_argument("--plot", metavar="PNG", help="write a picture of the plan")
    parser.add_argument("--json", action="store_true", help="print JSON")
    planner = parser.add_argument_group("with --layout planned")
    planner.add_argument(
        "--model",
        metavar="NAME|FILE",
        help="model, a preset of ModelShape or a Hugging Face config.json (default: llama-8b)",
    )
    planner.add_argument(
        "--hardware", metavar="NAME|FILE", help="machine, a preset or a file of seqpar calibrate (default: h100)"
    )
    planner.add_argument(
        "--recompute",
        choices=("none", "attention", "keep-attention", "full", "tiled"),
        help="activations recomputed in backward (default: as few as memory allows)",
    )
    planner.add_argument(
        "--token-slack",
        type=float,
        metavar="X",
        help="fraction of rows by which a rank may exceed the mean (default: 0)",
    )
    planner.add_argument("--max-tokens-per-rank", type=integer, metavar="N", help="a limit in addition to memory")
    planner.add_argument(
        "--no-training",
        action="store_true",
        default=None,
        help="count no memory for the model's state and gathered weights (default: AdamW in float32 under FSDP2)",
    )
    fixed = parser.add_argument_group("with another layout")
    fixed.add_argument(
        "--transport",
        choices=("fetch", "ring", "double_ring", "gather"),
        help="how keys reach other ranks (default: fetch)",
    )
    fixed.add_argument("--ulysses", type=integers, metavar="U", help="Ulysses width, or one per document (default: 1)")
    fixed.add_argument("--heads", type=integer, help="query heads of the layer whose bytes are counted (default: 32)")
    fixed.add_argument("--kv-heads", type=integer, help="key and value heads of that layer (default: 8)")
    fixed.add_argument("--dim", type=integer, help="head dim (default: 128)")
    fixed.add_argument("--dtype", choices=DTYPES, help="dtype of queries, keys and values (default: bfloat16)")
    parser.set_defaults(call=show)


def show(args: Any) -> int:
    """Print the plan; returns 0. Errors of masks, layouts and plans end the command with their own message."""
    if args.plot is not None:
        need("matplotlib", "seqpar[plot]", "--plot")
        picture(args.plot)
    if not 1 <= args.ranks <= RANKS:
        raise CommandError(f"--ranks must be 1 to {RANKS:,}, got {args.ranks}")
    try:
        plan, call, alone = planned(args) if args.layout == "planned" else fixed(args)
    except (ValueError, NotImplementedError) as error:
        raise CommandError(in_flags(str(error))) from None
    facts = measure(plan, args.layout, call, alone)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print(facts["summary"])
        print(plan.describe(), end="\n\n")
        by_rank = "forward_bytes" in facts["ranks"][0]
        if by_rank:
            print_bytes(facts)
        print("\n".join(LEGEND + LEGEND_OF_RANKS * by_rank))
    if args.plot is not None:
        try:
            plan.plot(args.plot, call=call)
        except (OSError, ValueError, RuntimeError) as error:
            raise CommandError(f"cannot write {args.plot}: {error}") from None
        if not args.json:
            print(f"picture: {args.plot}")
    return 0


FLAGS = {  # what errors say to Python, and the flag for it
    "window must be (left, right), each None or an integer of at least 0": "--window is W or LEFT,RIGHT, of at least 0",
    "give causal=False or right=0": "give --full or LEFT,0", ", several micro-batches (plan_step)": "",
    'recompute more (ModelShape recompute="full")': "--recompute full", "; or build a ModelShape": "",
    "a larger max_tokens_per_rank": "a larger --max-tokens-per-rank",
    "GB of state, buffers": "GB of state (--no-training leaves it out), buffers",
}  # fmt: skip


def in_flags(message: str) -> str:
    """A message of the package with flags in place of arguments."""
    for words, flag in FLAGS.items():
        message = message.replace(words, flag)
    return message


def picture(path: str) -> Path:
    """The path of a picture, checked before the work starts. Raises: CommandError."""
    from seqpar.facts.drawing import checked_path

    try:
        return checked_path(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"cannot write {shown(path)}: {error}") from None


def planned(args: Any) -> tuple[Plan, dict[str, Any], Forecast | None]:
    """The planner's plan, the attention call of its model, for which bytes are counted, and the forecast on one rank.

    One rank is taken to have memory for the whole batch.
    """
    from dataclasses import replace

    from seqpar.planner import ModelShape, Training, plan_batch
    from seqpar.planner.hardware import COUNT

    refuse(args, CHOSEN, "is chosen by the planner or given by --model; take another --layout to set it")
    model = model_of("llama-8b" if args.model is None else args.model)
    if args.recompute:
        model = replace(ModelShape.preset(model) if isinstance(model, str) else model, recompute=args.recompute)
    mask = make_mask(args)
    masks = mask if args.full or args.window else None
    machine = hardware("h100" if args.hardware is None else args.hardware)
    training = None if args.no_training else Training()
    plan = plan_batch(
        mask.lengths, args.ranks, masks=masks, model=model, hardware=machine, node=args.node,
        token_slack=args.token_slack or 0.0, max_tokens_per_rank=args.max_tokens_per_rank, training=training,
    )  # fmt: skip
    large, shape = replace(machine, memory=COUNT), plan.forecast.model
    alone = plan_batch(mask.lengths, 1, masks=masks, model=shape, hardware=large, training=training)
    return plan, plan.forecast.call, alone.forecast


def model_of(name: str) -> str | ModelShape:
    """A model by the name of a preset, or from a config.json."""
    from seqpar.planner import ModelShape

    if not os.path.isfile(name):
        return name
    try:
        return ModelShape.from_config(json.loads(content(name)), name=name)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{name} is not the config of a model that the planner knows: {error}") from None


def hardware(name: str) -> Any:
    """Hardware by the name of a preset, or from a file that seqpar calibrate wrote."""
    from seqpar.planner import Hardware
    from seqpar.planner.hardware import PRESETS

    if name in PRESETS:
        return Hardware.preset(name)
    if not os.path.isfile(name):
        raise CommandError(f"--hardware {shown(name)} is neither a preset ({', '.join(PRESETS)}) nor a file")
    try:
        return Hardware.load(name)
    except OSError as error:
        raise CommandError(f"cannot read {name}: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(str(error)) from None


def fixed(args: Any) -> tuple[Plan, dict[str, Any], None]:
    """The plan of a fixed layout, the attention call for which bytes are counted, and no forecast."""
    from seqpar.facts.layout import Layout
    from seqpar.plan import Plan

    refuse(args, ("model", *PLANNERS), "is for the planner; leave --layout out")
    given = {"heads": args.heads, "kv_heads": args.kv_heads, "dim": args.dim, "dtype": args.dtype}
    defaults: dict[str, Any] = {"heads": 32, "kv_heads": 8, "dim": 128, "dtype": "bfloat16"}
    call = defaults | {name: value for name, value in given.items() if value is not None}
    for name in ("heads", "kv_heads", "dim"):
        if call[name] < 1:
            raise CommandError(f"--{name.replace('_', '-')} must be at least 1, got {call[name]}")
    if call["heads"] % call["kv_heads"]:
        raise CommandError(f"--kv-heads {call['kv_heads']} must divide --heads {call['heads']}")
    mask = make_mask(args)
    if args.layout == "striped" and mask.tokens > STRIPED:
        raise CommandError(
            f"--layout striped deals tokens out one by one, here at most {STRIPED:,}, got {mask.tokens:,}; take zigzag"
        )
    if args.layout == "zigzag":
        layout = Layout.zigzag(mask.lengths, args.ranks)
    else:
        layout = {"contiguous": Layout.contiguous, "striped": Layout.striped}[args.layout](mask.tokens, args.ranks)
    widths = args.ulysses or [1]
    ulysses = widths[0] if len(widths) == 1 else widths
    return Plan(mask, layout, ulysses=ulysses, transport=args.transport or "fetch", node=args.node), call, None


def make_mask(args: Any) -> Mask:
    """The mask described by the flags."""
    from seqpar.facts.mask import Mask

    lengths = documents(args)
    if args.window is None:
        window = (None, None)
    elif len(args.window) == 1:
        window = (args.window[0], args.window[0] if args.full else None)
    elif len(args.window) == 2:
        window = (args.window[0], args.window[1])
    else:
        raise CommandError(f"--window is W or LEFT,RIGHT, got {','.join(map(str, args.window))}")
    return Mask(lengths, causal=not args.full, window=window)


def summary(plan: Plan, load: Load, alone: Forecast | None) -> str:
    """One line: the cost of a plan compared with one rank, and what limits it.

    Without a forecast, the work of the most loaded rank compared with the whole batch.
    """
    ranks = f"{plan.ranks} rank{'s' * (plan.ranks > 1)}"
    if alone is None:
        area, rows = (float(values.sum() / values.max()) for values in (load.area, load.rows))
        name, values = ("attended pairs", load.area) if area <= rows else ("rows", load.rows)
        return (
            f"{ranks}: attention at most {area:.1f} times as fast as on one rank, other layers at most {rows:.1f} "
            f"times; limited by the {name} of rank {values.argmax()}"
        )
    from seqpar.planner.forecast import in_words

    forecast = plan.forecast
    slowest = int(forecast.ticks.total.argmax())
    phase, seconds = max(((name, values[slowest]) for name, values in forecast.phases.items()), key=lambda x: x[1])
    limit = f"limited by {PHASES[phase]}, {seconds / forecast.seconds:.0%} of the time of rank {slowest}"
    if plan.ranks == 1:
        return f"{ranks}: {in_words(forecast.seconds)} a step; {limit}"
    needs = ""
    if alone.bytes > forecast.memory.usable:
        needs = f", if it had {alone.bytes / 1e9:.0f} GB instead of {forecast.memory.usable / 1e9:.0f}"
    return (
        f"{ranks}: {in_words(forecast.seconds)} a step, {alone.seconds / forecast.seconds:.1f} times as "
        f"fast as one rank ({in_words(alone.seconds)}{needs}); {limit}"
    )


def measure(plan: Plan, layout: str, call: dict[str, Any], alone: Forecast | None) -> dict[str, Any]:
    """The plan's figures as plain data. For few ranks also the bytes of a layer; `sends_to` adds both directions."""
    from seqpar.plan.counts import load_of
    from seqpar.plan.report import shows_each_rank

    load, by_rank = load_of(plan), shows_each_rank(plan)
    ranks: list[dict[str, Any]] = []
    for rank in range(plan.ranks):
        facts: dict[str, Any] = {"rank": rank, "rows": plan.rows(rank), "area": round(float(load.area[rank]))}
        for name, values in (("pieces", load.pieces), ("keys", load.keys), ("crossing_keys", load.crossing)):
            if values is not None:
                facts[name] = int(values[rank])
        if by_rank:
            forward, backward = (plan.traffic(rank, **call, backward=b) for b in (False, True))
            facts["forward_bytes"], facts["backward_bytes"] = sum(forward.values()), sum(backward.values())
            peers = sorted({*forward, *backward})
            facts["sends_to"] = {peer: forward.get(peer, 0) + backward.get(peer, 0) for peer in peers}
        ranks.append(facts)
    return {
        "summary": summary(plan, load, alone),
        "digest": plan.digest(),
        "tokens": plan.mask.tokens,
        "area": plan.mask.area(),
        "lengths": plan.mask.lengths.tolist(),
        "degrees": plan.degrees.tolist(),
        "layout": layout,
        "transport": plan.transport,
        "node": plan.node,
        "stage_bytes": plan.stage_bytes,
        "ulysses": plan.widths.tolist(),
        "shape": call,
        "forecast": None if plan.forecast is None else plan.forecast.facts(),
        "one_rank": None if alone is None else {"seconds": alone.seconds, "memory_bytes": alone.bytes},
        "ranks": ranks,
    }


def print_bytes(facts: dict[str, Any]) -> None:
    """Print a table of the bytes that each rank sends in one layer."""
    rows = [
        (r["rank"], size(r["forward_bytes"]), size(r["backward_bytes"]), ", ".join(map(str, r["sends_to"])) or "-")
        for r in facts["ranks"]
    ]
    call = facts["shape"]
    keys = " + ".join(map(str, call["latent"])) if "latent" in call else f"{call['kv_heads']} of {call['dim']}"
    shape = f"{call['heads']} heads on {'latents of ' if 'latent' in call else ''}{keys}, {call['dtype']}"
    print_table(f"bytes sent in one layer ({shape})", ("rank", "forward", "backward", "to ranks"), rows)
