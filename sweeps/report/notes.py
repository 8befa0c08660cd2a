"""Notes below a table: plain facts, and warnings of a kind that readers can filter by.

They say what was simulated, cached, incomplete or different between configurations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from specbatch.algorithms import causes_of_low_acceptance
from specbatch.errors import counted, listed
from specbatch.records.estimates import CONFIDENCE
from specbatch.records.markdown import draft_length_lines
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.records.run_totals import least_values
from specbatch.records.steps import MIN_FULL_STEPS
from specbatch.records.sweep_plan import Point
from specbatch.records.verdicts import ONE_REPEAT
from specbatch.sweeps.report.points import SWEEP, Gain, View, gains_of, point_name, points_of
from specbatch.sweeps.workload.workloads import RANDOM

if TYPE_CHECKING:
    import pandas as pd


ERRORS_SHOWN = 3
BUSY_CLIENT = 0.6  # of a core
# Below break-even by this share, a draft length that is chosen during the run is no loss: it is what choosing costs.
CHOOSING = 0.03
CHANGED = 1.03  # by which a limit of a GPU may differ between two measurements without a note
STATES = (
    ("sm_clock_mhz", "clock", "MHz"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "C"),
    ("memory_temperature_c", "memory", "C"),
)
MEANS = (
    "Means over repeats (smallest-largest); latencies are over the requests of all repeats. A speedup is the geometric "
    'mean of the ratios of each round, with its 95% interval: it "pays" or "loses" where that interval excludes 1, '
    'else it is "undecided". Accept length counts the bonus token.'
)
BREAK_EVEN = (
    "Break-even: the accept length at which steps with speculation are as fast as those of the baseline (ratio of step "
    "times with the same number of requests, prompts left out); speculation pays above it. Speedup by steps: accept "
    f"length / break-even, with the {CONFIDENCE:.0%} interval of that ratio over the repeats."
)
RANDOM_PROMPTS = "RANDOM PROMPTS"
IMPROBABLE = 0.8  # of log(vocabulary), as a loss per token: tokens drawn at random have at least 1, text much less
GENERAL = (MEANS, BREAK_EVEN)  # notes that explain columns


@dataclass(frozen=True)
class Note:
    """A sentence below a table.

    warning   the kind of warning, such as "NO REPLAYS"; "" for a fact that needs no attention
    advice    what the user may do about it
    """

    text: str
    warning: str = ""
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.warning}: {self.text}" if self.warning else self.text
        return f"{text}; {self.advice}" if self.advice else text

    @property
    def log_text(self) -> str:
        """As the log of a command has it, the advice on a line of its own."""
        text = f"{self.warning.lower()}: {self.text}"
        return f"{text}\n  {self.advice}" if self.advice else text


def notes(
    records: list[RunRecord],
    rows: pd.DataFrame,
    missing: Sequence[Point] = (),
    view: View = SWEEP,
    keys: Sequence[str] | None = None,
) -> list[Note]:
    """What a reader must know before believing the table. missing: points without a record; keys: the metrics of the
    table; None: those of the view."""
    points, shown = points_of(records), view.keys if keys is None else keys
    found = [Note(MEANS)]
    if max(counts := {record.replicas for record in records}) > 1:
        replicas = f"{max(counts)} replicas" if len(counts) == 1 else "replicas of a configuration"
        text = f"Concurrency counts the requests on all {replicas}; a full batch is the share of one replica."
        found.append(Note(text))
    finished = [record for record in records if not record.error]
    found += _failed(records)
    for record in finished:
        found += _of_record(record)
    found += _left_out(records)
    if "step_s" in shown:
        found += _short_runs(finished)
    found += [*_limits_changed(finished), *_cached(points), *_few_requests(points, shown)]
    found += [*_shared(finished), *_simulated(records), *_tokens(finished)]
    for (concurrency, name), repeats in points.items():
        for line in draft_length_lines((record.counters for record in repeats), repeats[0].caps):
            found.append(Note(f"{name} at concurrency {concurrency}, {line}."))
    if missing:
        configurations = {record.workload["configuration"] for record in records}
        places = _missing(missing, configurations)
        text = f"{counted(len(missing), 'point')} without a record ({places}): interrupted or failed."
        found.append(Note(text, "UNFINISHED"))
    if rows.break_even.notna().any():
        found.append(Note(BREAK_EVEN))
    if view.break_even == "all":
        gains = gains_of(records, view)
        each: list[Any] = list(rows.itertuples())
        for row in each:
            point = row.concurrency, row.configuration
            found += _disagreement(point, gains[point], row.ratio)
    return found


def _missing(missing: Sequence[Point], configurations: Collection[str]) -> str:
    """How many points of which configurations."""
    counts = Counter((point.concurrency, point.configuration) for point in missing)
    alike: dict[tuple[int, int], list[str]] = {}
    for (concurrency, name), count in counts.items():
        alike.setdefault((concurrency, count), []).append(name)
    return ", ".join(
        f"{count} of {name} at concurrency {concurrency}"
        for (concurrency, count), names in alike.items()
        for name in (["each configuration"] if len(names) > 2 and {*names} >= {*configurations} else names)
    )


def _disagreement(point: tuple[Any, ...], gain: Gain | None, ratio: float) -> Iterator[Note]:
    """A warning if steps gain and the whole run does not, or the other way round."""
    if gain is None or gain.measures_step or math.isnan(ratio) or (gain.share >= 0) == (ratio >= 1):
        return
    if gain.speedup.verdict != ONE_REPEAT and not gain.is_shown:
        return
    concurrency, name = point
    text = (
        f"{name} at concurrency {concurrency}: its speedup by steps is {gain.speedup.ratio:.2f}, but that of the "
        f"whole run is {ratio:.2f}, which includes prefill, and the end of the run with fewer requests."
    )
    yield Note(text, "STEP SPEEDUP DIFFERS")


def losses_of(records: list[RunRecord], view: View = SWEEP) -> Note | None:
    """A warning about the points at which speculation loses; None without any."""
    points, gains = points_of(records), gains_of(records, view)
    places, configs = [], []
    for point, gain in gains.items():
        record = points[point][-1]
        if gain is None or not gain.loses(CHOOSING if record.chooses_draft_length else 0.0):
            continue
        places.append(f"{point_name(*point)} (accept length {gain.accept_length:.2f}, {gain.needed:.2f} needed)")
        if record.simulated_accept_length is None:
            configs.append(record.config)
    if not places:
        return None
    causes = dict.fromkeys(
        causes_of_low_acceptance(config["speculation"]["algorithm"], config["load_format"]) for config in configs
    )
    expected = f"; if you expected a higher acceptance, likely causes: {'; '.join(causes)}" if causes else ""
    advice = f"draft fewer tokens or run fewer requests at once to lower the break-even{expected}"
    return Note(f"below break-even: {'; '.join(places)}", "LOW ACCEPTANCE", advice)


def replay_notes(record: RunRecord, where: str) -> Iterator[Note]:
    """CUDA graphs that were requested and never replayed."""
    for kind, mode in record.config["graphs"].items():
        if mode == "off":
            continue
        replays = {name: graph["replays"] for name, graph in record.graphs(kind).items()} or {kind: 0}
        for name, count in replays.items():
            if not count:
                yield Note(
                    f"{where}: {name.replace('_', ' ')} graphs were requested and none was replayed.", "NO REPLAYS"
                )


def failures(record: RunRecord) -> list[tuple[str, int]]:
    """The errors of a server with their counts, the most frequent first; beyond `ERRORS_SHOWN` they are summed up."""
    found = sorted(record.counters.get("errors", {}).items(), key=lambda item: -item[1])
    rest = sum(count for _, count in found[ERRORS_SHOWN:])
    return found[:ERRORS_SHOWN] + ([("other errors", rest)] if rest else [])


def _where(record: RunRecord) -> str:
    work = record.workload
    return f"{work['configuration']} at concurrency {work['concurrency']}, repeat {work['repeat']}"


def _listed(places: list[str]) -> str:
    first, *others = places
    return f"{first}, and {counted(len(others), 'other point')}" if others else first


def _failed(records: list[RunRecord]) -> Iterator[Note]:
    """Points that failed, those of a configuration with the same error in one note."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.error:
            found.setdefault((record.workload["configuration"], record.error), []).append(_where(record))
    for (_, error), places in found.items():
        yield Note(f"{_listed(places)}: {error}", "FAILED")


