"""Batches with images and video for tiny vision-language models, as their processors would make them.

A document is a list: a number of tokens of text, or "image", "wide" (an image of another size, where a model takes
several) or "video".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ecosystem.architectures import SEEN

Document = Sequence[int | str]
TEXT = 50  # tokens of text lie below
GRIDS = ("qwen2_5_vl", "qwen3_vl")
LIKE = {  # take inputs of the same form
    "qwen2_vl": "qwen2_5_vl", "qwen3_vl_moe": "qwen3_vl", "qwen3_5": "qwen3_vl", "idefics3": "smolvlm",
    "aya_vision": "llava", "cohere2_vision": "llava", "mistral_large4": "mistral3",
}  # fmt: skip
SEVERAL = ("mistral3", *GRIDS)  # take images of several sizes


class Tokens(NamedTuple):
    """A document as tokens. kinds: 0 text, 1 image, 2 video. media: what towers get, an entry per image."""

    ids: Tensor
    kinds: Tensor
    media: list[dict[str, Tensor]]


def tokens_of(kind: str, document: Document, g: torch.Generator, dtype: torch.dtype) -> Tokens:
    """The tokens and images of a document."""
    kind, ids, media = LIKE.get(kind, kind), [], []
    for part in document:
        if isinstance(part, int):
            ids += torch.randint(1, TEXT, (part,), generator=g).tolist()
            continue
        count, frames, seen = _media(kind, part, g, dtype)
        media.append(seen)
        token = SEEN["video" if part == "video" else "image"]
        # Qwen3-VL tells frames apart by the text between them, Qwen2.5-VL has a video in one stretch
        for _ in range(frames if kind == "qwen3_vl" else 1):
            ids += [SEEN["start"], *[token] * (count if kind == "qwen3_vl" else count * frames), SEEN["end"]]
    ids = torch.tensor(ids)
    return Tokens(ids, (ids == SEEN["image"]) + 2 * (ids == SEEN["video"]), media)


def _media(kind: str, part: str, g: torch.Generator, dtype: torch.dtype) -> tuple[int, int, dict[str, Tensor]]:
    """The tokens of a frame, the number of frames, and what towers get."""
    if kind in GRIDS:
        frames, height, width = {"image": (1, 4, 4), "wide": (1, 4, 8), "video": (2, 4, 4)}[part]
        name, seen = ("video", "pixel_values_videos") if part == "video" else ("image", "pixel_values")
        pixels = torch.randn(frames * height * width, 3 * 2 * 4 * 4, generator=g).to(dtype)
        return height * width // 4, frames, {seen: pixels, f"{name}_grid_thw": torch.tensor([[frames, height, width]])}
    size = 28 if kind in ("llava", "gemma3", "paligemma") else 56
    pixels = torch.randn(1, 3, size, size, generator=g).to(dtype)
    if kind != "mistral3":
        return 4, 1, {"pixel_values": pixels}
    height = 28 if part == "wide" else 56
    pixels[:, :, height:] = 0
    return height // 28 * 2, 1, {"pixel_values": pixels, "image_sizes": torch.tensor([[height, 56]])}


def padded(kind: str, documents: Sequence[Tokens], *, left: bool = False) -> dict[str, Tensor]:
    """A row for each document; images have no labels."""
    width = max(len(each.ids) for each in documents)
    shape = len(documents), width
    ids, kinds, keep = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    for row, each in enumerate(documents):
        at = slice(width - len(each.ids), width) if left else slice(len(each.ids))
        ids[row, at], kinds[row, at], keep[row, at] = each.ids, each.kinds, 1
    labels = ids.masked_fill((keep == 0) | (ids > TEXT), -100)
    labels[(keep == 1) & (keep.cumsum(1) == 1)] = -100
    return {"input_ids": ids, "attention_mask": keep, "labels": labels} | _with(kind, kinds, documents, keep)


def packed(kind: str, documents: Sequence[Tokens], model: nn.Module) -> dict[str, Tensor]:
    """Documents in one row; their first labels do not count."""
    ids, kinds = (torch.cat([each[n] for each in documents])[None] for n in (0, 1))
    at = torch.cat([torch.arange(len(each.ids)) for each in documents])[None]
    batch = {"input_ids": ids, "labels": ids.masked_fill((at == 0) | (ids > TEXT), -100), "position_ids": at}
    if LIKE.get(kind, kind) in GRIDS and any(each.media for each in documents):
        batch["position_ids"] = torch.cat([_grid(kind, each, model) for each in documents], -1)
    return batch | _with(kind, kinds, documents)


def _grid(kind: str, document: Tokens, model: nn.Module) -> Tensor:
    """Positions [4, 1, T] of a document: in the text, then in time, height and width."""
    one = padded(kind, [document])
    text = torch.arange(len(document.ids)).expand(1, 1, -1)
    if not document.media:
        return text.expand(4, 1, -1)
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "attention_mask")
    grid, _ = model.model.get_rope_index(**{name: one[name] for name in names if name in one})
    return torch.cat([text, grid])


def _with(
    kind: str, kinds: Tensor, documents: Sequence[Tokens], keep: Tensor | None = None
) -> dict[str, Tensor]:  # fmt: skip
    """Token types and media. keep: where the tokens of documents are in rows of their own."""
    kind, every = LIKE.get(kind, kind), [one for each in documents for one in each.media]
    names = {name for one in every for name in one}
    media = {name: torch.cat([one[name] for one in every if name in one]) for name in names}
    if kind == "smolvlm" and media:  # a row has as many images as the row with most, those of zeros are none
        counts = [len(every)] if keep is None else [len(each.media) for each in documents]
        images = [F.pad(x, (0, 0) * 3 + (0, max(counts) - len(x))) for x in media["pixel_values"].split(counts)]
        media = {"pixel_values": torch.stack(images)}
    if kind in GRIDS:
        media["mm_token_type_ids"] = kinds
    elif kind == "gemma3":
        media["token_type_ids"] = kinds
    elif kind == "paligemma":  # a prompt sees itself whole: here the first half of each document
        types = torch.cat([(torch.arange(len(each.ids)) >= len(each.ids) // 2).long() for each in documents])
        media["token_type_ids"] = types[None] if keep is None else kinds.masked_scatter(keep.bool(), types)
    return media


def brought(kind: str, ranks: int, dtype: torch.dtype) -> list[list[Tokens]]:
    """Documents of every rank: text on the first, images on the last, of two sizes where a model takes several."""
    g = torch.Generator().manual_seed(3)
    wide = "wide" if kind in SEVERAL else "image"
    every: list[list[Document]] = [[[9], [5]]] * (ranks - 1) + [[[3, "image", 5], [2, wide, 4, "image", 3], [6]]]
    return [[tokens_of(kind, each, g, dtype) for each in own] for own in every]


def one_process(kind: str, model: nn.Module, documents: Sequence[Tokens]) -> Tensor:
    """The loss of all documents, each by itself."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for each in documents:
        batch = {name: x.to(model.dtype) if x.is_floating_point() else x for name, x in padded(kind, [each]).items()}
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch, use_cache=False).logits[:, :-1]
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count += int((labels != -100).sum())
    return total / count


def pooled_of(out: Any) -> Tensor | None:
    """What towers made of the images of a batch, as transformers returns it since 5.24 or did before."""
    if not hasattr(out, "image_outputs"):
        pooled = out.image_pooler_output if hasattr(out, "image_pooler_output") else out.image_hidden_states
    else:
        pooled = out.image_outputs and out.image_outputs.pooler_output
    return torch.cat(pooled) if isinstance(pooled, (list, tuple)) else pooled
