"""Notes about single points: what failed, was too short, changed meanwhile, or was simulated or cached."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specbatch.errors import counted, listed
from specbatch.records.metrics import METRICS
from specbatch.records.run_record import RunRecord
from specbatch.records.steps import MIN_FULL_STEPS
from specbatch.sweeps.report.note import Note, place_of, places_in_short
from specbatch.sweeps.workload.settings import RANDOM

ERRORS_SHOWN = 3
RANDOM_PROMPTS = "RANDOM PROMPTS"
IMPROBABLE = 0.8  # of log(vocabulary), as a loss per token: tokens drawn at random have at least 1, text much less
BUSY_CLIENT = 0.6  # of a core
OTHER_MACHINE = "OTHER MACHINE"
GPU, CPU = ("gpu", "gpu_id"), ("cpu", "cores")  # of a record's hardware: what tells one machine from another
CHANGED = 1.03  # by which a limit of a GPU may differ between two measurements without a note
STATES = (
    ("sm_clock_mhz", "clock", "MHz"),
    ("power_w", "power", "W"),
    ("temperature_c", "temperature", "C"),
    ("memory_temperature_c", "memory", "C"),
)


def unused_graphs(record: RunRecord) -> Iterator[str]:
    """CUDA graphs that were requested and never replayed."""
    for kind, mode in record.config["graphs"].items():
        if mode == "off":
            continue
        replays = {name: graph["replays"] for name, graph in record.graphs(kind).items()} or {kind: 0}
        yield from (name.replace("_", " ") for name, count in replays.items() if not count)


def replay_note(graphs: str, where: str) -> Note:
    return Note(f"{where}: {graphs} graphs were requested and none was replayed.", "NO REPLAYS")


def no_replays(records: list[RunRecord]) -> Iterator[Note]:
    """Graphs that were never replayed, those of a configuration in one note."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for graphs in unused_graphs(record):
            found.setdefault((record.workload["configuration"], graphs), []).append(place_of(record))
    for (_, graphs), places in found.items():
        yield replay_note(graphs, places_in_short(places))


def failures(record: RunRecord) -> list[tuple[str, int]]:
    """The errors of a server with their counts, the most frequent first; beyond `ERRORS_SHOWN` they are summed up."""
    found = sorted(record.counters.get("errors", {}).items(), key=lambda item: -item[1])
    rest = sum(count for _, count in found[ERRORS_SHOWN:])
    return found[:ERRORS_SHOWN] + ([("other errors", rest)] if rest else [])


def failed(records: list[RunRecord]) -> Iterator[Note]:
    """Points that failed, those of a configuration with the same error in one note."""
    found: dict[tuple[str, str], list[str]] = {}
    for record in records:
        if record.error:
            found.setdefault((record.workload["configuration"], record.error), []).append(place_of(record))
    for (_, error), places in found.items():
        yield Note(f"{places_in_short(places)}: {error}", "FAILED")


def left_out(records: list[RunRecord]) -> Iterator[Note]:
    """Points of which some repeats failed."""
    points: dict[str, list[RunRecord]] = {}
    for record in records:
        place = f"{record.workload['configuration']} at concurrency {record.workload['concurrency']}"
        points.setdefault(place, []).append(record)
    for place, repeats in points.items():
        known = sum(record.error is None for record in repeats)
        if 0 < known < len(repeats):
            yield Note(f"{place}: its numbers are of {known} of {len(repeats)} repeats; the others failed", "FAILED")


def short_runs(records: list[RunRecord]) -> Iterator[Note]:
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


def limits_changed(records: list[RunRecord]) -> Iterator[Note]:
    """A warning if a limit of the GPU differed between two measurements, and by what clocks and heat explain it."""
    measured = [
        (record, when, found["limits"][when])
        for record in sorted(records, key=lambda record: record.created)
        if (found := record.conditions).get("limits")
        for when in ("before", "after")
    ]
    for key in ("read_bytes_s", "gemm_flop_s"):
        known = [(one[key], f"{when} {place_of(record)}") for record, when, one in measured if one.get(key)]
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


