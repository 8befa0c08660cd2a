"""Texts as token ids with the special tokens that lm-eval's model for transformers adds (`HFLM` of 0.4.13).

It leaves them to the tokenizer, also for rendered chats, except in a text that begins with the bos token. `HFLM`
decides so by the first text of each batch; here, as with its batch size of 1, by each text.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from specbatch.errors import refuse

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer


class Encoding:
    """Encodes prompts and scored texts.

    tokenizer   the model's
    add_bos     whether texts that do not begin with the bos token get it, and no other special token; None: as the
                tokenizer encodes a text
    is_chat     whether texts were rendered by the chat template

    After the first text `notes` says what the tokenizer added that users may not expect.
    """

    def __init__(self, tokenizer: Tokenizer, add_bos: bool | None, *, is_chat: bool) -> None:
        self._tokenizer = tokenizer
        self._add_bos = add_bos
        self._is_chat = is_chat
        self._is_noted = False
        self.notes: list[str] = []

    @cached_property
    def begin(self) -> str:
        """The text of the bos token; "" without one."""
        return self._text_of(self._tokenizer.bos_id)

    @cached_property
    def end(self) -> str:
        """The text of the eos token; "" without one."""
        return self._text_of(self._tokenizer.eos_id)

    def prompt(self, text: str) -> list[int]:
        """The tokens of a prompt to generate from."""
        return self._encode(text, self.begin)

    def scored(self, text: str) -> list[int]:
        """The tokens of a text to score. It has its special tokens also if it begins with the eos token of a tokenizer
        without a bos token."""
        return self._encode(text, self.begin or self.end)

    def _encode(self, text: str, begin: str) -> list[int]:
        if self._add_bos and self._tokenizer.bos_id is None:
            raise refuse("add_bos_token", True, f"{self._tokenizer.name} has no bos token; leave it out")
        has_begin = bool(begin) and text.startswith(begin)
        if has_begin or self._add_bos is not None:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            bos = [] if has_begin or not self._add_bos else [self._tokenizer.bos_id]
            return [token for token in bos if token is not None] + ids
        ids = self._tokenizer.encode(text, as_transformers=True)
        if not self._is_noted:
            self._is_noted = True
            self._note(text, ids)
        return ids

    def _note(self, text: str, ids: list[int]) -> None:
        own = self._tokenizer.encode(text, add_special_tokens=False)
        at = next((place for place in range(len(ids) - len(own) + 1) if ids[place : place + len(own)] == own), 0)
        begin, end = ("".join(map(self._text_of, part)) for part in (ids[:at], ids[at + len(own) :]))
        if ids != self._tokenizer.encode(text):
            works = "add_bos_token=True or False (--add-bos-token, --no-add-bos-token) decides"
            says = "as with transformers 5, and not those that add_bos_token of tokenizer_config.json asks for"
            self.notes.append(f"prompts have the special tokens of tokenizer.json, {says}; {works}")
        works = "as in lm-eval; add_bos_token=False (--no-add-bos-token) leaves it out"
        if self._is_chat and begin:
            self.notes.append(f"the tokenizer begins chat prompts with {begin!r}, which the template does not, {works}")
        if end:
            self.notes.append(f"the tokenizer ends prompts with {end!r}, {works}")

    def _text_of(self, token: int | None) -> str:
        return "" if token is None else self._tokenizer.decode([token], skip_special_tokens=False)
