"""Registry entries of the numbers that follow from the requests of a run: counts, throughput, acceptance, latency."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbatch.records.metric import Distribution, Metric
from specbatch.records.run_totals import Requests

DISTRIBUTIONS = {
    item.name: item
    for item in (
        Distribution(
            "ttft",
            "TTFT",
            "Time to first token: from the submission of a request until its first token is on the host. With a "
            "request rate, a request counts as submitted when it arrives.",
            "first token - submission",
            (50, 90, 95, 99),
            sweep=dict.fromkeys(("mean", "median", "p99"), 4),
            compare=dict.fromkeys(("mean", "median", "p99"), 3),
        ),
        Distribution(
            "queue",
            "queue time",
            "The part of TTFT that a request waits before it is admitted.",
            "admission - submission",
            (50, 99),
            sweep=dict.fromkeys(("mean",), 4),
        ),
        Distribution(
            "tpot",
            "TPOT",
            "Time per output token of a request, its first token left out.",
            "(last token - first token) / (output tokens - 1)",
            (50, 90, 95, 99),
            decimals=2,
            sweep=dict.fromkeys(("mean", "median", "p99"), 4),
            compare=dict.fromkeys(("mean", "median", "p99"), 3),
        ),
        Distribution(
            "itl",
            "ITL",
            "Inter-token latency: the time between two arrivals of tokens, divided among the tokens of the second "
            "arrival.",
            "gap between arrivals / tokens in the arrival, counted once per token",
            (50, 90, 95, 99),
            decimals=2,
            per_request=False,
        ),
        Distribution(
            "e2e",
            "E2E latency",
            "From the submission of a request to its last token.",
            "last token - submission",
            (50, 90, 95, 99),
            compare=dict.fromkeys(("mean", "p99"), 3),
        ),
    )
}


def _throughput(key: str, title: str, what: str, amount: Callable[[Requests], int], **places: Any) -> Metric:
    return Metric(
        key,
        title,
        "req/s" if what == "Requests" else "tok/s",
        f"{what} per second of the measured window, which runs from the first submission to the last token.",
        f"{what.lower()} / duration",
        better="higher",
        of_requests=lambda run: run.rate(amount(run)),
        **places,
    )


def _count(key: str, title: str, definition: str, name: str, unit: str = "tokens") -> Metric:
    """name: of a count in `RequestMetrics`."""
    return Metric(
        key,
        title,
        unit,
        definition,
        "sum over requests",
        decimals=0,
        is_time=False,
        of_requests=lambda run: run.sums[name],
    )


def _ratio(key: str, title: str, definition: str, formula: str, names: tuple[str, str], **more: Any) -> Metric:
    """names: of two counts in `RequestMetrics`, whose sums divide to it."""
    found: dict[str, Any] = {"of_requests": lambda run: run.ratio(*names)}
    return Metric(key, title, "", definition, formula, decimals=3, per_request=names, is_time=False, **found | more)


def _if_reasons(run: Requests, value: float | None) -> float | None:
    return value if run.sums["reasoning_tokens"] else None


def _parts(part: str, where: str) -> tuple[Metric, Metric]:
    """Accept length and rate of the reasoning or of the answer. where: which verifies count."""
    length = (f"{part}_emitted", f"{part}_verifies")
    rate = (f"{part}_accepted", f"{part}_drafted")
    return (
        _ratio(
            f"{part}_accept_length",
            f"{part} accept length",
            f"Tokens emitted per verify {where}, bonus token included. Of models that reason, and of servers that tell "
            "each verify.",
            "tokens emitted by these verifies / these verifies",
            length,
            better="higher",
            of_requests=lambda run: _if_reasons(run, run.ratio(*length)),
            compare=7,
        ),
        _ratio(
            f"{part}_accept_rate",
            f"{part} accept rate",
            f"Share of the tokens drafted by verifies {where} that were accepted.",
            "accepted drafts of these verifies / their drafts",
            rate,
            better="higher",
            counts_only="drafts",
            of_requests=lambda run: _if_reasons(run, run.ratio(*rate)),
        ),
    )


def _first_draft_rate(run: Requests) -> float | None:
    drafted, right = run.totals.acceptance.first
    return right / drafted if drafted else None


OF_REQUESTS = (
    Metric(
        "requests",
        "requests",
        "",
        "Requests that finished; aborted ones count in no metric.",
        "count",
        decimals=0,
        is_time=False,
        of_requests=lambda run: run.totals.requests,
    ),
    Metric(
        "duration_s",
        "duration",
        "s",
        "Length of the measured window.",
        "last token - first submission",
        decimals=2,
        of_requests=lambda run: run.duration_s,
    ),
    _count("input_tokens", "input tokens", "Prompt tokens of the finished requests.", "prompt_tokens"),
    _count("cached_tokens", "cached tokens", "Prompt tokens that came from the prefix cache.", "cached_tokens"),
    _count("output_tokens", "output tokens", "Tokens generated by the finished requests.", "output_tokens"),
    Metric(
        "retokenized_tokens",
        "retokenized tokens",
        "tokens",
        "`sweep` and `bench`: tokens of the texts of the answers when they are encoded again. A model can write other "
        "tokens of the same text, so they are more or fewer than the output tokens.",
        "sum over requests",
        decimals=0,
        is_time=False,
    ),
    Metric(
        "scored_tokens",
        "scored tokens",
        "tokens",
        "Continuation tokens whose likelihood was computed (scoring tasks).",
        "sum over requests",
        decimals=0,
        is_time=False,
    ),
    _throughput("request_throughput", "requests/s", "Requests", lambda run: run.totals.requests),
    _throughput("input_throughput", "input tok/s", "Input tokens", lambda run: run.sums["prompt_tokens"], sweep=2),
    _throughput(
        "output_throughput",
        "output tok/s",
        "Output tokens",
        lambda run: run.sums["output_tokens"],
        sweep=1,
        compare=1,
    ),
    _throughput(
        "total_throughput",
        "total tok/s",
        "Input and output tokens",
        lambda run: run.sums["prompt_tokens"] + run.sums["output_tokens"],
    ),
    Metric(
        "per_user_throughput",
        "per-user tok/s",
        "tok/s",
        "Output throughput divided among the concurrent requests.",
        "output throughput / concurrency",
        better="higher",
        of_requests=lambda run: run.per_user(run.sums["output_tokens"]),
        sweep=6,
    ),
    Metric(
        "goodput",
        "goodput",
        "req/s",
        "Requests per second that met every objective of `--slo`. Failed requests met none, and an answer of one token "
        "has no TPOT to exceed.",
        "requests that met every objective / duration",
        better="higher",
        decimals=2,
        sweep=3,
        compare=6,
    ),
    Metric(
        "slo_share",
        "met the SLO",
        "%",
        "Share of all requests, failed ones included, that met every objective of `--slo`.",
        "requests that met every objective / (finished + failed requests)",
        better="higher",
        sweep=3,
        compare=6,
    ),
    Metric(
        "peak_output_throughput",
        "peak output tok/s",
        "tok/s",
        "Output tokens per second in the busiest second, counted from the first submission. What follows the last "
        "whole second counts with it. Not measured in less than 2 s.",
        "max over seconds",
        better="higher",
    ),
    Metric(
        "peak_concurrency",
        "peak concurrent requests",
        "",
        "The most requests that were unfinished at the same time, those that waited for a slot included.",
        "max over time",
        decimals=0,
    ),
    _ratio(
        "accept_length",
        "accept length",
        "Tokens emitted per verify, bonus token included. The first token (made by prefill), tokens trimmed after a "
        "stop and verifies from which no token was kept are not counted.",
        "tokens emitted by verifies / verifies",
        ("emitted", "verify_steps"),
        better="higher",
        sweep=5,
        compare=2,
    ),
    _ratio(
        "accept_rate",
        "accept rate",
        "Share of drafted tokens that were accepted. Of a tree all nodes count as drafted. Drafts after a stop or the "
        "length limit are excluded, because their correctness is unknown.",
        "accepted drafts / drafted tokens",
        ("accepted", "drafted"),
        better="higher",
        counts_only="drafts",
        sweep=5,
        compare=2,
    ),
    Metric(
        "untrimmed_accept_length",
        "untrimmed accept length",
        "",
        "Of a server of another engine: tokens per verify that had drafts, before tokens after a stop or the limit are "
        "trimmed. Verifies without drafts are left out. This is what vLLM calls mean acceptance length; it is at least "
        "as high as the accept length.",
        "1 + accepted drafts / verifies with drafts",
        better="higher",
        decimals=3,
        is_time=False,
        counts_only="drafted",
        sweep=7,
        compare=7,
    ),
    Metric(
        "untrimmed_accept_rate",
        "untrimmed accept rate",
        "",
        "Of a server of another engine: share of drafted tokens that were accepted, drafts after a stop or the limit "
        "included.",
        "accepted drafts / drafted tokens",
        better="higher",
        decimals=3,
        is_time=False,
        counts_only="drafts",
        sweep=7,
        compare=7,
    ),
    Metric(
        "first_draft_accept_rate",
        "first-draft accept rate",
        "",
        "Share of the verifies that drafted anything in which the first draft was accepted.",
        "verifies that accepted draft 1 / verifies that drafted",
        better="higher",
        decimals=3,
        is_time=False,
        counts_only="drafted",
        of_requests=_first_draft_rate,
    ),
    _ratio(
        "rows_per_verify",
        "rows per verify",
        "Rows that a verify of a request had on average with --verify-budget: its newest token, and the drafts that "
        "were verified. Only these drafts count in the accept rate.",
        "rows of verifies / verifies",
        ("budget_rows", "verify_steps"),
        of_requests=lambda run: run.ratio("budget_rows", "verify_steps") if run.sums["budget_rows"] else None,
        sweep=7,
    ),
    Metric(
        "corpus_share",
        "drafts of the corpus",
        "%",
        "Share of the drafted tokens that came from other answers (--corpus). The algorithm drafted the others.",
        "tokens drafted from the corpus / drafted tokens",
        per_request=("corpus_drafted", "drafted"),
        is_time=False,
        of_requests=lambda run: run.ratio("corpus_drafted", "drafted") if run.sums["corpus_verifies"] else None,
        sweep=7,
    ),
    _ratio(
        "corpus_accept_length",
        "corpus accept length",
        "Tokens emitted per verify whose drafts came from the corpus, bonus token included.",
        "tokens emitted by verifies of corpus drafts / verifies of corpus drafts",
        ("corpus_emitted", "corpus_verifies"),
        better="higher",
        counts_only="drafted",
        sweep=7,
        compare=7,
    ),
    _ratio(
        "corpus_accept_rate",
        "corpus accept rate",
        "Share of the tokens drafted from the corpus that were accepted.",
        "accepted drafts of the corpus / tokens drafted from the corpus",
        ("corpus_accepted", "corpus_drafted"),
        better="higher",
        counts_only="drafts",
    ),
    Metric(
        "mean_reasoning_tokens",
        "reasoning tokens",
        "tokens",
        "Tokens of the reasoning on average, with its marks. Its first end ends it.",
        "sum of reasoning tokens / requests",
        per_request=("reasoning_tokens", None),
        is_time=False,
        of_requests=lambda run: _if_reasons(run, run.mean("reasoning_tokens")),
    ),
    Metric(
        "mean_answer_tokens",
        "answer tokens",
        "tokens",
        "Tokens after the reasoning on average, of models that reason.",
        "(output tokens - reasoning tokens) / requests",
        is_time=False,
        of_requests=lambda run: _if_reasons(run, run.mean("output_tokens") - run.mean("reasoning_tokens")),
    ),
    *_parts("reasoning", "that began in the reasoning"),
    *_parts("answer", "that began after the reasoning, or of an answer without it"),
    _count("verify_steps", "verifies", "Verifies from which at least one token was kept.", "verify_steps", ""),
    _count("drafted_tokens", "drafted tokens", "Drafts that count in the accept rate.", "drafted"),
    _count("accepted_tokens", "accepted tokens", "Drafts that were accepted.", "accepted"),
    _count(
        "retractions",
        "retractions",
        "Times that a request gave its KV pages back and was recomputed.",
        "retractions",
        "",
    ),
    *(metric for item in DISTRIBUTIONS.values() for metric in item.metrics),
)
