"""Accept length of a server: from its Prometheus counters at /metrics, or from what it reports of each request.

Three definitions are in use. Records have `accept_length` as `specbatch.records.metrics` defines it: tokens that
verifies emitted over verifies, those without drafts included, the first token of a request (made by prefill) and tokens
past a stop left out. What servers count is converted to it:

* vLLM (checked with 0.33.0: vllm/v1/spec_decode/metrics.py, vllm/v1/metrics/loggers.py and stats.py) counts verifies
  with drafts (those of n-gram lookup that finds nothing, too: it drafts the last token), and accepted drafts before
  tokens past a stop are trimmed. But it observes one inter-token latency for each step of a request that emitted tokens
  after its first ones, and one time to first token for each request. So accept length is (generated tokens - times to
  first token) / inter-token latencies. Its own figure, 1 + accepted / drafts, is the metric `untrimmed_accept_length`.
* SGLang (checked with 0.5.23: sglang/srt/managers/tokenizer_manager.py and entrypoints/openai/protocol.py) reports
  `spec_verify_ct` of each request that asks for it (`return_spec_tokens_details`). Its `spec_accept_length` divides all
  tokens by that, the first one included; here it is left out. Releases without these details have a counter of verifies
  (`--enable-metrics`), of all requests that ended. The gauge of the accept length covers an unknown window and is not
  read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specbatch.core.request import Completion
from specbatch.records.markdown import sum_lists
from specbatch.sweeps.run.http_answer import Drafting

DRAFTS, DRAFTED, ACCEPTED = (f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens"))
BY_POSITION = f"{ACCEPTED}_per_pos"
GENERATED = "vllm:generation_tokens"
FIRST_TOKENS, LATER_STEPS = (f"vllm:{name}_seconds_count" for name in ("time_to_first_token", "inter_token_latency"))
VERIFIES = "sglang:spec_verify_calls"
_KNOWN = (DRAFTS, DRAFTED, ACCEPTED, BY_POSITION, GENERATED, FIRST_TOKENS, LATER_STEPS, VERIFIES)
_MOST_POSITIONS = 1_024
_LARGEST = 1e14  # beyond what a server can have counted
_TOLERANCE = 0.02  # of generated tokens: the server also counts those of a stop text


@dataclass(frozen=True)
class Accepted:
    """What a server accepted in a window. metrics and counters go into its record.

    source   where the accept length comes from; if it is unknown, the reason
    """

    source: str
    metrics: dict[str, float | None] = field(default_factory=dict)
    acceptance: dict[str, Any] | None = None

    @property
    def counters(self) -> dict[str, Any]:
        """`server_acceptance`: verifies with drafts, and by draft position how many accepted it and all before it."""
        known = self.metrics.get("accept_length") is not None
        found: dict[str, Any] = {"accept_length_source" if known else "no_accept_length": self.source}
        return found | ({"server_acceptance": self.acceptance} if self.acceptance else {})


def counters_of(text: str) -> dict[str, float]:
    """The known counters, each summed over its labels; of `BY_POSITION` one per position, its name with the position.
    Text that is not in Prometheus' format has none."""
    found: dict[str, float] = {}
    lines = (line for line in text.splitlines() if line.startswith(_KNOWN))
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if name == BY_POSITION:
                    name = f"{name}/{int(sample.labels['position'])}"
                elif name not in _KNOWN:
                    continue
                if 0 <= sample.value < _LARGEST:
                    found[name] = found.get(name, 0.0) + sample.value
    except (ValueError, LookupError, TypeError):
        return {}
    return found


