"""A note about whether all configurations generated the same answers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from specbatch.errors import listed
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.report.note import Note, which


def tokens_differ(records: list[RunRecord]) -> Iterator[Note]:
    """Whether all configurations generated the same answers, and if not, which not. Simulated acceptance is left out,
    and servers with random weights, which are their own."""
    rounds: dict[tuple[int, int], dict[str, RunRecord]] = {}
    for record in records:
        work = record.workload
        has_other_weights = "server" in record.config and record.config.get("load_format") == "dummy"
        if record.simulated_accept_length is None and not has_other_weights:
            rounds.setdefault((work["concurrency"], work["repeat"]), {})[work["configuration"]] = record
    differing: dict[int, dict[str, str]] = {}  # by concurrency and configuration, in the first round that shows it
    every: dict[int, dict[str, None]] = {}  # the others at each concurrency
    for (concurrency, _), ours in rounds.items():
        base, *others = ours.values()
        for record in others:
            name = record.workload["configuration"]
            every.setdefault(concurrency, {})[name] = None
            if (text := _difference(base, record)) is not None:
                differing.setdefault(concurrency, {}).setdefault(name, text)
    if differing and any(record.workload.get("sampling") for record in records):
        text = "Configurations generated different tokens from the same seeds, with the same distribution"
        yield Note(f"{text}: drafts of a model or head that are sampled, and rounding, change them.")
    elif differing:
        first = next(iter(next(iter(rounds.values()))))
        sizes: dict[str, list[int]] = {}  # concurrencies at which the same configurations differ
        for concurrency, found in differing.items():
            sizes.setdefault(_differing(found, every[concurrency]), []).append(concurrency)
        places = "; ".join(f"at concurrency {listed(numbers)} {which}" for which, numbers in sizes.items())
        text = f"configurations generated other answers than {first} to the same greedy prompts: {places}"
        yield Note(f"{text} (expected only below FP32, and of other engines).", "TOKENS DIFFER")
    elif any(len(row) > 1 for row in rounds.values()):
        yield Note("All configurations produced the same output tokens at every point.")


def _differing(found: Mapping[str, str], every: Collection[str]) -> str:
    """The configurations with their counts, where those are known."""
    some = [name for name, text in found.items() if not text]
    counts = [f"{name} ({text})" for name, text in found.items() if text]
    return ", ".join([*counts, *([which(some, every)] if some else [])])


def _difference(base: RunRecord, other: RunRecord) -> str | None:
    """How many answers of `other` are not those of `base`, "" if that is unknown; None if all are the same. Tokens are
    compared, or texts where one of them is a server, which reports no tokens."""
    kind = "text_digest" if "server" in base.config or "server" in other.config else "token_digest"
    rows = [[row for row in record.requests if kind in row] for record in (base, other)]
    before, after = ({row["index"]: row[kind] for row in own} for own in rows)
    both = before.keys() & after.keys()
    if both and len(after) == len(rows[1]):
        count = sum(before[index] != after[index] for index in both)
        return f"{count} of {len(both)}" if count else None
    return None if base.workload["output_sha256"] == other.workload["output_sha256"] else ""
