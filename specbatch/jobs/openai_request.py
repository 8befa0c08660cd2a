"""Pydantic models of OpenAI's requests for chat completions and completions, with vLLM's extra parameters.

A field that is null counts as absent. Fields that cannot change the answer are ignored (`_WITHOUT_EFFECT`), and
`_NEUTRAL` lists the values of unsupported fields that ask for nothing. Every other field is an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from specbatch.errors import shown_json
from specbatch.files.text_files import UnreadableError, parse_json
from specbatch.jobs.openai_tools import Choice, Tool, ToolUse, tool_use
from specbatch.jobs.prompts import HALF_PAIR, no_text_in

_WITHOUT_EFFECT = {
    "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    "safety_identifier", "service_tier", "store", "user",
}  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),  # or the value of n
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "use_beam_search": (False,),
}
_FORMATS = ("json_schema", "json_object")
_MOST_SAMPLES = 128
_SAMPLING = (
    *("temperature", "top_p", "min_p", "n", "stop", "seed", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "skip_special_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    "logit_bias",
)  # fields that mean the same in `SamplingParams`
_Prompt = str | list[int] | list[str] | list[list[int]]


class UnsupportedError(ValueError):
    """What a request asks for that does not work."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class _NamedSchema(_Strict):
    schema_: dict[str, Any] | bool = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _ResponseFormat(_Strict):
    type: Literal["json_schema", "json_object"]
    json_schema: _NamedSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("a json_schema goes with type json_schema, which needs it")
        return self

    @property
    def schema_(self) -> dict[str, Any] | bool:
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_


class _TemplateArguments(_Strict):
    enable_thinking: bool | None = None


class Envelope(_Strict):
    """One line of a batch file."""

    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class _Function(_Strict):
    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _object(cls, text: str) -> str:
        try:
            found = parse_json(text or "{}")
        except UnreadableError as error:
            raise ValueError(f"{error}; write the arguments as a JSON object") from None
        if not isinstance(found, dict):
            raise ValueError("write the arguments as a JSON object")
        if (place := no_text_in(found)) is not None:  # an escape in the text, which is none in the request
            raise ValueError(f"{place} {HALF_PAIR}")
        return text

    def as_template_value(self) -> dict[str, Any]:
        """Chat templates take the arguments as an object, and write its JSON themselves."""
        return {"name": self.name, "arguments": parse_json(self.arguments or "{}")}


class _ToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: _Function


_NO_ANNOTATIONS: tuple[str, list[Any]] = ("annotations", [])


class Message(_Strict):
    """A message. That of an assistant may have tool calls, reasoning under one of two names, and null as content."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, message: Any) -> Any:
        """Without what a message of a response has and says nothing: null, and an empty list of annotations."""
        if not isinstance(message, dict):
            return message
        return {key: value for key, value in message.items() if value is not None and (key, value) != _NO_ANNOTATIONS}

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> Any:
        """The texts of content parts, joined by newlines as in vLLM."""
        if not isinstance(content, list):
            return content
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str) or part.keys() - {"type", "text"}:
                raise ValueError(f"a content part of type {shown_json(kind)} is not supported; use type text")
        return "\n".join(part["text"] for part in content)

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.role != "assistant":
            if self.tool_calls is not None:
                raise ValueError("tool_calls belong to messages of the assistant; leave them out")
            if self.content is None:
                raise ValueError("content is null or missing; only messages of the assistant may have none")
        return self

    def as_template_value(self) -> dict[str, Any]:
        """The message for a chat template. Without content it has null beside tool calls, as templates that know them
        expect, and else an empty text, because most templates cannot render null."""
        found = self.model_dump(exclude={"tool_calls"}, exclude_none=True)
        found["content"] = self.content if self.content is not None or self.tool_calls else ""
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": call.function.as_template_value()}
                for call in self.tool_calls
            ]
        return found


class _Body(_Strict):
    """The fields that both kinds of requests have."""

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = 1.0
    top_p: float = 1.0
    n: int = Field(1, ge=1, le=_MOST_SAMPLES)
    stop: str | list[str] = Field(default_factory=list)  # pydantic copies other defaults deeply, for every row
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = Field(default_factory=list)
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[str, float] = Field(default_factory=dict)
    response_format: _ResponseFormat | None = None

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> Self:
        """Raises UnsupportedError and pydantic's ValidationError."""
        known = set(cls.model_fields)
        ignored = _WITHOUT_EFFECT - known
        fields = {name: value for name, value in body.items() if value is not None and name not in ignored}
        form = fields.get("response_format")
        if not isinstance(form, Mapping) or form.get("type") not in _FORMATS:
            known.remove("response_format")
        for name in [name for name in fields if name not in known]:
            neutral = _NEUTRAL.get(name, ())
            if fields[name] not in neutral and not (name == "best_of" and fields[name] == fields.get("n")):
                works = f"leave it out, or use {' or '.join(map(shown_json, neutral))}" if neutral else "leave it out"
                works += (
                    ', {"type": "json_object"} or {"type": "json_schema", ...}' if name == "response_format" else ""
                )
                field = shown_json(f"body.{name}").strip('"')
                raise UnsupportedError(f"{field}={shown_json(fields[name])} is not supported; {works}")
            del fields[name]
        return cls(**fields)

    @property
    def limit(self) -> int | None:
        """The most tokens of an answer; None: as many as there is room for."""
        return self.max_tokens

    @property
    def thinking(self) -> bool | None:
        return None

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values of `SamplingParams`. given: those for fields that the request leaves out, in place of OpenAI's."""
        found: dict[str, Any] = {"temperature": 1.0, **given}
        found |= {name: getattr(self, name) for name in _SAMPLING if name in self.model_fields_set}
        if self.response_format is not None:
            found["regex"] = None
            found["json_schema"] = self.response_format.schema_
        if "top_k" in self.model_fields_set:
            found["top_k"] = 0 if self.top_k == -1 else self.top_k  # both mean off
        if self.limit is not None:
            found["max_new_tokens"] = self.limit
        return found


