"""The verifies of one answer of a server, from what the server reports of it: three forms, one definition.

* vLLM, started with `--per-request-spec-decode-metrics summary` or `detailed`: `metrics.speculative_decoding` in the
  last chunk. It counts verifies with drafts; `detailed` lists drafted and accepted tokens of each. A verify without
  drafts, of which it does not tell, emits one token, so the number of tokens shows how many there were. (One right
  before tokens that were trimmed cannot be told from them; the server's counter of steps can.)
* SGLang, asked with `return_spec_tokens_details`: `sglext.spec_tokens_details` in a chunk of its own, made from the
  request's `meta_info`. Every step verifies drafts.
* llama.cpp, asked with `timings_per_token`: `timings` in each chunk, with the drafts so far. Where they grow a verify
  with drafts begins, and a token beyond those that it accepted is of a verify without drafts.

All count drafts that were accepted after the end of the answer (a stop, or in vLLM and SGLang the limit). The records
do not: `specbatch.core.acceptance`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specbatch.core.acceptance import Acceptance
from specbatch.core.completion import RequestMetrics
from specbatch.servers.client import Failed, one_line

MOST_DRAFTS = 1_024  # of a verify that are read


class Step(NamedTuple):
    """The drafts of one verify, before tokens after the end are trimmed."""

    drafted: int
    accepted: int


class Progress(NamedTuple):
    """What llama.cpp has counted of an answer up to a chunk."""

    tokens: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Drafting:
    """The verifies of an answer that had drafts, as vLLM or SGLang counts them: before tokens after the end are
    trimmed.

    server              "vLLM" or "SGLang"
    accepted_histogram  verifies that accepted 0, 1, 2, ... drafts, to the last number that there is
    steps               of each verify, in order; empty if it does not tell
    """

    server: str
    verifies: int
    accepted: int
    proposed: int
    accepted_histogram: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    @property
    def counts(self) -> tuple[int, ...]:
        """`accepted_histogram` up to the number of drafts, if all verifies had the same; else empty. SGLang's ends with
        the most drafts that were accepted."""
        found, each = self.accepted_histogram, self.proposed // max(self.verifies, 1)
        if sum(found) != self.verifies or self.proposed != self.verifies * each or len(found) > each + 1:
            return ()
        return (*found, *[0] * (each + 1 - len(found)))


@dataclass(frozen=True)
class Timings:
    """The drafts of an answer, as llama.cpp counts them: before tokens after a stop are trimmed.

    steps  all verifies, in order, those without drafts included; empty if the chunks do not show them
    """

    proposed: int
    accepted: int
    steps: tuple[Step, ...] = ()


def add_verifies(
    metrics: RequestMetrics, drafting: Drafting | Timings | None, *, max_tokens: int, ended_early: bool
) -> None:
    """Count the verifies of an answer in its metrics, which have the numbers of its tokens; nothing where their number
    is not known. ended_early: before max_tokens."""
    emitted = metrics.output_tokens - 1
    if drafting is None or emitted < 1:
        return
    steps, silent = drafting.steps, 0
    if isinstance(drafting, Drafting):
        verifies = drafting.verifies
        if drafting.server == "vLLM":
            silent = max(0, emitted - verifies - drafting.accepted)
            verifies += silent
    else:
        # Each verify emits one token and the drafts that it accepted, and drafts are cut to fit into the limit.
        known = bool(steps) or not (drafting.accepted and ended_early)
        verifies = len(steps) or (emitted - drafting.accepted if known else 0)
    trimmed = silent + sum(1 + step.accepted for step in steps) - emitted
    if steps and not 0 <= trimmed <= steps[-1].accepted:  # counts of something else
        verifies = 0
    if verifies < 1:
        return
    metrics.verify_steps, metrics.emitted = verifies, emitted
    metrics.accept_length = emitted / verifies
    if steps:
        _count(metrics, steps, silent, trimmed, max_tokens)
    elif isinstance(drafting, Timings):
        metrics.drafted, metrics.accepted = drafting.proposed, drafting.accepted
    else:
        metrics.untrimmed_histogram = list(drafting.counts)


def _count(metrics: RequestMetrics, steps: Sequence[Step], silent: int, trimmed: int, max_tokens: int) -> None:
    """Count each verify. silent: verifies without drafts whose places among the others are not known, so that lengths
    of contexts are not."""
    found, before = Acceptance(), 1 + silent  # tokens of the answer before a verify
    metrics.emitted_histogram = [0] * (2 + max(step.drafted for step in steps))
    for place, (drafted, accepted) in enumerate(steps):
        kept = 1 + accepted - (trimmed if place == len(steps) - 1 else 0)
        room = min(max_tokens - before, drafted)
        known, right = found.count(
            context=metrics.prompt_tokens + before, room=room, kept=kept, drafted=drafted, accepted=accepted
        )
        metrics.drafted += known
        metrics.accepted += right
        metrics.emitted_histogram[kept] += 1
        if not silent:
            metrics.count_part(before < metrics.reasoning_tokens, 1, kept, known, right)
        before += kept
    if silent:
        found.count(context=1, room=0, kept=1, drafted=0, accepted=0, times=silent)
        metrics.emitted_histogram[1] += silent
        found.verifies, found.emitted = [], []
    metrics.acceptance = found


def of_vllm(metrics: Any) -> Drafting | None:
    """Of the `metrics` of a chunk; None without those of speculation. Raises Failed."""
    found = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(found, dict):
        return None
    names = ("num_spec_steps", "num_accepted_draft_tokens", "num_draft_tokens")
    verifies, accepted, proposed = (count_of(found, name, "metrics") or 0 for name in names)
    histogram = _counts(found, "acceptance_histogram", "metrics")[:MOST_DRAFTS]
    drafted, right = (_counts(found, f"per_step_{name}", "metrics") for name in ("drafted", "accepted"))
    steps = tuple(Step(*pair) for pair in zip(drafted, right, strict=False))
    fits = (
        len(drafted) == len(right) == verifies
        and sum(right) == accepted
        and all(a <= d <= MOST_DRAFTS for d, a in steps)
    )
    return Drafting("vLLM", verifies, accepted, proposed, histogram, steps if fits else ())


def of_sglang(extension: Any) -> Drafting | None:
    """Of the `sglext` of a chunk; None without verifies. Raises Failed."""
    details = extension.get("spec_tokens_details") if isinstance(extension, dict) else None
    if not isinstance(details, dict):
        return None
    names = ("spec_verify_ct", "spec_num_correct_drafts", "spec_num_proposed_drafts")
    verifies, accepted, proposed = (count_of(details, name, "sglext") or 0 for name in names)
    histogram = _counts(details, "spec_correct_drafts_histogram", "sglext")[:MOST_DRAFTS]
    return Drafting("SGLang", verifies, accepted, proposed, histogram) if verifies else None


def progress_of(timings: Any) -> Progress | None:
    """Of the `timings` of a chunk; None without a number of tokens. Raises Failed."""
    if not isinstance(timings, dict) or "predicted_n" not in timings:
        return None
    names = ("predicted_n", "draft_n", "draft_n_accepted")  # the last two only where something was drafted
    return Progress(*(count_of(timings, name, "timings") or 0 for name in names))


def of_llamacpp(chunks: Sequence[Progress]) -> Timings | None:
    """Of the timings of all chunks; None without any."""
    return Timings(chunks[-1].drafted, chunks[-1].accepted, _steps_of(chunks)) if chunks else None


def _steps_of(chunks: Iterable[Progress]) -> tuple[Step, ...]:
    """The verifies that the chunks show; none where one of these has tokens of two verifies, such as those of a
    character that takes several."""
    steps: list[Step] = []
    seen, owed = None, 0  # owed: tokens of the last verify that have not come
    for chunk in chunks:
        if seen is None:
            seen = chunk
            if chunk != (1, 0, 0):
                return ()
            continue
        tokens, drafted, accepted = (now - then for now, then in zip(chunk, seen, strict=True))
        seen = chunk
        if tokens < 0:
            return ()
        tokens, owed = tokens - min(owed, tokens), owed - min(owed, tokens)
        if drafted:
            if owed or tokens != 1 or not 0 <= accepted <= drafted <= MOST_DRAFTS:
                return ()
            steps.append(Step(drafted, accepted))
            owed = accepted
        elif accepted:
            return ()
        else:
            steps += [Step(0, 0)] * tokens
    return tuple(steps)


def count_of(table: dict[str, Any], name: str, of: str = "usage") -> int | None:
    """A count of the server, None without one. Raises Failed unless it is a whole number of at least 0."""
    value = table.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise Failed(f"{of} has {name}={one_line(repr(value), 40)}, which is not a count")
    return value


def _counts(table: dict[str, Any], name: str, of: str) -> tuple[int, ...]:
    """A list of counts, empty without one. Raises Failed."""
    found = table.get(name) or []
    if not isinstance(found, list):
        raise Failed(f"{of} has {name} that is not a list")
    return tuple(count_of({"an item": count}, "an item", of) or 0 for count in found)
