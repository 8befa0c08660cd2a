"""Copies of the types of the `openai` client (3.x) that a batch output holds, which validate strictly."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")


class TopLogprob(Strict):
    token: str
    bytes: list[int] | None = None
    logprob: float


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Strict):
    content: list[TokenLogprob] | None = None
    refusal: list[TokenLogprob] | None = None


class Function(Strict):
    name: str
    arguments: str


class ToolCall(Strict):
    id: str
    type: Literal["function"]
    function: Function


class Message(Strict):
    role: Literal["assistant"]
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None  # of vLLM, SGLang and DeepSeek's API


class ChatChoice(Strict):
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter", "function_call"]
    index: int
    logprobs: ChatLogprobs | None = None
    message: Message


class CompletionLogprobs(Strict):
    text_offset: list[int] | None = None
    token_logprobs: list[float] | None = None
    tokens: list[str] | None = None
    top_logprobs: list[dict[str, float]] | None = None


class CompletionChoice(Strict):
    finish_reason: Literal["stop", "length", "content_filter"]
    index: int
    logprobs: CompletionLogprobs | None = None
    text: str


class CompletionTokensDetails(Strict):
    reasoning_tokens: int | None = None


class Usage(Strict):
    completion_tokens: int
    prompt_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails | None = None


class ChatCompletion(Strict):
    id: str
    choices: list[ChatChoice]
    created: int
    model: str
    object: Literal["chat.completion"]
    usage: Usage


class TextCompletion(Strict):
    id: str
    choices: list[CompletionChoice]
    created: int
    model: str
    object: Literal["text_completion"]
    usage: Usage


class ErrorObject(Strict):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(Strict):
    error: ErrorObject


class BatchError(Strict):
    code: str
    message: str


class Response(Strict):
    status_code: Literal[200]
    request_id: str
    body: ChatCompletion | TextCompletion


class ErrorResponse(Strict):
    status_code: Literal[400, 500]
    request_id: str
    body: ErrorBody


class OutputLine(Strict):
    """A line of the output file."""

    id: str
    custom_id: str
    response: Response
    error: None


class ErrorLine(Strict):
    """A line of the error file."""

    id: str
    custom_id: str | None
    response: ErrorResponse
    error: BatchError
