"""The workload of a point as its record holds it: prompts, lengths, arrivals and their hashes."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specbatch.core.sampling_params import sampling_of
from specbatch.sweeps.workload.lengths import bounds
from specbatch.sweeps.workload.row_sampling import described
from specbatch.sweeps.workload.token_ids import SCRAMBLES

if TYPE_CHECKING:
    from specbatch.sweeps.workload.workloads import Workload


def describe(workload: Workload, prompts: list[list[int]]) -> dict[str, Any]:
    """The workload of a point for its record. output_len is the maximum, input_len is None if prompts differ;
    input_range and output_range hold the smallest and the largest of random lengths, and of those that rows set.
    Without prompts: all rows."""
    inputs, outputs, turns = workload.input_range, bounds(workload.output_len), workload.most_turns
    windows = {"files_sha256": workload.files_sha256, "window": workload.window or workload.input_len}
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
        **({"scramble": workload.scramble} if workload.scramble != SCRAMBLES[0] else {}),
        **(windows if workload.long_text else {}),
        **({"replay": True} if workload.replay else {}),
        **({"turns": turns, "requests": workload.requests_of(len(prompts))} if turns > 1 else {}),
        "sampling": next((sampling_of(one) for one in params if one.temperature), None),
        **({"own_sampling": described(own, len(workload.rows))} if own else {}),
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


def sha256_of(tokens: Sequence[list[int] | str]) -> str:
    return hashlib.sha256(json.dumps(tokens, separators=(",", ":")).encode()).hexdigest()