def _left_out(records: list[RunRecord]) -> Iterator[Note]:
    """Points of which some repeats failed."""
    points: dict[str, list[RunRecord]] = {}
    for record in records:
        place = f"{record.workload['configuration']} at concurrency {record.workload['concurrency']}"
        points.setdefault(place, []).append(record)
    for place, repeats in points.items():
        known = sum(record.error is None for record in repeats)
        if 0 < known < len(repeats):
            yield Note(f"{place}: its numbers are of {known} of {len(repeats)} repeats; the others failed", "FAILED")


def _short_runs(records: list[RunRecord]) -> Iterator[Note]:
    """Points with too few steps at full batch, equal repeats in one note."""
    found: dict[tuple[str, int, float], list[str]] = {}
    for record in records:
        steps, work = record.metrics.get("full_batch_steps"), record.workload
        if steps is not None and record.metrics.get("step_s") is None:
            found.setdefault((work["configuration"], work["concurrency"], steps), []).append(str(work["repeat"]))
    for (name, concurrency, steps), repeats in found.items():
        where = f"{name} at concurrency {concurrency}, repeat{'s' if len(repeats) > 1 else ''} {', '.join(repeats)}"
        text = f"{where}: only {steps:.0f} full-batch steps; {MIN_FULL_STEPS} are needed"
        yield Note(text, "NOT MEASURED", "use longer answers or a larger prefill chunk")


