"""Accept length of a server: from its Prometheus counters at /metrics, or from what it reports of each request.

Four definitions are in use. Records have `accept_length` as `specbatch.records.metrics` defines it: tokens that
verifies emitted over verifies, those without drafts included, the first token of a request (made by prefill) and tokens
past a stop left out. What servers count is converted to it:

* vLLM (checked with 0.33.0: vllm/v1/spec_decode/metrics.py, vllm/v1/metrics/loggers.py and stats.py) reports the
  verifies of each request, if it was started with `--per-request-spec-decode-metrics` (`servers.verifies`). Else
  its counters are read: of verifies with drafts (those of n-gram lookup that finds nothing, too: it drafts the last
  token), and of drafts accepted before tokens past a stop are trimmed. But it observes one inter-token latency for each
  step of a request that emitted tokens after its first ones, and one time to first token for each request. So accept
  length is (generated tokens - times to first token) / inter-token latencies. Its own figure, 1 + accepted / drafts, is
  the metric `untrimmed_accept_length`.
* SGLang (checked with 0.5.23: sglang/srt/managers/tokenizer_manager.py and entrypoints/openai/protocol.py) reports
  `spec_verify_ct` of each request that asks for it. Its `spec_accept_length` divides all tokens by that, the first one
  included; here it is left out. Releases without these details have a counter of verifies (`--enable-metrics`), of all
  requests that ended. The accept length of its log, its gauge and its benchmark covers all work since the server
  started and is not read.
* llama.cpp (checked by running xllamacpp 2026.10.11549) has vLLM's counters of drafts under its own name (`--metrics`),
  and reports `draft_n` and `draft_n_accepted` in the `timings` of each chunk, both before tokens past a stop are
  trimmed. Verifies without drafts are in neither; the chunks show them, unless one has several tokens. Of such an
  answer it is known that each verify emits one token and the drafts that it accepted, and that drafts are cut to fit
  into the limit. So one that ended at its limit took tokens - 1 - `draft_n_accepted` verifies; of one that ended
  before, the number is not known if drafts were accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specbatch.core.completion import Completion
from specbatch.records.markdown import sum_lists
from specbatch.records.summarize import emitted_histogram, total_acceptance
from specbatch.servers.verifies import Drafting, Timings

DRAFTS, DRAFTED, ACCEPTED, BY_POSITION = (
    f"spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
)  # after the name of the engine
ENGINES = ("vllm", "llamacpp")
GENERATED = "vllm:generation_tokens"
FIRST_TOKENS, LATER_STEPS = (f"vllm:{name}_seconds_count" for name in ("time_to_first_token", "inter_token_latency"))
VERIFIES = "sglang:spec_verify_calls"
_OF_DRAFTS = tuple(f"{engine}:{name}" for engine in ENGINES for name in (DRAFTS, DRAFTED, ACCEPTED, BY_POSITION))
_KNOWN = (*_OF_DRAFTS, GENERATED, FIRST_TOKENS, LATER_STEPS, VERIFIES)
_NO_METRICS = (
    "the server has no /metrics, and its answers report no verifies: no speculation, or it was started without "
    "--enable-metrics (SGLang) or --metrics (llama.cpp); a vLLM whose /metrics cannot be reached reports them with "
    "--per-request-spec-decode-metrics detailed"
)
_OF_OTHERS = (
    "other or failed requests are counted, too; --per-request-spec-decode-metrics detailed (vLLM) counts by request"
)
_MOST_POSITIONS = 1_024
_LARGEST = 1e14  # beyond what a server can have counted
_TOLERANCE = 0.02  # of generated tokens: the server also counts those of a stop text


@dataclass(frozen=True)
class Accepted:
    """What a server accepted in a window. metrics and counters go into its record.

    source      where the accept length comes from; if it is unknown, the reason
    acceptance  verifies with drafts, and by draft position how many accepted it and all before it, untrimmed
    own         `acceptance` and `emitted_histogram` as of this engine, if each verify is known
    """

    source: str
    metrics: dict[str, float | None] = field(default_factory=dict)
    acceptance: dict[str, Any] | None = None
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def counters(self) -> dict[str, Any]:
        known = self.metrics.get("accept_length") is not None
        found: dict[str, Any] = {"accept_length_source" if known else "no_accept_length": self.source}
        return found | self.own | ({"server_acceptance": self.acceptance} if self.acceptance else {})


def counters_of(text: str) -> dict[str, float] | None:
    """The known counters, each summed over its labels; of `BY_POSITION` one per position, its name with the position.
    Text that is not in Prometheus' format has none. None without a text."""
    if not text:
        return None
    found: dict[str, float] = {}
    lines = (line for line in text.splitlines() if line.startswith(_KNOWN))
    try:
        for family in text_string_to_metric_families("\n".join(lines)):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if name.endswith(f":{BY_POSITION}"):
                    name = f"{name}/{int(sample.labels['position'])}"
                elif name not in _KNOWN:
                    continue
                if 0 <= sample.value < _LARGEST:
                    found[name] = found.get(name, 0.0) + sample.value
    except (ValueError, LookupError, TypeError):
        return {}
    return found