def mixed_rounds(records: list[RunRecord]) -> Iterator[Note]:
    """Rounds of which some points were measured on another machine, as of a sweep that was continued there. What a
    record does not say, such as one of an earlier version, does not differ."""
    rounds: dict[tuple[int, int], list[RunRecord]] = {}
    for record in records:
        if not record.error:
            rounds.setdefault((record.workload["concurrency"], record.workload["repeat"]), []).append(record)
    for (concurrency, repeat), found in rounds.items():
        machines = [_machine(record) for record in found]
        differ = [name for name in (*GPU, *CPU) if len({one[name] for one in machines if name in one}) > 1]
        if not differ:
            continue
        alike: dict[str, list[str]] = {}
        for record, machine in zip(found, machines, strict=True):
            text = ", ".join(f"{name} {machine.get(name, 'unknown')}" for name in differ)
            alike.setdefault(text, []).append(record.workload["configuration"])
        parts = "; ".join(f"{listed(names)} with {text}" for text, names in alike.items())
        text = f"ratios at concurrency {concurrency}, repeat {repeat}, compare machines, too: {parts}"
        yield Note(text, OTHER_MACHINE, "delete the points of this round and repeat the command")


def _machine(record: RunRecord) -> dict[str, Any]:
    """What the record knows of its machine; of a run on a CPU no GPU."""
    names = CPU if record.gpu is None else (*GPU, *CPU)
    return {name: value for name in names if (value := record.hardware.get(name)) is not None}


def of_record(record: RunRecord) -> Iterator[Note]:
    work, where = record.workload, place_of(record)
    if record.metrics["requests"] != work.get("requests", work["prompts"]):
        finished = f"{record.metrics['requests']} of {work.get('requests', work['prompts'])} prompts finished"
        yield Note(f"{where}: {finished}.", "INCOMPLETE")
    if retractions := record.metrics.get("retractions"):
        yield Note(f"{where}: {counted(int(retractions), 'request')} waited for KV pages.", "RETRACTED")
    if record.drafts and _drafted_nothing(record):
        yield Note(f"{where}: nothing was drafted, so this row does not show speculation.", "NO DRAFTS")
    for error, count in failures(record):
        yield Note(f"{where}: {counted(count, 'request')}: {error}.", "FAILED")


def _drafted_nothing(record: RunRecord) -> bool:
    if "server" in record.config:  # it may not say
        return "show no drafts" in record.counters.get("no_accept_length", "")
    return not record.metrics.get("drafted_tokens")


def shared(records: list[RunRecord]) -> Iterator[Note]:
    """Notes that most points have in common, each once with the number of its points."""
    found: dict[Note, list[str]] = {}
    for record in records:
        for note in _remarks(record):
            found.setdefault(note, []).append(place_of(record))
    for note, places in found.items():
        yield Note(f"{note.text} ({places_in_short(places)}).", note.warning)


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
        yield from server_notes(record)


def _is_known(record: RunRecord) -> bool:
    """Whether the user named the speculation of the server."""
    return bool(record.config.get("speculation_known"))


def server_notes(record: RunRecord) -> Iterator[Note]:
    """What may be wrong with the numbers of a server."""
    if _is_known(record) and not record.drafts and record.counters.get("server_acceptance"):
        name = record.workload["configuration"]
        yield Note(f"the server of {name} drafts, though its configuration names no algorithm", "SPECULATES")
    cache = str(record.config["prefix_cache"])
    if "NOT EMPTIED" in cache:
        yield Note(f"the server may have answered from earlier rounds ({cache})", "PREFIX CACHE")
    if record.counters.get("client_cpu_share", 0.0) > BUSY_CLIENT:
        text = f"this client used more than {BUSY_CLIENT:.0%} of a CPU core, which can hold up the server's times"
        yield Note(text, "BUSY CLIENT", "start the server with a larger --stream-interval")


def simulated(records: list[RunRecord]) -> Iterator[Note]:
    models = {record.workload["configuration"]: model for record in records if (model := record.simulated_acceptance)}
    for name, model in models.items():
        text = (
            f"{name}: acceptance was drawn at random ({model}); the text is not the model's. Verifies with fewer "
            "drafts (ngram without a match, --draft-tokens auto) accept fewer, so the mean reached may be lower."
        )
        yield Note(text, "SIMULATED")