def _limits_changed(records: list[RunRecord]) -> Iterator[Note]:
    """A warning if a limit of the GPU differed between two measurements, and by what clocks and heat explain it."""
    measured = [
        (record, when, found["limits"][when])
        for record in sorted(records, key=lambda record: record.created)
        if (found := record.conditions).get("limits")
        for when in ("before", "after")
    ]
    for key in ("read_bytes_s", "gemm_flop_s"):
        known = [(one[key], f"{when} {_where(record)}") for record, when, one in measured if one.get(key)]
        if not known or (most := max(known))[0] <= CHANGED * (least := min(known))[0]:
            continue
        metric = METRICS[key]
        values = (f"{metric.text(value)} {metric.unit} {where}" for value, where in (most, least))
        text = f"{metric.title} of the GPU: {' and '.join(values)}, {most[0] / least[0] - 1:.1%} apart"
        yield Note(f"{text}; {_heat(records)}", "LIMITS CHANGED", "compare points of the same round only")


def _heat(records: list[RunRecord]) -> str:
    """What samples during all points say about the cause."""
    tables = [gpu for record in records for gpu in record.conditions.get("gpus", {}).values()]
    parts = []
    for name, title, unit in STATES:
        if values := [value for table in tables for value in table.get(name, ())]:
            parts.append(f"{title} {min(values):.0f} to {max(values):.0f} {unit}")
    shares: dict[str, float] = {}
    for table in tables:
        for reason, share in table["throttle"].items():
            shares[reason] = max(shares.get(reason, 0.0), share)
    parts += [f"{reason} in up to {share:.0%} of the samples of a point" for reason, share in shares.items()]
    return ", ".join(parts) if parts else "clocks and temperatures are unknown"


def _few_requests(points: Mapping[tuple[Any, ...], list[RunRecord]], shown: Collection[str]) -> Iterator[Note]:
    """Percentiles that some points have too few requests for."""
    tails = [metric for key in shown if (metric := METRICS[key]).percentile is not None]
    for percent, of in groupby(tails, key=lambda metric: metric.percentile):
        assert percent is not None
        missing = [
            metric.title
            for metric in of
            if any(metric.over_repeats(repeats) is None for repeats in points.values() if not repeats[0].error)
        ]
        if missing:
            names, least = " and ".join(missing), least_values(percent)
            yield Note(f"{names}: not shown for fewer than {least} requests, all repeats together.")


def _of_record(record: RunRecord) -> Iterator[Note]:
    work, where = record.workload, _where(record)
    if record.metrics["requests"] != work.get("requests", work["prompts"]):
        finished = f"{record.metrics['requests']} of {work.get('requests', work['prompts'])} prompts finished"
        yield Note(f"{where}: {finished}.", "INCOMPLETE")
    if retractions := record.metrics.get("retractions"):
        yield Note(f"{where}: {counted(int(retractions), 'request')} waited for KV pages.", "RETRACTED")
    if record.drafts and _drafted_nothing(record):
        yield Note(f"{where}: nothing was drafted, so this row does not show speculation.", "NO DRAFTS")
    yield from replay_notes(record, where)
    for error, count in failures(record):
        yield Note(f"{where}: {counted(count, 'request')}: {error}.", "FAILED")