def accepted(
    before: dict[str, float] | None,
    after: dict[str, float] | None,
    completions: Sequence[Completion],
    drafting: Iterable[Drafting | Timings] = (),
) -> Accepted:
    """Acceptance between two readings of the counters, None without any. drafting: what the server reported
    of each completion."""
    reported = list(drafting)
    found = [one for one in reported if isinstance(one, Drafting)]
    if any(one.verifies for one in found):
        return _of_requests(found, completions, _grown(before, after))
    timings = [one for one in reported if isinstance(one, Timings)]
    if before and not after and not timings:
        return Accepted("/metrics no longer answered at the end: the server has stopped")
    grown, is_open, after = _grown(before, after), after is not None, after or {}
    if any(value < 0 for value in grown.values()):
        return Accepted("the server's counters went back: it was restarted", _unknown(timings))
    if timings or grown.get(f"llamacpp:{DRAFTS}"):
        return _of_llamacpp(grown, timings, completions)
    if grown.get(f"vllm:{DRAFTS}"):
        return _of_vllm(grown, completions)
    if verifies := grown.get(VERIFIES):
        tokens = sum(item.metrics.output_tokens - 1 for item in completions if item.is_complete)
        if tokens < verifies:
            also = "other or failed requests are counted, too"
            return Accepted(f"the server's counter shows {verifies:g} verifies for {tokens} tokens: {also}")
        length = {"accept_length": tokens / verifies, "verify_steps": verifies}
        return Accepted("SGLang's counter of verifies", dict(length))
    if any(name in after for name in (*_OF_DRAFTS, VERIFIES)):
        return Accepted("the server's counters show no drafts")
    return Accepted("/metrics has no counter of drafts: no speculation" if is_open else _NO_METRICS)


def _grown(before: dict[str, float] | None, after: dict[str, float] | None) -> dict[str, float]:
    return {name: value - (before or {}).get(name, 0.0) for name, value in (after or {}).items()}


def _each_verify(reported: Sequence[Drafting | Timings], completions: Sequence[Completion]) -> dict[str, Any]:
    """The counters of acceptance of this engine, if each verify of each answer is known; else none."""
    ended = [item.metrics for item in completions if item.is_complete and item.metrics.output_tokens > 1]
    if not any(one.proposed for one in reported) or not all(item.emitted_histogram for item in ended):
        return {}
    acceptance = total_acceptance(completions).as_counters()
    return {"acceptance": acceptance, "emitted_histogram": emitted_histogram(completions)}


def _unknown(timings: Sequence[Timings]) -> dict[str, float | None]:
    """What the requests of a server with `timings` have together, if it is not known of all of them."""
    names = ("accept_length", "verify_steps", "accept_rate", "drafted_tokens", "accepted_tokens")
    return dict.fromkeys(names) if timings else {}


def _of_counters(engine: str, grown: dict[str, float]) -> Accepted:
    """The untrimmed metrics by the counters of drafts; without metrics if they cannot be right."""
    drafts, drafted, right = (grown.get(f"{engine}:{name}", 0.0) for name in (DRAFTS, DRAFTED, ACCEPTED))
    if right > drafted:
        return Accepted(f"the server's counters show {drafted:g} drafted tokens, but {right:g} accepted ones")
    if not drafts:
        return Accepted("the server's counters show no drafts")
    metrics: dict[str, float | None] = {
        "untrimmed_accept_length": 1 + right / drafts,
        "untrimmed_accept_rate": right / drafted if drafted else None,
    }
    name = f"{engine}:{BY_POSITION}/"
    places = sorted(int(found.removeprefix(name)) for found in grown if found.startswith(name))
    by_position = [int(grown[f"{name}{place}"]) for place in places]
    consistent = places == list(range(min(len(places), _MOST_POSITIONS))) and sum(by_position) == right
    acceptance = {"verifies": int(drafts), "accepted": by_position} if by_position and consistent else None
    return Accepted("the server's counters of drafts", metrics, acceptance)


