"""The workload of a point as its record holds it: prompts, lengths, arrivals and their hashes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbatch.core.sampling_params import sampling_of
from specbatch.sweeps.workload.lengths import bounds

if TYPE_CHECKING:
    from specbatch.sweeps.workload.workloads import Workload


def describe(workload: Workload, prompts: list[list[int]]) -> dict[str, Any]:
    """The workload of a point for its record. output_len is the maximum, input_len is None if prompts differ;
    input_range and output_range hold the smallest and the largest of random lengths, and of those that rows set.
    Without prompts: all rows."""
    inputs, outputs, turns = workload.input_range, bounds(workload.output_len), workload.most_turns
    params = workload.params(len(prompts) or len(workload.rows) or 1)
    own = [row.sampling for row in workload.rows if row.sampling]
    if own:
        lengths = [one.max_new_tokens for one in params]
        outputs = min(lengths), max(lengths)
    return {
        "dataset": workload.dataset,
        "data": str(workload.data) if workload.data else None,
        "input_len": inputs[0] if inputs and inputs[0] == inputs[1] else None,
        "input_range": list(inputs) if inputs and inputs[0] < inputs[1] else None,
        "output_len": outputs[1] if own or not workload.has_own_lengths else None,
        "output_range": list(outputs) if outputs[0] < outputs[1] else None,
        "ignore_eos": workload.ignores_eos,
        "stop": list(workload.stop),
        "chat_template": workload.chat_template,
        "rendered": workload.is_rendered,
        "thinking": workload.thinking,
        "prompts": len(prompts),
        "distinct_prompts": len({tuple(prompt) for prompt in prompts}),
        "category": workload.category,
        **({"turns": turns, "requests": workload.requests_of(len(prompts))} if turns > 1 else {}),
        "sampling": next((sampling_of(one) for one in params if one.temperature), None),
        **({"own_sampling": _own_sampling(own, len(workload.rows))} if own else {}),
        "seed": workload.seed,
        "shared": {name: getattr(workload, name) for name in ("groups", "group_prompts", "shared_len")}
        if workload.is_grouped
        else None,
        "request_rate": workload.request_rate if workload.request_rate < math.inf else None,
        "burst": 0 if workload.is_at_once else workload.burst,
        **({"uncapped": True} if workload.uncapped else {}),
        "sequential": workload.sequential,
        "prompts_sha256": sha256_of(prompts),
        **({"slo": workload.slo.as_dict()} if workload.slo else {}),
    }


def _own_sampling(own: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    """The sampling parameters that rows set themselves, for a record."""
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    return {"rows": len(own), "of": rows, "names": sorted({name for one in own for name in one}), "sha256": digest}


def sha256_of(tokens: Sequence[list[int] | str]) -> str:
    return hashlib.sha256(json.dumps(tokens, separators=(",", ":")).encode()).hexdigest()
