"""Layer-offset check of an EAGLE-3 head, run when hardly any draft was accepted.

Published configs count feature layers by inputs or by outputs. The check repeats the first drafts on a few completed
texts with the configured layers and with those one before and one after.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from specbatch.core.completion import Completion
from specbatch.models.decoder import Decoder
from specbatch.models.full_forward import UncachedContext
from specbatch.models.heads.draft_head import DraftHead
from specbatch.runtime.device import is_out_of_memory

TEXTS = 8
LONGEST = 2048  # tokens of a text


@torch.inference_mode()
def compare_layer_offsets(model: Decoder, head: DraftHead, ended: Sequence[Completion]) -> str:
    """A line for the log: the share of correct first drafts with the configured feature layers, and with those one
    before and one after, which is what the other convention would read. A share within two standard errors of the first
    is marked as no difference. model: the target with the auxiliary layers that the head reads."""
    texts = [((*item.prompt_token_ids, *item.token_ids)[:LONGEST], len(item.prompt_token_ids)) for item in ended]
    shares: list[str] = []
    own_share, drafted = 0.0, 0
    try:
        for shift in (0, -1, 1):
            layers = tuple(layer + shift for layer in model.aux)
            if set(layers) <= set(range(model.config.depth)):
                counts = _counts(model.with_aux(layers), head, texts[:TEXTS])
                right, drafted = (sum(part) for part in zip(*counts, strict=True))
                share = right / max(drafted, 1)
                own_share = share if shift == 0 else own_share
                boundaries = ",".join(str(layer + 1) for layer in layers)
                same = shift and _alike(own_share, share, max(drafted, 1))
                shares.append(f"{share:.1%} with {boundaries}{' (no difference: chance)' if same else ''}")
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return "feature layers: not compared with their neighbors, for lack of memory"
    own, *others = shares
    if not drafted or not others:
        return f"feature layers: nothing to compare, {drafted} drafts and {len(others)} other choices of layers"
    return (
        f"feature layers: of {drafted} first drafts {own} are correct as run, and with --aux-layers {'; '.join(others)}"
    )


def _alike(share: float, other: float, drafted: int) -> bool:
    """Whether two shares of `drafted` drafts each differ by at most two standard errors."""
    error = math.sqrt((share * (1 - share) + other * (1 - other)) / drafted)
    return abs(share - other) <= 2 * error


def _counts(model: Decoder, head: DraftHead, texts: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[int, int]]:
    """Per text: number of first drafts that equal the next output token, and number of first drafts."""
    counts = [(0, 0)]
    for text, prompt in texts:
        if len(text) < prompt + 2:
            continue
        tokens = torch.tensor(text, device=model.device)
        positions = torch.arange(len(text), device=model.device)
        features = model.forward(tokens, positions, UncachedContext(model, 1, len(text)))
        # Pair i: the feature of token i and token i + 1. It drafts token i + 2.
        context = UncachedContext(model, 1, len(text) - 1)
        attend = partial(context.attend, positions=positions[:-1])
        x, qkv = head.enter(head.embed(tokens[1:]), head.project(head.take(features))[:-1], attend)
        attended = attend(head.depth - 1, qkv, head.heads_of(head.depth - 1))
        drafts = head.logits(head.leave(x, attended)[prompt - 1 : -1]).argmax(-1)
        drafts = drafts if head.vocabulary is None else head.vocabulary[drafts]
        counts.append((int((drafts == tokens[prompt + 1 :]).sum()), len(drafts)))
    return counts