def _of_llamacpp(grown: dict[str, float], timings: list[Timings], completions: Sequence[Completion]) -> Accepted:
    found = _of_counters("llamacpp", grown)
    if not timings:
        return replace(found, source="the answers have no timings, which tell how many verifies had no drafts")
    proposed, right = (sum(getattr(one, name) for one in timings) for name in ("proposed", "accepted"))
    unknown = _unknown(timings)
    if not proposed:
        return Accepted("the server's answers show no drafts", unknown)
    if right > proposed:
        return Accepted(f"the server's answers show {proposed} drafted tokens, but {right} accepted ones", unknown)
    if grown.get(f"llamacpp:{DRAFTED}") != proposed:  # not read, or of other requests, too
        found = Accepted("")
    metrics = {**found.metrics, "untrimmed_accept_rate": right / proposed}
    ended = [item.metrics for item in completions if item.is_complete]
    early = sum(item.output_tokens > 1 and not item.verify_steps for item in ended)
    if early:
        text = (
            f"{early} of {len(ended)} answers ended before their limit with chunks of several tokens, and llama.cpp "
            "also counts drafts that it accepted after the end"
        )
        return Accepted(text, metrics | unknown, found.acceptance)
    verifies = sum(item.verify_steps for item in ended)
    metrics |= {"accept_length": sum(item.emitted for item in ended) / verifies, "verify_steps": verifies}
    own = _each_verify(timings, completions)
    return Accepted("llama.cpp's timings of each request", metrics, found.acceptance, own)


def _of_vllm(grown: dict[str, float], completions: Sequence[Completion]) -> Accepted:
    found = _of_counters("vllm", grown)
    if not found.metrics:
        return found
    metrics, acceptance = dict(found.metrics), found.acceptance
    generated, first, steps = (grown.get(name) for name in (GENERATED, FIRST_TOKENS, LATER_STEPS))
    if generated is None or first is None or not steps:
        return Accepted("vLLM's counters of generated tokens and latencies are missing", metrics, acceptance)
    ours = sum(item.metrics.output_tokens for item in completions if item.is_complete)
    if abs(generated - ours) > _TOLERANCE * ours:
        text = f"the server's counters show {generated:g} generated tokens, this client {ours}: {_OF_OTHERS}"
        return Accepted(text, metrics, acceptance)
    if generated - first < steps:
        text = f"the server's counters show {steps:g} steps for {generated - first:g} tokens, though each emits one"
        return Accepted(text, metrics, acceptance)
    metrics |= {"accept_length": (generated - first) / steps, "verify_steps": steps}
    return Accepted("vLLM's counters of tokens and steps", metrics, acceptance)


def _of_requests(found: list[Drafting], completions: Sequence[Completion], grown: dict[str, float]) -> Accepted:
    """Of the verifies that vLLM or SGLang reported of each request. grown: the counters of vLLM."""
    server, ended = found[0].server, [item.metrics for item in completions if item.is_complete]
    with_drafts, right, proposed = (sum(getattr(one, n) for one in found) for n in ("verifies", "accepted", "proposed"))
    if right > proposed > 0:
        text = f"{server} reports {proposed} drafted tokens, but {right} accepted ones"
        return Accepted(text, {"accept_length": None, "verify_steps": None})
    metrics: dict[str, float | None] = {
        "untrimmed_accept_length": 1 + right / with_drafts,
        "untrimmed_accept_rate": right / proposed if proposed else None,
    }
    counts = sum_lists(list(one.accepted_histogram) for one in found)
    complete = sum(counts) == with_drafts and len(counts) > 1
    reached = [sum(counts[place:]) for place in range(1, len(counts))]
    acceptance = {"verifies": with_drafts, "accepted": reached} if complete else None
    verifies, emitted = sum(one.verify_steps for one in ended), sum(one.emitted for one in ended)
    counts_us = grown.get(GENERATED) == sum(one.output_tokens for one in ended) and LATER_STEPS in grown
    if counts_us and grown[LATER_STEPS] > verifies:
        return replace(_of_vllm(grown, completions), acceptance=acceptance)
    if unknown := sum(one.output_tokens > 1 and not one.verify_steps for one in ended):
        text = f"{server} reports no verifies of {unknown} of {len(ended)} answers, or not as many as these have tokens"
        if server == "vLLM":  # 0.33.0
            text += "; it reports none of answers that a stop string ends"
        return Accepted(text, metrics | {"accept_length": None, "verify_steps": None}, acceptance)
    if verifies > with_drafts and not counts_us and not all(one.steps for one in found):
        text = (
            "vLLM does not report verifies without drafts, and its counter of steps at /metrics is not there or has "
            "other requests; --per-request-spec-decode-metrics detailed reports the drafts of each verify"
        )
        return Accepted(text, metrics | {"accept_length": None, "verify_steps": None}, acceptance)
    if emitted < verifies:
        text = f"{server} reports {verifies} verifies for {emitted} tokens, though each emits at least one"
        return Accepted(text, metrics | {"accept_length": None}, acceptance)
    metrics |= {"accept_length": emitted / verifies, "verify_steps": verifies}
    own = _each_verify(found, completions)
    return Accepted(f"{server}'s counts of each request", metrics, acceptance, own)
