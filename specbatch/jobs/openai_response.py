"""OpenAI's responses: bodies of chat completions and completions, and errors."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from specbatch.core.request import Completion
from specbatch.jobs.openai_request import ChatBody, CompletionBody

if TYPE_CHECKING:
    from specbatch.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # OpenAI's value for a token that is very unlikely; JSON has no infinity


def response_body(
    name: str,
    model: str,
    body: ChatBody | CompletionBody,
    completions: Sequence[Sequence[Completion]],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """A `chat.completion` or `text_completion` object. completions: the samples of each prompt."""
    chat = isinstance(body, ChatBody)
    choices: list[dict[str, Any]] = []
    for completion in (item for samples in completions for item in samples):
        choice: dict[str, Any] = {"index": len(choices)}
        if chat:
            choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
            choice["logprobs"] = _chat_logprobs(completion, tokenizer)
        else:
            choice["text"] = completion.text
            choice["logprobs"] = _completion_logprobs(completion, tokenizer)
        choices.append(choice | {"finish_reason": completion.finish_reason})
    prompt = sum(samples[0].metrics.prompt_tokens for samples in completions)
    output = sum(item.metrics.output_tokens for samples in completions for item in samples)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output},
    }


def error_response(status: int, message: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `response`, without its request id, and the `error` of an error row."""
    code = "invalid_request" if status == 400 else "server_error"
    body = {"message": message, "type": f"{code}_error" if status == 400 else code, "param": None, "code": code}
    return {"status_code": status, "body": {"error": body}}, {"code": code, "message": message}


def _chat_logprobs(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    every: Sequence[Mapping[int, float]] = completion.top_logprobs or [{}] * len(completion.token_ids)
    content = [
        _token(token, logprob, tokenizer) | {"top_logprobs": [_token(*other, tokenizer) for other in likely.items()]}
        for token, logprob, likely in zip(completion.token_ids, completion.logprobs, every, strict=True)
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any] | None:
    if completion.logprobs is None:
        return None
    texts = [_text(token, tokenizer) for token in completion.token_ids]
    top = [
        {_text(token, tokenizer): max(value, LEAST_LOGPROB) for token, value in likely.items()}
        for likely in completion.top_logprobs or []
    ]
    return {
        "text_offset": list(accumulate(map(len, texts[:-1]), initial=0))[: len(texts)],
        "token_logprobs": [max(value, LEAST_LOGPROB) for value in completion.logprobs],
        "tokens": texts,
        "top_logprobs": None if completion.top_logprobs is None else top,
    }


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    text = _text(token, tokenizer)
    return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(text.encode())}


def _text(token: int, tokenizer: Tokenizer) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)
