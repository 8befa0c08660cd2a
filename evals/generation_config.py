"""A model's `generation_config.json`: which of its values lm-eval's model for transformers would apply to answers.

transformers' `generate` takes from this file what its caller leaves open, and where the file leaves it open, too, it
samples from the 50 most likely tokens. So lm-eval penalizes repetitions, or samples from fewer tokens, where the task
does not say so. Here answers follow the task and the options only, and a run notes what would be different. Seen with
lm-eval 0.4.13 and transformers 5.23, which applies these keys: see `tests/evals/test_generation_config.py`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from specbatch.config.engine_config import EngineConfig
from specbatch.files.text_files import read_json
from specbatch.weights.hub import cached

NAME = "generation_config.json"
TOP_K = 50  # transformers' default
_OPTIONS = {  # keys that have an option here, and its value that changes nothing
    "max_new_tokens": ("--max-new-tokens {}", None),
    "min_new_tokens": ("--gen-kwargs min_new_tokens={}", 0),
    "repetition_penalty": ("--gen-kwargs repetition_penalty={}", 1.0),
}
_SAMPLED_OPTIONS = {
    "top_k": ("--top-k {}", 0),
    "top_p": ("--top-p {}", 1.0),
    "min_p": ("--min-p {}", 0.0),
}
_OTHERS = {  # keys without an option, and the value that changes nothing
    "no_repeat_ngram_size": 0, "suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": [],
    "sequence_bias": None, "min_length": 0, "forced_eos_token_id": None, "exponential_decay_length_penalty": None,
    "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0, "guidance_scale": 1.0, "num_beams": 1,
    "watermarking_config": None, "max_time": None,
}  # fmt: skip
_SAMPLED_OTHERS = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_h": None}


def generation_config(config: EngineConfig) -> dict[str, Any]:
    """The values of the model's file; empty without one. Nothing is downloaded."""
    if config.load_format == "dummy":
        return {}
    path: Path | None = Path(os.path.expanduser(config.model)) / NAME
    if not (path and path.is_file()):
        path = cached(config.model, NAME)
    if path is None:
        return {}
    found = read_json("model", path, "download it again")
    return {name: value for name, value in found.items() if value is not None} if isinstance(found, dict) else {}


def unapplied(values: Mapping[str, Any], given: Collection[str], *, sampled: bool) -> Iterator[str]:
    """Lines about what lm-eval would apply to answers. given: arguments that the task or the user sets."""
    options = _OPTIONS | (_SAMPLED_OPTIONS if sampled else {})
    others = _OTHERS | (_SAMPLED_OTHERS if sampled else {})
    found = {
        name: values[name]
        for name in values
        if name not in given
        and values[name] != (options[name][1] if name in options else others.get(name, values[name]))
    }
    with_option = [
        f"{name}={found[name]} ({options[name][0].format(found[name])})" for name in found if name in options
    ]
    without = [f"{name}={found[name]}" for name in found if name not in options]
    if with_option:
        yield f"lm-eval would apply {', '.join(with_option)} of the model's {NAME}, and this run does not"
    if without:
        yield f"lm-eval would apply {', '.join(without)} of the model's {NAME}, for which there is no option here"
    if sampled and "top_k" not in {*given, *values}:
        yield f"lm-eval would apply transformers' default of top_k={TOP_K} (--top-k {TOP_K}), and this run does not"
