"""Acceptance of each prompt in each engine, from records: accept length, by draft position and by context, and the
difference of two engines with its interval over prompts.

Draft positions are counted where each verify is known (this engine, vLLM with detailed metrics, llama.cpp). SGLang, and
vLLM with a summary, report how many verifies of a request accepted 0, 1, 2, ... drafts, drafts after the end included.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specbatch.algorithms import NO_SPECULATION
from specbatch.core.acceptance import Acceptance
from specbatch.core.completion import INCOMPLETE
from specbatch.errors import refuse
from specbatch.records.differences import conflicts
from specbatch.records.intervals import LEAST_PROMPTS, Interval, Sample, over_prompts
from specbatch.records.markdown import sum_lists
from specbatch.records.run_record import RunRecord

OWN = "specbatch"
_SERVER = re.compile(r"server(?: \((?P<name>.+?)\))? at (?P<address>\S+?),")
_SAMPLING = ("sampling", "own_sampling", "output_len", "max_new_tokens", "ignore_eos", "stop", "gen_kwargs", "thinking")


@dataclass
class Prompt:
    """Counts of the answers to one prompt, over repeats.

    drafted           tokens
    tried, accepted   by draft position, from the first on
    context           by length of the context in tokens: verifies, and tokens that they emitted
    prompt_length     the same by length of the prompt
    digests           of the answers, as far as they are known
    """

    answers: int = 0
    verifies: int = 0
    emitted: int = 0
    drafted: int = 0
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    context: dict[int, list[int]] = field(default_factory=dict)
    prompt_length: dict[int, list[int]] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)

    @property
    def knows_contexts(self) -> bool:
        """Whether each verify has its length of context: of vLLM those without drafts have none."""
        return sum(verifies for verifies, _ in self.context.values()) == self.verifies

    def add(self, row: dict[str, Any]) -> None:
        """Count a request of a record."""
        self.answers += 1
        self.verifies += row.get("verify_steps") or 0
        self.emitted += row.get("emitted") or 0
        length = row.get("prompt_tokens") or 0
        counts = [row.get("verify_steps") or 0, row.get("emitted") or 0]
        self.prompt_length[length] = sum_lists([self.prompt_length.get(length, []), counts])
        if (digest := row.get("text_digest")) or "token_ids" in row:
            self.digests.add(digest or str(list(row["token_ids"] or ())))
        if untrimmed := row.get("untrimmed_histogram"):
            reached = [sum(untrimmed[place:]) for place in range(len(untrimmed))]
            tried, accepted = reached[:-1], reached[1:]
            self.drafted += len(accepted) * sum(untrimmed)
        else:
            found = Acceptance(**(row.get("acceptance") or {})).as_counters()
            tried, accepted = found["tried"], found["accepted"]
            self.drafted += sum(found["drafted"])
            for start, *counts in found["context"]:
                self.context[start] = sum_lists([self.context.get(start, []), counts])
        self.tried, self.accepted = sum_lists([self.tried, tried]), sum_lists([self.accepted, accepted])


@dataclass
class Side:
    """The runs of one engine.

    prompts    by their place in the input
    untrimmed  whether draft positions count drafts after the end of an answer
    uncounted  verifies by the counters of a server that are not among those of its requests: vLLM does not report
               those without drafts, and those before tokens that were trimmed do not show
    """

    label: str
    records: list[RunRecord]
    paths: list[Path]
    prompts: dict[int, Prompt] = field(default_factory=dict)
    untrimmed: bool = False
    uncounted: int = 0

    @property
    def speculation(self) -> dict[str, Any]:
        """As it was configured; of a server as the user described it."""
        asked: dict[str, Any] = self.records[0].config["speculation"]
        return asked

    @property
    def positions(self) -> int:
        return max((len(one.tried) for one in self.prompts.values()), default=0)

    def count(self) -> None:
        """Count the requests of the records."""
        found: dict[int, Prompt] = defaultdict(Prompt)
        for row in (row for record in self.records for row in record.requests):
            if row.get("finish_reason") not in INCOMPLETE:
                found[row["index"]].add(row)
                self.untrimmed = self.untrimmed or bool(row.get("untrimmed_histogram"))
        self.prompts = {index: one for index, one in found.items() if one.verifies}
        known = sum(one.verifies for one in found.values())
        counted = sum(record.metrics.get("verify_steps") or 0 for record in self.records)
        self.uncounted = int(max(counted - known, 0)) if self.records[0].of_server else 0


@dataclass(frozen=True)
class Change:
    """A ratio of sums in two engines, and the interval of the difference."""

    before: float | None
    after: float | None
    interval: Interval

    @property
    def value(self) -> float:
        return 0.0 if self.before is None or self.after is None else self.after - self.before

    def p_value(self, bound: float = 0.0) -> float:
        """That the difference is at most `bound` in size; 1 where it has no interval."""
        if self.interval.estimate is None or abs(self.value) <= bound:
            return 1.0
        return self.interval.estimate.p_value(float(np.copysign(bound, self.value)))


Counts = Callable[[Prompt], tuple[float, float]]


@dataclass(frozen=True)
class Pairing:
    """The prompts that are compared.

    indices  of the prompts that all engines answered; None: each has other ones
    total    how many there are
    same     how many of these have the same answers everywhere; None: unknown. If enough have, `indices` are those
    """

    indices: tuple[int, ...] | None
    total: int = 0
    same: int | None = None

    @property
    def of_same_answers(self) -> bool:
        return self.indices is not None and len(self.indices) == self.same


@dataclass(frozen=True)
class Difference:
    """Two engines.

    length      of the accept length
    drafts      of the drafts per verify
    positions   of the share of drafts that were accepted where tried, by draft position
    contexts    of the accept length, by the first length of a context in tokens
    """

    base: Side
    other: Side
    pairing: Pairing
    length: Change
    drafts: Change
    positions: list[Change]
    contexts: dict[int, Change]


def paired(sides: Sequence[Side]) -> Pairing:
    """Which prompts of the sides are compared."""
    if not set.intersection(*map(prompt_sets, sides)):
        return Pairing(None)
    indices = tuple(sorted(set.intersection(*(set(side.prompts) for side in sides))))
    digests = {index: [side.prompts[index].digests for side in sides] for index in indices}
    if not all(map(all, digests.values())):
        return Pairing(indices, len(indices))
    alike = tuple(index for index, found in digests.items() if len(set.union(*found)) == 1)
    return Pairing(alike if len(alike) >= LEAST_PROMPTS else indices, len(indices), len(alike))


def difference(base: Side, other: Side, pairing: Pairing) -> Difference:
    """The difference of two engines over the prompts of `pairing`."""

    def change(counts: Counts) -> Change:
        samples = [_sample(side.prompts, pairing.indices, counts) for side in (base, other)]
        before, after = (float(one.top.sum() / one.bottom.sum()) if one.bottom.sum() else None for one in samples)
        known = before is not None and after is not None
        return Change(before, after, over_prompts(*samples) if known else Interval(None, None, "not known"))

    known = with_contexts(base, other, pairing)
    starts = sorted({start for side in (base, other) for one in side.prompts.values() for start in one.context})
    return Difference(
        base,
        other,
        pairing,
        change(lambda one: (one.emitted, one.verifies)),
        change(lambda one: (one.drafted, one.verifies if one.tried else 0)),
        [change(_of_position(place)) for place in range(max(base.positions, other.positions))],
        {start: change(_of_context(start, known)) for start in starts},
    )


def _of_position(place: int) -> Counts:
    return lambda one: (one.accepted[place], one.tried[place]) if place < len(one.tried) else (0, 0)


def with_contexts(base: Side, other: Side, pairing: Pairing) -> set[int]:
    """Of the prompts of `pairing` those whose contexts both sides know, as others of the same lengths may have other
    acceptance; of unpaired ones those whose own side does."""
    if pairing.indices is None:
        return {id(one) for side in (base, other) for one in side.prompts.values() if one.knows_contexts}
    pairs = [(base.prompts[index], other.prompts[index]) for index in pairing.indices]
    return {id(one) for pair in pairs if all(one.knows_contexts for one in pair) for one in pair}


def _of_context(start: int, known: set[int]) -> Counts:
    def counts(one: Prompt) -> tuple[float, float]:
        verifies, emitted = one.context.get(start, (0, 0)) if id(one) in known else (0, 0)
        return emitted, verifies

    return counts


def _sample(prompts: dict[int, Prompt], indices: Sequence[int] | None, counts: Counts) -> Sample:
    chosen = prompts.values() if indices is None else [prompts[index] for index in indices]
    pairs = np.array([counts(one) for one in chosen], float).reshape(-1, 2)
    return Sample(pairs[:, 0], pairs[:, 1], None if indices is None else tuple(indices))


def sides_of(found: Iterable[tuple[Path, RunRecord]]) -> list[Side]:
    """The runs that drafted, by engine, in their order. Two servers at different addresses are two engines."""
    sides: dict[tuple[str, str], Side] = {}
    for path, record in found:
        if _drafted(record):
            named = _SERVER.match(record.config.get("server", ""))
            address = named["address"] if named else ""
            name = (named["name"] or address) if named else OWN
            side = sides.setdefault((name, address), Side(name, [], []))
            side.records.append(record)
            side.paths.append(path)
    labels = [name for name, _ in sides]
    for (name, address), side in sides.items():
        side.label = f"{name} at {address}" if labels.count(name) > 1 and address != name else name
    return list(sides.values())


def counted_sides(setting: str, sides: list[Side]) -> list[Side]:
    """The sides with the counts of their requests; only of runs of prompts that all have, if there are any.

    Refused: runs of one engine with different settings."""
    common = set.intersection(*map(prompt_sets, sides))
    for side in sides:
        if common:
            kept = [one for one in zip(side.paths, side.records, strict=True) if prompt_set(one[1]) in common]
            side.paths, side.records = [path for path, _ in kept], [record for _, record in kept]
        for path, record in zip(side.paths, side.records, strict=True):
            if different := conflicts(_settings(side.records[0]), _settings(record)):
                works = f"are runs of {side.label} with different settings ({'; '.join(different)}); name one of them"
                raise refuse(setting, f"{side.paths[0]}, {path}", works)
        side.count()
        if not side.prompts:
            works = f"{side.label} reports no verifies of single requests (docs/any-engine.md, acceptance of a server)"
            raise refuse(setting, ", ".join(map(str, side.paths)), works)
    return sides


def _drafted(record: RunRecord) -> bool:
    counters = record.counters
    if any(counters.get("acceptance", {}).get("drafted", ())) or counters.get("server_acceptance"):
        return True
    described = record.config["speculation"]["algorithm"] != NO_SPECULATION and record.error is None
    return record.of_server and (described or bool(record.metrics.get("accept_length")))


def prompt_set(record: RunRecord) -> str:
    """Names the prompts of a record."""
    work = record.workload
    known = work.get("prompts_sha256") or work.get("input_sha256")
    return str(known or [work.get(name) for name in ("task", "dataset", "data", "seed", "prompts", "input_len")])


def prompt_sets(side: Side) -> set[str]:
    return set(map(prompt_set, side.records))


def sampling_of(record: RunRecord) -> dict[str, Any]:
    """What decides on the answers to given prompts."""
    return {name: record.workload[name] for name in _SAMPLING if name in record.workload}


def _settings(record: RunRecord) -> dict[str, Any]:
    """What acceptance depends on."""
    asked = {name: value for name, value in record.config["speculation"].items() if name != "schedule"}
    return {"model": record.config["model"], **asked, **sampling_of(record)}