def _cached(points: Mapping[tuple[Any, ...], list[RunRecord]]) -> Iterator[Note]:
    """Shares of input tokens from the prefix cache, from the smallest to the largest at each concurrency."""
    found: dict[int, dict[str, list[RunRecord]]] = {}
    for (concurrency, name), repeats in points.items():
        known = [one for one in repeats if one.metrics.get("cached_tokens") and one.metrics.get("input_tokens")]
        if known:
            found.setdefault(concurrency, {})[name] = known
    parts = []
    for concurrency, own in found.items():
        records = [record for repeats in own.values() for record in repeats]
        shares = sorted((one.metrics["cached_tokens"] or 0) / (one.metrics["input_tokens"] or 1) for one in records)
        span = " to ".join(dict.fromkeys(f"{share:.1%}" for share in (shares[0], shares[-1])))
        every = [name for number, name in points if number == concurrency]
        of = "" if len(own) == len(every) else f" of {_which(own, every)}"
        states = Counter[str]()
        for record in records:
            states.update(record.counters.get("states") or {})
        kept = "{kept} states of prefixes kept, {loaded} loaded, {evicted} evicted"
        parts.append(f"{span}{of} at concurrency {concurrency}{f' ({kept.format(**states)})' if states else ''}")
    if parts:
        yield Note(f"CACHED: input tokens that came from the prefix cache: {'; '.join(parts)}.")


def _which(names: Collection[str], every: Collection[str]) -> str:
    """The names; shorter where they are most of `every`."""
    others = [name for name in every if name not in names]
    if len(names) > 2 and 2 * len(others) < len(names):
        return f"all but {listed(others)}" if others else "all"
    return listed(names)


def _drafted_nothing(record: RunRecord) -> bool:
    if "server" in record.config:  # it may not say
        return "show no drafts" in record.counters.get("no_accept_length", "")
    return not record.metrics.get("drafted_tokens")


def _shared(records: list[RunRecord]) -> Iterator[Note]:
    """Notes that most points have in common, each once with the number of its points."""
    found: dict[Note, list[str]] = {}
    for record in records:
        for note in _remarks(record):
            found.setdefault(note, []).append(_where(record))
    for note, places in found.items():
        yield Note(f"{note.text} ({_listed(places)}).", note.warning)


def _remarks(record: RunRecord) -> Iterator[Note]:
    if (distinct := record.workload.get("distinct_prompts")) and distinct < record.workload["prompts"]:
        text = f"only {counted(distinct, 'different prompt')}; a prefix cache answers the others faster"
        yield Note(text, "REPEATED")
    for line in record.workload.get("remarks", ()):
        yield Note(line)
    if record.drafts and record.simulated_acceptance is None and record.workload["dataset"] in RANDOM:
        yield Note("Random prompts: their answers repeat themselves, so acceptance is higher than on real text")
    for line in record.workload.get("warnings", ()):
        yield Note(line, "CHECK OUTPUTS")
    loss, most = (record.workload.get(name) for name in ("prompt_loss", "random_prompt_loss"))
    if loss is not None and most and loss >= IMPROBABLE * most:
        text = (
            f"the prompts look like random ids: the model's loss on them is {loss:.1f} nats per token, where tokens "
            f"drawn at random have at least {most:.1f} on average; acceptance after them is not that of text"
        )
        yield Note(text, RANDOM_PROMPTS)
    if (reason := record.counters.get("no_accept_length")) and (record.drafts or not _is_known(record)):
        yield Note(f"No accept length: {reason}")
    if "server" in record.config:
        yield from _of_server(record)


def _is_known(record: RunRecord) -> bool:
    """Whether the user named the speculation of the server."""
    return bool(record.config.get("speculation_known"))


def _of_server(record: RunRecord) -> Iterator[Note]:
    if _is_known(record) and not record.drafts and record.counters.get("server_acceptance"):
        name = record.workload["configuration"]
        yield Note(f"the server of {name} drafts, though its configuration names no algorithm", "SPECULATES")
    cache = str(record.config["prefix_cache"])
    if "NOT EMPTIED" in cache:
        yield Note(f"the server may have answered from earlier rounds ({cache})", "PREFIX CACHE")
    if record.counters.get("client_cpu_share", 0.0) > BUSY_CLIENT:
        text = f"this client used more than {BUSY_CLIENT:.0%} of a CPU core, which can hold up the server's times"
        yield Note(text, "BUSY CLIENT", "start the server with a larger --stream-interval")


def _simulated(records: list[RunRecord]) -> Iterator[Note]:
    models = {record.workload["configuration"]: model for record in records if (model := record.simulated_acceptance)}
    for name, model in models.items():
        text = (
            f"{name}: acceptance was drawn at random ({model}); the text is not the model's. Verifies with fewer "
            "drafts (ngram without a match, --draft-tokens auto) accept fewer, so the mean reached may be lower."
        )
        yield Note(text, "SIMULATED")


def _tokens(records: list[RunRecord]) -> Iterator[Note]:
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
    return ", ".join([*counts, *([_which(some, every)] if some else [])])


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
