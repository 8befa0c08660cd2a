"""Prompts of token ids as text for a server that tokenizes it: without the BOS token where the server adds it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

# Of /tokenize: `prompt` for vLLM and SGLang, `content` and `add_special` for llama.cpp.
QUESTION = {"prompt": "a", "content": "a", "add_special": True, "add_special_tokens": True}


class PromptText:
    """Prompts as text.

    The server's /tokenize shows whether it begins a text with the BOS token. Of a server without it the tokenizer's own
    rule is assumed, until the server has counted the tokens of a prompt.
    """

    def __init__(self, tokenizer: Tokenizer, tokenize: Callable[[dict[str, Any]], str]) -> None:
        """tokenize: gives the server's answer to POST of /tokenize, "" without one."""
        self._tokenizer = tokenizer
        shown = _tokens_of(tokenize(QUESTION))
        self._is_certain = bool(shown)
        self._adds_bos = self._is_bos(shown or tokenizer.encode("a"))

    def of(self, prompt: Sequence[int]) -> str:
        """The text that the server tokenizes as `prompt`."""
        added = self._adds_bos and self._is_bos(prompt)
        return self._tokenizer.decode(list(prompt[added:]), skip_special_tokens=False)

    def learn(self, prompt: Sequence[int], text: str, counted: int | None) -> None:
        """Take note of how many tokens the server counted of a prompt that was sent as `text`."""
        if self._is_certain or not self._is_bos(prompt):
            return
        alone = len(self._tokenizer.encode(text, add_special_tokens=False))
        if counted in (alone, alone + 1):
            self._is_certain, self._adds_bos = True, counted > alone

    def _is_bos(self, tokens: Sequence[int]) -> bool:
        """Whether they begin with the BOS token."""
        return self._tokenizer.bos_id is not None and list(tokens[:1]) == [self._tokenizer.bos_id]


def _tokens_of(answer: str) -> list[int]:
    """The token ids in an answer of /tokenize; none in another one."""
    try:
        found = json.loads(answer)["tokens"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(one, int) for one in found) else []
