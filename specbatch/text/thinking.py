"""Separates reasoning from the answer: <think> ... </think>, and the marks of other model families."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

OPEN, CLOSE = "<think>", "</think>"
MARKS = {
    OPEN: CLOSE,  # Qwen3, DeepSeek-R1, GLM-4.5, Nemotron and others
    "[THINK]": "[/THINK]",  # Magistral, Ministral 3
    "<seed:think>": "</seed:think>",  # Seed-OSS
    "<|channel>thought": "<channel|>",  # Gemma 4
    "<|channel|>analysis<|message|>": "<|channel|>final<|message|>",  # gpt-oss
}
_TOKENS = re.compile(r"<[^<>]+>|\[[^\[\]]+\]")  # in a mark


class Reasoning:
    """Finds the answer after the reasoning in the outputs of a model. <think> is known for every model, other marks for
    those whose vocabulary has their tokens: none without a tokenizer.

    marks   texts that end reasoning, by those that begin it
    opens   texts that begin reasoning
    hidden  whether a mark has special tokens, which a text shows only without `skip_special_tokens`
    """

    def __init__(self, tokenizer: Tokenizer | None, end: str | None = None) -> None:
        """end: another text that ends the reasoning, of a model that is not known."""
        strings = set() if tokenizer is None else set(tokenizer.vocabulary())
        known = {begin: end for begin, end in MARKS.items() if begin == OPEN or _tokens_of(begin, end) <= strings}
        self.marks = known
        self.opens = tuple(known)
        self._ends = [*known.values(), *([] if end is None else [end])]
        self._own_ends = tuple(
            mark
            for mark in known.values()
            if tokenizer is not None and _tokens_of(mark) <= strings and tokenizer.template_writes(mark)
        )
        self._tokenizer = tokenizer

        def hidden(marks: Iterable[str]) -> list[list[int]]:
            """The tokens of the marks that are not shown completely."""
            found = []
            for mark in marks:
                if tokenizer is not None and (names := _tokens_of(mark)) and names <= strings:
                    tokens = tokenizer.encode(mark, add_special_tokens=False)
                    found += [tokens] if mark not in tokenizer.decode(tokens) else []
            return found

        self._hidden_opens, self._hidden_ends = hidden(self.opens), hidden(self._ends)
        self.hidden = bool(self._hidden_opens or self._hidden_ends)

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning, as the templates of models that always reason do."""
        return prompt.rstrip().endswith(self.opens)

    def may_open(self, prompt: str) -> bool:
        """Whether the answer to a prompt that the chat template rendered may be reasoning without an opening mark:
        the vocabulary and the template of the model have its end, and the prompt does not end with that."""
        return bool(self._own_ends) and not prompt.rstrip().endswith(self._own_ends)

    def split(self, text: str, *, prompt: str = "") -> tuple[str | None, str]:
        """The reasoning, None without one, and the answer, which follows the first end, as in vLLM and SGLang. Without
        reasoning the answer is the text as it is.

        text    of an output with all its marks
        prompt  rendered, or its end
        """
        begin = text.lstrip()
        mark = next((mark for mark in self.opens if begin.startswith(mark)), None)
        inside = begin.removeprefix(mark or "")
        if mark is None and not self.is_opened_by(prompt) and not self._ends_alone(text, prompt):
            return None, text
        ends = self._ends if mark is None else [self.marks[mark]]
        places = [(inside.index(end), end) for end in ends if end in inside]
        if not places:
            return inside.strip(), ""
        place, end = min(places)
        return inside[:place].strip(), inside[place + len(end) :].lstrip()

    def _ends_alone(self, text: str, prompt: str) -> bool:
        """Whether reasoning ends in a text that has no opening mark."""
        return self.may_open(prompt) and any(end in text for end in self._own_ends)

    def answer_of(self, text: str, tokens: Sequence[int] | None, *, opened: bool = False) -> str:
        """The text after the last end of reasoning: all of it if there is no reasoning, nothing if that did not end.

        tokens   of the output, which show where marks are that the text does not show; None: the text shows all marks
        opened   whether the prompt ended inside reasoning
        """
        at = 0
        if tokens is not None and self._tokenizer is not None and self.hidden:
            at = max(_after(mark, tokens) for mark in self._hidden_ends) if self._hidden_ends else 0
            text = self._tokenizer.decode(list(tokens[at:]))
        ends = [text.rindex(end) + len(end) for end in self._ends if end in text]
        if at or ends:
            return text[max(ends, default=0) :].lstrip()
        opened |= any(mark in text for mark in self.opens)
        return "" if opened or any(_after(mark, tokens or ()) for mark in self._hidden_opens) else text


def _tokens_of(*marks: str) -> set[str]:
    return {name for mark in marks for name in _TOKENS.findall(mark)}


def _after(mark: list[int], tokens: Sequence[int]) -> int:
    """The place after the last occurrence of some tokens in others, 0 without one."""
    places = range(len(tokens) - len(mark), -1, -1)
    return next((place + len(mark) for place in places if list(tokens[place : place + len(mark)]) == mark), 0)


class ReasoningTokens:
    """Finds the reasoning of outputs by its tokens: that of models whose vocabulary has the tokens of a mark."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        strings = set(tokenizer.vocabulary())
        known = {begin: end for begin, end in MARKS.items() if _tokens_of(begin, end) <= strings}
        self._reasoning = Reasoning(tokenizer)
        self._tokenizer = tokenizer

        def tokens_of(mark: str) -> list[int]:
            return tokenizer.encode(mark, add_special_tokens=False)

        self._opens, self._ends = [tokens_of(mark) for mark in known], [tokens_of(end) for end in known.values()]
        self.last = frozenset(end[-1] for end in self._ends)

    def ends(self, tokens: Sequence[int], start: int) -> bool:
        """Whether tokens end with the end of reasoning. start: of the output in them."""
        return any(len(tokens) - start >= len(end) and tokens[-len(end) :] == end for end in self._ends)

    def is_open(self, prompt: Sequence[int], output: Sequence[int]) -> bool:
        """Whether an output without an end of reasoning is reasoning: its prompt or its first tokens begin that."""
        if any(list(output[: len(mark)]) == mark for mark in self._opens):
            return True
        return self._reasoning.is_opened_by(self._tokenizer.decode(list(prompt[-_LAST:]), skip_special_tokens=False))


_LAST = 32  # tokens of a prompt, in which it opens reasoning


def reasoning_tokens(tokenizer: Tokenizer) -> ReasoningTokens | None:
    """None for a vocabulary without such marks."""
    found = ReasoningTokens(tokenizer)
    return found if found.last else None