class ChatBody(_Body):
    """The body for /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: _TemplateArguments | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def thinking(self) -> bool | None:
        return None if self.chat_template_kwargs is None else self.chat_template_kwargs.enable_thinking

    @property
    def use(self) -> ToolUse | None:
        """How the answer is to call functions; None: it cannot call any. Raises UnsupportedError."""
        try:
            return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)
        except ValueError as error:
            raise UnsupportedError(f"body.{error}") from None

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """What the chat template shows of the tools; None if none can be called."""
        return None if self.use is None else [tool.as_template_value() for tool in self.tools]

    def prompts(self) -> list[tuple[str, Any]]:
        """The form (`specbatch.jobs.prompts.FORMS`) and value of each prompt."""
        return [("messages", [message.as_template_value() for message in self.messages])]

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise UnsupportedError(f"body.top_logprobs={self.top_logprobs} needs logprobs=true")
        found = super().sampling(given)
        if self.limit is None and "max_new_tokens" not in given:
            found["max_new_tokens"] = max(self.min_tokens, 1)  # set when the length of the prompt is known
        if self.use is not None and (found.get("regex") is not None or found.get("json_schema") is not None):
            works = 'leave one out, or use tool_choice="none"'
            raise UnsupportedError(f"body.tools together with response_format, regex or json_schema: {works}")
        return found | {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}


class CompletionBody(_Body):
    """The body for /v1/completions."""

    prompt: _Prompt
    logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("prompt")
    @classmethod
    def _not_empty(cls, prompt: Any) -> Any:
        if not prompt or (isinstance(prompt, list) and not all(isinstance(item, int) or item for item in prompt)):
            raise ValueError("has no tokens; give at least one")
        return prompt

    def prompts(self) -> list[tuple[str, Any]]:
        """The form (`specbatch.jobs.prompts.FORMS`) and value of each prompt."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        values: list[Any] = self.prompt if several else [self.prompt]  # type: ignore[assignment]
        return [("prompt" if isinstance(value, str) else "prompt_token_ids", value) for value in values]

    def sampling(self, given: Mapping[str, Any]) -> dict[str, Any]:
        found = {"max_new_tokens": 16} | super().sampling(given)
        return found | {"logprobs": self.logprobs is not None, "top_logprobs": self.logprobs or 0}


BODIES: dict[str, type[ChatBody] | type[CompletionBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
}


def envelope_of(value: Any) -> Envelope:
    """A line of a batch file. Raises UnsupportedError and pydantic's ValidationError."""
    if not isinstance(value, dict):
        raise UnsupportedError("not an object; write custom_id, method, url and body")
    envelope = Envelope(**{str(name): item for name, item in value.items()})
    if envelope.url not in BODIES:
        raise UnsupportedError(f"url={shown_json(envelope.url)} is not supported; use {' or '.join(BODIES)}")
    return envelope
