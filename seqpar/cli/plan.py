"""`seqpar plan`: what a plan would compute and send, from document lengths alone. Planning needs numpy, no device."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqpar.cli.output import CommandError, need, print_table, size

if TYPE_CHECKING:
    from seqpar.mask import Mask
    from seqpar.plan import Plan

DTYPES = ("bfloat16", "float16", "float32", "float64")


def add_command(commands: Any) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "plan",
        help="show who would compute and send what",
        description="Show a plan: rows, attended pairs and bytes of every rank.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    documents = parser.add_mutually_exclusive_group(required=True)
    documents.add_argument("--lengths", type=integers, metavar="N,N,...", help="tokens of each packed document")
    documents.add_argument("--random", type=int, metavar="N", help="N documents of heavy-tailed random lengths")
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument("--full", action="store_true", help="every key of the document, not only the causal ones")
    parser.add_argument(
        "--window",
        type=integers,
        metavar="W",
        help="keys seen besides one's own: W to the left, and as many to the right with --full; or LEFT,RIGHT",
    )
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layout", choices=("contiguous", "zigzag", "striped"), default="zigzag")
    parser.add_argument("--transport", choices=("fetch", "ring", "double_ring", "gather"), default="fetch")
    parser.add_argument("--ulysses", type=integers, default=[1], metavar="U", help="width, or one per document")
    parser.add_argument("--node", type=int, metavar="G", help="ranks per node")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=128, help="of a head")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw who holds what and who sends to whom")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.set_defaults(call=show)


def integers(text: str) -> list[int]:
    """The integers of a comma-separated list."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected integers separated by commas, got {text!r}") from None


def show(args: Any) -> int:
    """0 after printing the plan; what the facts refuse ends the command with their own message."""
    if args.plot:
        need("matplotlib", "plot", "--plot")
    if args.heads < 1 or args.kv_heads < 1 or args.dim < 1 or args.heads % args.kv_heads:
        raise CommandError(f"--kv-heads {args.kv_heads} must divide --heads {args.heads}, and --dim be positive")
    try:
        plan = make_plan(args)
    except (ValueError, NotImplementedError) as error:
        raise CommandError(str(error)) from None
    facts = measure(plan, args)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        print(plan.describe(), end="\n\n")
        rows = [
            (r["rank"], size(r["forward_bytes"]), size(r["backward_bytes"]), ", ".join(map(str, r["sends_to"])) or "-")
            for r in facts["ranks"]
        ]
        shape = f"{args.heads} heads on {args.kv_heads} of {args.dim}, {args.dtype}"
        print_table(f"bytes sent in one layer ({shape})", ("rank", "forward", "backward", "to ranks"), rows)
    if args.plot:
        from seqpar.cli.picture import draw_plan

        draw_plan(plan, [r["sends_to"] for r in facts["ranks"]], args.plot)
        if not args.json:
            print(f"picture: {args.plot}")
    return 0


def make_plan(args: Any) -> Plan:
    """The plan that the flags describe."""
    from seqpar.layout import Layout
    from seqpar.plan import Plan

    mask = make_mask(args)
    if args.layout == "zigzag":
        layout = Layout.zigzag(mask.lengths, args.ranks)
    else:
        layout = {"contiguous": Layout.contiguous, "striped": Layout.striped}[args.layout](mask.tokens, args.ranks)
    ulysses = args.ulysses[0] if len(args.ulysses) == 1 else args.ulysses
    return Plan(mask, layout, ulysses=ulysses, transport=args.transport, node=args.node)


def make_mask(args: Any) -> Mask:
    """The mask that the flags describe."""
    import numpy as np

    from seqpar.mask import Mask

    lengths = args.lengths
    if lengths is None:
        if args.random < 1:
            raise CommandError(f"--random must be at least 1, got {args.random}")
        # The shape of real corpora: most documents short, most tokens in few long ones.
        drawn = np.random.default_rng(args.seed).lognormal(np.log(1024), 1.3, args.random)
        lengths = np.clip(drawn, 16, 1 << 20).astype(np.int64)
    if args.window is None:
        window = (None, None)
    elif len(args.window) == 1:
        window = (args.window[0], args.window[0] if args.full else None)
    elif len(args.window) == 2:
        window = (args.window[0], args.window[1])
    else:
        raise CommandError(f"--window is W or LEFT,RIGHT, got {','.join(map(str, args.window))}")
    return Mask(lengths, causal=not args.full, window=window)


def measure(plan: Plan, args: Any) -> dict[str, Any]:
    """The plan's figures as plain data. `sends_to`: peer -> bytes, forward and backward together."""
    shape = {"heads": args.heads, "kv_heads": args.kv_heads, "dim": args.dim, "dtype": args.dtype}
    ranks = []
    for rank in range(plan.ranks):
        forward, backward = (plan.traffic(rank, **shape, backward=b) for b in (False, True))
        ranks.append(
            {
                "rank": rank,
                "rows": plan.rows(rank),
                "area": round(sum(step.area / step.part.width for step in plan.steps(rank))),
                "forward_bytes": sum(forward.values()),
                "backward_bytes": sum(backward.values()),
                "sends_to": {p: forward.get(p, 0) + backward.get(p, 0) for p in sorted({*forward, *backward})},
            }
        )
    return {
        "digest": plan.digest(),
        "tokens": plan.mask.tokens,
        "area": plan.mask.area(),
        "lengths": plan.mask.lengths.tolist(),
        "degrees": plan.degrees.tolist(),
        "layout": args.layout,
        "transport": args.transport,
        "ulysses": args.ulysses,
        "shape": shape,
        "ranks": ranks,
    }
