"""Tokens that two vocabularies share, for a draft model whose tokenizer is not the target's."""

from __future__ import annotations

from typing import NamedTuple

from specbatch.text.tokenizer import Tokenizer


class SharedTokens(NamedTuple):
    """draft, target: the ids of each token that both have; known: for each id of the target the draft's token that
    stands for it in a text."""

    draft: list[int]
    target: list[int]
    known: list[int]


def shared_tokens(target: Tokenizer, draft: Tokenizer) -> SharedTokens | None:
    """The tokens with the same bytes, special ones with the same name, and the ends of texts. None without a shared
    text.

    A token of the target that the draft lacks is read as the end of it that the draft has: " walrus" as "us".
    This loses the rest of the word. Drafts are tokens that both have: token-level intersection in Timor et al. 2025,
    "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies".
    """
    ours, theirs = _ids_by_text(target), _ids_by_text(draft)
    if ours is None or theirs is None:
        return None
    pairs = {index: theirs[text] for text, index in ours.items() if text in theirs}
    if not any(isinstance(text, bytes) and text in theirs for text in ours):
        return None
    if target.eos_id is not None and draft.eos_id is not None and draft.eos_id not in pairs.values():
        pairs.setdefault(target.eos_id, draft.eos_id)
    nothing = draft.eos_id or 0
    known = [nothing] * target.vocab_size
    for text, index in ours.items():
        ends = (text[start:] for start in range(1, len(text))) if isinstance(text, bytes) else ()
        known[index] = pairs.get(index, next((theirs[end] for end in ends if end in theirs), nothing))
    return SharedTokens([*pairs.values()], [*pairs], known)


def _ids_by_text(tokenizer: Tokenizer) -> dict[bytes | str, int] | None:
    """The first id of each text; special tokens by name. None if tokens do not join to a text."""
    shown, hidden = tokenizer.shown_bytes, tokenizer.hidden
    if shown is None:
        return None
    special = {*hidden.values()}
    found: dict[bytes | str, int] = {name: index for name, index in hidden.items()}  # noqa: C416
    for index, text in enumerate(shown):
        if text and index not in special:
            found.setdefault(text, index)
    return found
