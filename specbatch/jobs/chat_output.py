"""Answers to chat requests as OpenAI's API has them: reasoning, content and calls of functions apart."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specbatch.core.completion import Completion
from specbatch.errors import refuse_json
from specbatch.jobs.call_grammar import call_regex, check_marks, with_reasoning
from specbatch.jobs.openai_request import ChatBody
from specbatch.jobs.openai_tools import ToolUse
from specbatch.text.thinking import Reasoning
from specbatch.text.tool_calls import Call, CallForm, Harmony, form_of, shown_calls

if TYPE_CHECKING:
    from specbatch.text.tokenizer import Tokenizer

_PROMPT_END = 32  # tokens of a prompt, in which it opens or closes reasoning


@dataclass(frozen=True)
class _Parts:
    reasoning: str | None
    content: str
    calls: Sequence[Call] = ()


class ChatOutput:
    """Reads the answers of a model. The forms of its calls and of its reasoning follow from its chat template and its
    vocabulary.

    form         of its calls; None: not known
    has_grammar  whether all answers have the one of the job, so that a prompt that opens reasoning leads to none
    """

    def __init__(self, tokenizer: Tokenizer, *, has_grammar: bool = False) -> None:
        template = tokenizer.tool_template or ""
        self.tokenizer = tokenizer
        self._has_grammar = has_grammar
        self.reasoning = Reasoning(tokenizer)
        self._harmony = Harmony() if Harmony.is_of(template) else None
        self.form = self._harmony or form_of(template)
        marked = isinstance(self.form, CallForm) and self.form.token_of(tokenizer.hidden) is not None
        self._hides = marked or self._harmony is not None or self.reasoning.hidden  # texts do not show all marks

    def grammar(self, use: ToolUse | None, prompt: Sequence[int]) -> str | None:
        """The regular expression for the answer to a prompt; None if it is free. Raises SpecbatchError if the calls
        that are asked for have no grammar."""
        if use is None or not use.is_constrained:
            return None
        asks = "this tool_choice" if use.must_call else "strict"
        if not isinstance(self.form, CallForm):
            known = "no known form" if self.form is None else f"{self.form.name} form, whose marks are special tokens"
            works = f"{asks} needs a grammar, and calls of {self.tokenizer.name} have {known}; use auto without strict"
            raise refuse_json("tools", [function.name for function in use.callable], works)
        check_marks(use, self.form, self.tokenizer.hidden)
        text = self._end_of(prompt)
        opened = next((mark for mark in self.reasoning.opens if text.rstrip().endswith(mark)), None)
        mark = opened or self._own_mark(text)
        if mark is None:
            return call_regex(use, self.form)
        end = self.reasoning.marks[mark]
        if any(token in mark + end for token in self.tokenizer.hidden):
            works = f"{asks} needs a grammar, and {mark} and {end} are special tokens, which it cannot have"
            raise refuse_json("tools", [function.name for function in use.callable], f"{works}; switch reasoning off")
        regex = call_regex(use, self.form, None if opened else mark)
        return with_reasoning(regex, mark, end, opened=opened is not None)

    def _own_mark(self, prompt: str) -> str | None:
        """What begins the reasoning that an answer to a prompt may have."""
        if not self.reasoning.may_open(prompt):
            return None
        written = self.tokenizer.template_writes
        return next((mark for mark, end in self.reasoning.marks.items() if written(end)), None)

    def message(self, completion: Completion, body: ChatBody, name: str) -> tuple[dict[str, Any], str]:
        """The message of a choice, and its finish reason. name: of the response, from which ids of calls follow."""
        use = body.use
        parts = self._parts(completion, body, use)
        message: dict[str, Any] = {"role": "assistant", "content": parts.content, "refusal": None}
        if parts.reasoning is not None:
            message["reasoning_content"] = parts.reasoning
            message["content"] = parts.content or None  # as in vLLM: there is no answer yet
        calls = parts.calls if use is None or use.parallel else parts.calls[:1]
        if not calls:
            return message, completion.finish_reason
        message["content"] = parts.content or None
        message["tool_calls"] = shown_calls(calls, lambda n: self._id(f"{name}/{completion.sample}/{n}"))
        return message, "tool_calls" if completion.finish_reason == "stop" else completion.finish_reason

    def _id(self, place: str) -> str:
        digest = hashlib.sha256(place.encode()).hexdigest()
        length = getattr(self.form, "id_length", 0)
        return digest[:length] if length else f"call_{digest[:24]}"

    def _parts(self, completion: Completion, body: ChatBody, use: ToolUse | None) -> _Parts:
        text = self._with_marks(completion, body)
        if self._harmony is not None:
            found = self._harmony.split(text)
            if found is None:
                return _Parts(None, completion.text)
            reasoning, answer, calls = found
            return _Parts(reasoning, self._shown(answer, body), calls)
        has_grammar = self._has_grammar or body.response_format is not None
        prompt = "" if has_grammar else self._end_of(completion.prompt_token_ids)
        reasoning, answer = self.reasoning.split(text, prompt=prompt)
        schemas = {} if use is None else {one.name: one.arguments_schema or {} for one in use.callable}
        calls = []
        if use is not None and isinstance(self.form, CallForm):
            answer, calls = self.form.split(answer, schemas)
        if reasoning is None and not calls:
            return _Parts(None, completion.text)
        return _Parts(reasoning and self._shown(reasoning, body), self._shown(answer, body), calls)

    def _with_marks(self, completion: Completion, body: ChatBody) -> str:
        """The text of an answer up to its stop string; with special tokens where marks are some, but without its end
        token."""
        if not self._hides:
            return completion.text
        tokens = list(completion.token_ids)
        ends = self.tokenizer.eos_ids | set(body.stop_token_ids)
        if completion.finish_reason == "stop" and tokens and tokens[-1] in ends:
            del tokens[-1]
        whole = self.tokenizer.decode(tokens, skip_special_tokens=False)
        if not body.stop:
            return whole
        cut = len(self.tokenizer.decode(tokens)) - len(completion.text)
        return whole[: len(whole) - max(cut, 0)]

    def _shown(self, text: str, body: ChatBody) -> str:
        """A part of an answer without special tokens."""
        if body.skip_special_tokens:
            for token in self.tokenizer.hidden:
                text = text.replace(token, "")
        return text

    def _end_of(self, prompt: Sequence[int]) -> str:
        return self.tokenizer.decode(list(prompt[-_PROMPT_END:]), skip_special_tokens=False)
