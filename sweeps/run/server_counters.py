"""Accept length of a server from its Prometheus counters at /metrics.

vLLM counts drafts (verifies of a draft, one per request and step), drafted and accepted tokens: accept length is
1 + accepted / drafts, which excludes steps without a draft. SGLang (with --enable-metrics) counts the verifies of
each request that ends: accept length is output tokens, without each first one, which prefill made, over verifies.
Its gauge of the accept length covers an unknown window and is not read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client.parser import text_string_to_metric_families

from specbatch.core.request import Completion

DRAFTS, DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))
VERIFIES = "sglang:spec_verify_calls"
_KNOWN = (DRAFTS, DRAFTED, ACCEPTED, VERIFIES)


def counters_of(text: str) -> dict[str, float]:
    """The known counters, each summed over its labels. Text that is not in Prometheus' format has none."""
    found: dict[str, float] = {}
    lines = (line for line in text.splitlines() if line.startswith(_KNOWN))
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if name in _KNOWN and math.isfinite(sample.value):
                    found[name] = found.get(name, 0.0) + sample.value
    except (ValueError, LookupError, TypeError):
        return {}
    return found


def accepted(
    before: dict[str, float], after: dict[str, float], completions: Iterable[Completion]
) -> tuple[dict[str, float | None], str]:
    """Acceptance metrics between two readings, and their source; or no metrics and the reason."""
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    if any(value < 0 for value in grown.values()):
        return {}, "the server's counters went back: it was restarted"
    if drafts := grown.get(DRAFTS):
        drafted, right = grown.get(DRAFTED, 0.0), grown.get(ACCEPTED, 0.0)
        if right > drafted:
            return {}, f"the server's counters show {drafted:g} drafted tokens, but {right:g} accepted ones"
        rate = right / drafted if drafted else None
        found: dict[str, float | None] = {"accept_length": 1 + right / drafts, "accept_rate": rate}
        return found | {"verify_steps": drafts, "drafted_tokens": drafted, "accepted_tokens": right}, "vLLM's counters"
    if verifies := grown.get(VERIFIES):
        tokens = sum(item.metrics.output_tokens - 1 for item in completions if item.is_complete)
        if tokens < verifies:
            also = "other or failed requests are counted, too"
            return {}, f"the server's counter shows {verifies:g} verifies for {tokens} tokens: {also}"
        return {"accept_length": tokens / verifies, "verify_steps": verifies}, "SGLang's counter of verifies"
    if after:
        return {}, "the server's counters show no drafts"
    return {}, "/metrics has no counter of drafts (SGLang needs --enable-metrics, vLLM speculation)"
