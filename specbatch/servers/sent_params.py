"""Sampling parameters as fields of a request, by the names that each kind of server has for them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import refuse
from specbatch.servers.served_model import LLAMACPP
from specbatch.servers.server import SENT

_NO_PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repeat_penalty": 1.0}
_LONGEST_PENALIZED = 2**20  # tokens: llama.cpp's server has no number for all, and a buffer of so many


def refuse_unsent(params: SamplingParams, kind: str) -> None:
    """Refuse parameters that a server of this kind is not sent."""
    for item in fields(params):
        if (value := getattr(params, item.name)) == item.default:
            continue
        if item.name not in SENT:
            raise refuse(item.name, value, "is not sent to a server; leave it out")
        if item.name in ("min_tokens", "stop_token_ids") and kind == LLAMACPP:
            raise refuse(item.name, value, "llama.cpp's server has no such parameter; leave it out")


def fields_of(params: SamplingParams, kind: str) -> dict[str, Any]:
    """All that are sent. kind: see `HttpEngine`."""
    found: dict[str, Any] = {
        "max_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "ignore_eos": params.ignore_eos,
        "skip_special_tokens": params.skip_special_tokens,
        **_sampling(params),
        **penalties(params, kind),
    }
    if params.stop:
        found["stop"] = list(params.stop)
    if params.stop_token_ids:
        found["stop_token_ids"] = list(params.stop_token_ids)
    if params.min_tokens:
        found["min_tokens"] = params.min_tokens
    return found


def penalties(params: SamplingParams, kind: str) -> dict[str, Any]:
    """Penalties, also those that change nothing: vLLM and SGLang take a repetition penalty that is not sent from
    the model's generation_config.json. llama.cpp has another name for it, and looks at the last 64 tokens only."""
    found = {name: getattr(params, name) for name in ("presence_penalty", "frequency_penalty")}
    if kind == LLAMACPP:
        found["repeat_penalty"] = params.repetition_penalty
        return found if found == _NO_PENALTIES else found | {"repeat_last_n": _LONGEST_PENALIZED}
    return found | {"repetition_penalty": params.repetition_penalty}


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """Fields of a sampled request. All of them are sent, because servers take defaults from the model otherwise; -1 is
    top-k off for vLLM and SGLang."""
    if not params.temperature:
        return {}
    return {"top_p": params.top_p, "top_k": params.top_k or -1, "min_p": params.min_p, "seed": params.seed}
