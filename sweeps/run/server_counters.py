"""Accept length of a server from its Prometheus counters at /metrics.

vLLM counts drafts (verifies of a draft, one per request and step), drafted and accepted tokens: accept length is
1 + accepted / drafts, which excludes steps without a draft. SGLang (with --enable-metrics) counts the verifies of
each request that ends: accept length is output tokens, without each first one, which prefill made, over verifies.
Its gauge of the accept length covers an unknown window and is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from specbatch.core.request import Completion

_LINE = re.compile(r"^((?:vllm|sglang):\w+?)(?:_total)?(?:\{.*\})? +(\S+)")
DRAFTS, DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))
VERIFIES = "sglang:spec_verify_calls"
_KNOWN = (DRAFTS, DRAFTED, ACCEPTED, VERIFIES)


def counters_of(text: str) -> dict[str, float]:
    """The known counters, each summed over its labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if (match := _LINE.match(line)) and match[1] in _KNOWN:
            found[match[1]] = found.get(match[1], 0.0) + float(match[2])
    return found


def accepted(
    before: dict[str, float], after: dict[str, float], completions: Iterable[Completion]
) -> tuple[dict[str, float | None], str]:
    """Acceptance metrics between two readings, and their source; or no metrics and the reason."""
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    if drafts := grown.get(DRAFTS):
        drafted, right = grown.get(DRAFTED, 0.0), grown.get(ACCEPTED, 0.0)
        rate = right / drafted if drafted else None
        found: dict[str, float | None] = {"accept_length": 1 + right / drafts, "accept_rate": rate}
        return found | {"verify_steps": drafts, "drafted_tokens": drafted, "accepted_tokens": right}, "vLLM's counters"
    if verifies := grown.get(VERIFIES):
        tokens = sum(item.metrics.output_tokens - 1 for item in completions if item.is_complete)
        return {"accept_length": tokens / verifies, "verify_steps": verifies}, "SGLang's counter of verifies"
    if after:
        return {}, "the server's counters show no drafts"
    return {}, "/metrics has no counter of drafts (SGLang needs --enable-metrics, vLLM speculation)"