def accepted(
    before: dict[str, float],
    after: dict[str, float],
    completions: Sequence[Completion],
    drafting: Iterable[Drafting] = (),
) -> Accepted:
    """Acceptance between two readings of the counters. drafting: what SGLang reported of the completions."""
    if found := list(drafting):
        return _of_requests(found, completions)
    if before and not after:
        return Accepted("/metrics no longer answered at the end: the server has stopped")
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    if any(value < 0 for value in grown.values()):
        return Accepted("the server's counters went back: it was restarted")
    if grown.get(DRAFTS):
        return _of_vllm(grown, completions)
    if verifies := grown.get(VERIFIES):
        tokens = sum(item.metrics.output_tokens - 1 for item in completions if item.is_complete)
        if tokens < verifies:
            also = "other or failed requests are counted, too"
            return Accepted(f"the server's counter shows {verifies:g} verifies for {tokens} tokens: {also}")
        length = {"accept_length": tokens / verifies, "verify_steps": verifies}
        return Accepted("SGLang's counter of verifies", dict(length))
    if any(name in after for name in (DRAFTS, VERIFIES)):
        return Accepted("the server's counters show no drafts")
    return Accepted("/metrics has no counter of drafts: no speculation, or SGLang without --enable-metrics")


def _of_vllm(grown: dict[str, float], completions: Sequence[Completion]) -> Accepted:
    drafts, drafted, right = (grown.get(name, 0.0) for name in (DRAFTS, DRAFTED, ACCEPTED))
    if right > drafted:
        return Accepted(f"the server's counters show {drafted:g} drafted tokens, but {right:g} accepted ones")
    metrics: dict[str, float | None] = {
        "untrimmed_accept_length": 1 + right / drafts,
        "untrimmed_accept_rate": right / drafted if drafted else None,
    }
    places = sorted(int(name.rpartition("/")[2]) for name in grown if name.startswith(f"{BY_POSITION}/"))
    by_position = [int(grown[f"{BY_POSITION}/{place}"]) for place in places]
    consistent = places == list(range(min(len(places), _MOST_POSITIONS))) and sum(by_position) == right
    acceptance = {"verifies": int(drafts), "accepted": by_position} if by_position and consistent else None
    generated, first, steps = (grown.get(name) for name in (GENERATED, FIRST_TOKENS, LATER_STEPS))
    if generated is None or first is None or not steps:
        return Accepted("vLLM's counters of generated tokens and latencies are missing", metrics, acceptance)
    ours = sum(item.metrics.output_tokens for item in completions if item.is_complete)
    if abs(generated - ours) > _TOLERANCE * ours:
        also = "other or failed requests are counted, too"
        text = f"the server's counters show {generated:g} generated tokens, this client {ours}: {also}"
        return Accepted(text, metrics, acceptance)
    if generated - first < steps:
        text = f"the server's counters show {steps:g} steps for {generated - first:g} tokens, though each emits one"
        return Accepted(text, metrics, acceptance)
    metrics |= {"accept_length": (generated - first) / steps, "verify_steps": steps}
    return Accepted("vLLM's counters of tokens and steps", metrics, acceptance)


def _of_requests(found: list[Drafting], completions: Sequence[Completion]) -> Accepted:
    verifies, right, proposed = (sum(getattr(one, n) for one in found) for n in ("verifies", "accepted", "proposed"))
    if right > proposed > 0:
        text = f"SGLang reports {proposed} drafted tokens, but {right} accepted ones"
        return Accepted(text, {"accept_length": None, "verify_steps": None})
    metrics: dict[str, float | None] = {
        "untrimmed_accept_length": 1 + right / verifies,
        "untrimmed_accept_rate": right / proposed if proposed else None,
    }
    counts = sum_lists(list(one.accepted_histogram) for one in found)
    complete = sum(counts) == verifies and any(counts[1:])
    reached = [sum(counts[place:]) for place in range(1, len(counts))]
    acceptance = {"verifies": verifies, "accepted": reached} if complete else None
    emitted = sum(item.metrics.emitted for item in completions if item.is_complete)
    if emitted < verifies:
        text = f"SGLang reports {verifies} verifies for {emitted} tokens, though each emits at least one"
        return Accepted(text, metrics | {"accept_length": None}, acceptance)
    metrics |= {"accept_length": emitted / verifies, "verify_steps": verifies}
    return Accepted("SGLang's counts of each request", metrics, acceptance)
