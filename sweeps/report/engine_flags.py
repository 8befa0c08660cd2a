"""The command-line flags of specbatch, vLLM and SGLang for a drafter that was measured, or why there are none.

Checked with vLLM 0.33.0 (vllm/config/speculative.py, v1/spec_decode/dynamic/utils.py) and SGLang 0.5.23
(sglang/srt/speculative/spec_info.py). The names of the algorithms are in `specbatch.algorithms`.
"""

from __future__ import annotations

import json
import shlex
from typing import Any, NamedTuple

from specbatch.algorithms import NO_SPECULATION
from specbatch.records.run_record import RunRecord

_MOST = 65_536  # requests at once, for "from here on"


class Flags(NamedTuple):
    """command: "" where the engine cannot use the drafter; remark: why, or what the command lacks."""

    command: str
    remark: str = ""


def flags_of(record: RunRecord, off_from: int | None) -> dict[str, Flags]:
    """By engine. Empty for a configuration that does not draft.

    record    of a point of the configuration
    off_from  number of requests at once from which on nothing is to be drafted
    """
    asked, model = record.speculation, str(record.config["model"])
    if asked.algorithm == NO_SPECULATION:
        return {}
    return {
        "specbatch": _of_specbatch(record, model, off_from),
        "vLLM": _of_vllm(record, model, off_from),
        "SGLang": _of_sglang(record, model, off_from),
    }


def _of_specbatch(record: RunRecord, model: str, off_from: int | None) -> Flags:
    asked, count = record.speculation, record.speculation.num_drafts
    words = ["specbatch", "generate", "prompts.jsonl", "-o", "answers.jsonl", "--model", model]
    words += ["--algorithm", asked.algorithm, *(["--draft", asked.draft] if asked.draft else [])]
    if asked.drafts_trees:
        words += ["--draft-steps", str(asked.depth), "--draft-topk", str(asked.shape.topk)]
    # "auto" also drafts nothing where that is faster.
    many = ["auto", "--draft-steps", str(count)] if off_from is not None and not asked.drafts_trees else [str(count)]
    return Flags(shlex.join([*words, "--draft-tokens", *many]))


def _why_not(record: RunRecord, known: object, engine: str) -> str | None:
    """Why an engine cannot use the drafter; None if it can. known: its name for the algorithm."""
    asked = record.speculation
    if known is None:
        return f"{engine} has no {asked.algorithm} as measured here"
    if asked.draft is not None and asked.draft.startswith("self:"):
        return f"{engine} cannot draft with layers of the target ({asked.draft})"
    if asked.corpus is not None:
        return f"{engine} has no --corpus"
    if asked.drafts_trees:
        return f"a tree ({asked.shape}) has other flags there"
    return None


def _of_vllm(record: RunRecord, model: str, off_from: int | None) -> Flags:
    asked = record.speculation
    if (reason := _why_not(record, asked.entry.in_vllm, "vLLM")) is not None:
        return Flags("", reason)
    config: dict[str, Any] = dict(asked.entry.in_vllm or {})
    if asked.draft:
        config["model"] = asked.draft
    config["num_speculative_tokens"] = asked.num_drafts
    if "ngram_min" in asked.entry.settings:
        config |= {"prompt_lookup_min": asked.ngram_min, "prompt_lookup_max": asked.ngram_max}
    if off_from is not None:
        ranges = [[1, off_from - 1, asked.num_drafts]] if off_from > 1 else []
        config["num_speculative_tokens_per_batch_size"] = [*ranges, [off_from, _MOST, 0]]
    return Flags(shlex.join(["vllm", "serve", model, "--speculative-config", json.dumps(config)]))


def _of_sglang(record: RunRecord, model: str, off_from: int | None) -> Flags:
    asked = record.speculation
    if (reason := _why_not(record, asked.entry.in_sglang, "SGLang")) is not None:
        return Flags("", reason)
    words = ["python", "-m", "sglang.launch_server", "--model-path", model]
    words += ["--speculative-algorithm", str(asked.entry.in_sglang)]
    if asked.draft:
        words += ["--speculative-draft-model-path", asked.draft]
    if asked.entry.tree != "block":  # it drafts the whole block
        if asked.entry.loads_draft:
            words += ["--speculative-num-steps", str(asked.num_drafts), "--speculative-eagle-topk", "1"]
        words += ["--speculative-num-draft-tokens", str(asked.num_drafts + 1)]  # it counts the root
    off = "no flag switches drafting off from a number of requests on; --speculative-adaptive decides by its own table"
    return Flags(shlex.join(words), off if off_from is not None else "")
