"""OpenAI's responses: bodies of chat completions and completions, and errors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from specbatch.core.completion import Completion
from specbatch.jobs.chat_output import ChatOutput
from specbatch.jobs.openai_request import ChatBody, CompletionBody
from specbatch.jobs.token_pieces import TokenPieces

LEAST_LOGPROB = -9999.0  # OpenAI's value for a token that is very unlikely; JSON has no infinity


def response_body(
    name: str,
    model: str,
    body: ChatBody | CompletionBody,
    completions: Sequence[Sequence[Completion]],
    output: ChatOutput,
) -> dict[str, Any]:
    """A `chat.completion` or `text_completion` object. completions: the samples of each prompt."""
    choices: list[dict[str, Any]] = []
    has_logprobs = any(item.logprobs is not None for samples in completions for item in samples)
    pieces = TokenPieces(output.tokenizer, skips=body.skip_special_tokens) if has_logprobs else None
    for completion in (item for samples in completions for item in samples):
        choice: dict[str, Any] = {"index": len(choices)}
        reason = completion.finish_reason
        if isinstance(body, ChatBody):
            choice["message"], reason = output.message(completion, body, name)
            choice["logprobs"] = _chat_logprobs(completion, pieces)
        else:
            choice["text"] = completion.text
            choice["logprobs"] = _completion_logprobs(completion, pieces)
        choices.append(choice | {"finish_reason": reason})
    prompt = sum(samples[0].metrics.prompt_tokens for samples in completions)
    generated = sum(item.metrics.output_tokens for samples in completions for item in samples)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
    if reasoned := sum(item.metrics.reasoning_tokens for samples in completions for item in samples):
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoned}
    chat = isinstance(body, ChatBody)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage,
    }


def error_response(status: int, message: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `response`, without its request id, and the `error` of an error row."""
    code = "invalid_request" if status == 400 else "server_error"
    body = {"message": message, "type": f"{code}_error" if status == 400 else code, "param": None, "code": code}
    return {"status_code": status, "body": {"error": body}}, {"code": code, "message": message}


def _chat_logprobs(completion: Completion, pieces: TokenPieces | None) -> dict[str, Any] | None:
    if completion.logprobs is None or pieces is None:
        return None
    every: Sequence[Mapping[int, float]] = completion.top_logprobs or [{}] * len(completion.token_ids)
    content = []
    places = zip(completion.token_ids, completion.logprobs, every, strict=True)
    own = pieces.split(completion.token_ids, completion.text)
    for (token, logprob, likely), piece in zip(places, own, strict=True):
        others = [
            _token(piece.data if other == token else pieces.bytes_of(other), value) for other, value in likely.items()
        ]
        content.append(_token(piece.data, logprob) | {"top_logprobs": others})
    return {"content": content, "refusal": None}


def _token(data: bytes, logprob: float) -> dict[str, Any]:
    """Bytes that are no characters are shown as \\xf0\\x9f: by DeepSeek's API (2025), too."""
    text = data.decode(errors="backslashreplace")
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(data)}


def _completion_logprobs(completion: Completion, pieces: TokenPieces | None) -> dict[str, Any] | None:
    if completion.logprobs is None or pieces is None:
        return None
    own = pieces.split(completion.token_ids, completion.text)
    top = None
    if completion.top_logprobs is not None:
        chosen = zip(completion.token_ids, completion.logprobs, own, strict=True)
        top = [
            _by_name({**likely, token: logprob}, token, piece.text, pieces)
            for (token, logprob, piece), likely in zip(chosen, completion.top_logprobs, strict=True)
        ]
    return {
        "text_offset": [piece.offset for piece in own],
        "token_logprobs": [max(value, LEAST_LOGPROB) for value in completion.logprobs],
        "tokens": [piece.text for piece in own],
        "top_logprobs": top,
    }


def _by_name(likely: Mapping[int, float], token: int, text: str, pieces: TokenPieces) -> dict[str, float]:
    """Log-probabilities by the texts of tokens, that of the chosen token as in `tokens`. A text that another token has
    is replaced by token_id:ID, as vLLM names tokens on request."""
    names = {text: token}
    for other in likely:
        if other != token:
            name = _name(pieces.bytes_of(other))
            names[name if name not in names else f"token_id:{other}"] = other
    name_of = {other: name for name, other in names.items()}
    return {name_of[other]: max(value, LEAST_LOGPROB) for other, value in likely.items()}


def _name(data: bytes) -> str:
    """The text of a token; bytes that are no characters as in OpenAI's completions, such as bytes:\\xf0\\x9f."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + data.decode(errors="backslashreplace")
