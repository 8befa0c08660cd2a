"""The workload of a record in words: lines of the heading above tables, and of the log."""

from __future__ import annotations

from collections import Counter
from typing import Any

from specbatch.core.sampling_params import sampling_text
from specbatch.records.objectives import objectives_text


def lines_of(work: dict[str, Any]) -> dict[str, str]:
    """Heading lines that describe a record's workload."""
    inputs = work.get("input_range") or work["input_len"]
    text = f"{_text(inputs)} input tokens each" if inputs else "text"
    if shared := work.get("shared"):
        length = _text(shared["shared_len"])
        text += f" ({length} of them shared by the {shared['group_prompts']} of each of {shared['groups']} groups)"
    if work.get("rendered"):
        thinking = work.get("thinking")
        switch = "" if thinking is None else f", thinking {'on' if thinking else 'off'}"
        text += f" by the chat template{switch}"
    if scramble := work.get("scramble"):
        text += f", {'token ids shuffled' if scramble == 'shuffled' else 'random token ids in place of the text'}"
    if turns := work.get("turns"):
        whose = "as recorded" if work.get("replay") else "with the configuration's own answers"
        text += f", conversations of up to {turns} turns {whose}"
    length = _text(work.get("output_range") or work["output_len"] or "as long as the answers of its rows")
    output = f"{'exactly' if work['ignore_eos'] else 'at most'} {length}"
    of = f" ({category})" if (category := work.get("category")) else ""
    sampled = f"{sampling_text(work.get('sampling'))}, seed {work['seed']}"
    if own := work.get("own_sampling"):
        sampled += f", {own['rows']} of {own['of']} rows with their own {', '.join(own['names'])}"
    return {
        "workload": f"{work['dataset']}{of}, {text}, output {output}, {sampled}",
        "arrivals": _arrivals(work),
        **({"texts": sources_text(sources)} if (sources := work.get("sources")) else {}),
        **({"objectives": objectives_text(slo)} if (slo := work.get("slo")) else {}),
    }


def sources_text(sources: list[str]) -> str:
    """How many prompts end in files of which folder: "12 prompts, by what they end in: asyncio (3), email, ..."."""
    counts = Counter(source.partition("/")[0] if "/" in source else source.partition(" ")[0] for source in sources)
    named = ", ".join(name if number == 1 else f"{name} ({number})" for name, number in counts.most_common())
    return f"{len(sources)} prompts, by what they end in: {named}"


def _arrivals(work: dict[str, Any]) -> str:
    rate, burst = work.get("request_rate"), work.get("burst", 1)
    counted = "times are measured from there"
    most = "no cap on the requests in flight" if work.get("uncapped") else "at most as many as the concurrency run"
    if work.get("sequential"):
        return "one request after the other, each alone on an idle engine"
    if burst == 0:
        return f"all prompts of a point at once: {counted}, and {most}"
    if rate is None:
        return "closed loop: as many requests as the concurrency are kept unfinished"
    together = f", {burst} together" if burst > 1 else ""
    return (
        f"{rate:g} requests per second at random (Poisson{together}): {counted}, throughput follows the rate, and "
        f"{most}"
    )


def _text(length: int | str | list[int] | tuple[int, int]) -> str:
    return str(length) if isinstance(length, int | str) else f"{length[0]} to {length[1]}"
