"""Are an EAGLE-3 head's feature layers counted by the other convention? Where hardly any draft is accepted, its first
drafts are made once more, with the layers beside them, on a few texts that have ended."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from specbatch.core.request import Completion
from specbatch.models.decoder import Decoder
from specbatch.models.draft_head import DraftHead
from specbatch.models.full_forward import UncachedContext

TEXTS = 8
LONGEST = 2048  # tokens of a text


@torch.inference_mode()
def compare_layer_offsets(model: Decoder, head: DraftHead, ended: Sequence[Completion]) -> str:
    """For a person: the share of right first drafts with the features that are read, and with those of the inputs of
    the layers before and behind, which is what the other convention would read; a share within two standard errors of
    the first is said to be no other. model: hands over what is read."""
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
    except torch.OutOfMemoryError:
        return "feature layers: not compared with those beside them, as no memory is left for it"
    own, *others = shares
    if not drafted or not others:
        return f"feature layers: nothing to compare, {drafted} drafts and {len(others)} other choices of layers"
    return f"feature layers: of {drafted} first drafts are right {own} as run, and by --aux-layers {'; '.join(others)}"


def _alike(share: float, other: float, drafted: int) -> bool:
    """Do shares of as many drafts differ by no more than two standard errors?"""
    error = math.sqrt((share * (1 - share) + other * (1 - other)) / drafted)
    return abs(share - other) <= 2 * error


def _counts(model: Decoder, head: DraftHead, texts: Sequence[tuple[tuple[int, ...], int]]) -> list[tuple[int, int]]:
    """Of each text: first drafts behind its outputs that are the next output, and how many there are."""
    counts = [(0, 0)]
    for text, prompt in texts:
        if len(text) < prompt + 2:
            continue
        tokens = torch.tensor(text, device=model.device)
        positions = torch.arange(len(text), device=model.device)
        features = model.forward(tokens, positions, UncachedContext(model, 1, len(text)))
        # Pair i: the feature of token i and the token behind it, which drafts the one behind that.
        x, qkv = head.enter(head.embed(tokens[1:]), head.project(head.take(features))[:-1])
        attended = UncachedContext(model, 1, len(text) - 1).attend(0, qkv, head.heads, positions[:-1])
        drafts = head.logits(head.leave(x, attended)[prompt - 1 : -1]).argmax(-1)
        drafts = drafts if head.vocabulary is None else head.vocabulary[drafts]
        counts.append((int((drafts == tokens[prompt + 1 :]).sum()), len(drafts)))
    return counts
