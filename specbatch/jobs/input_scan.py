"""The first pass over the input of a job: checks every row, counts and hashes them, in constant memory."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from specbatch.errors import SpecbatchError, shown_json
from specbatch.jobs.formats import BadRow, JobFormat, JobRow
from specbatch.jobs.prompt_file import location
from specbatch.progress.bars import Report

if TYPE_CHECKING:
    from specbatch.engine.interface import InferenceEngine

ROWS_AHEAD = 32
SECONDS_BETWEEN_REPORTS = 0.2
# What `json.dumps` makes anew for each value, which takes longer than to encode a short one.
_encode: Callable[[Any, int], Iterable[str]] = c_make_encoder(
    None, json.JSONEncoder().default, encode_basestring_ascii, None, ": ", ", ", False, False, True
)
SHOWN = 20  # malformed lines that are listed one by one
CHARACTERS = 4  # of JSON per token of a text, about


@dataclass
class BadLines:
    """Malformed lines of one pass: the first `SHOWN` as messages, and how many there are."""

    source: str | Path
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, index: int, problem: str) -> None:
        self.count += 1
        if len(self.first) < SHOWN:
            self.first.append(f"{location(self.source, index + 1)}: {problem}")

    def leave_out(self, total: int, *, skip: bool, log: Callable[[str], None]) -> None:
        """Log the lines if they may be skipped. Raises SpecbatchError if not, and if all `total` lines are malformed.

        The message of the error has a line for each malformed line.
        """
        if not self.count:
            return
        lines = self.first + ([f"and {self.count - SHOWN} more"] if self.count > SHOWN else [])
        if skip and self.count < total:
            for line in lines:
                log(f"skipped {line}")
            return
        if self.count == 1:
            place, _, problem = lines[0].partition(": ")
            hint = " (--skip-bad leaves it out)" if total > 1 else ""
            raise SpecbatchError(f"input={place!r}: {problem}{hint}", setting="input")
        works = "fix them, or pass --skip-bad to leave them out" if self.count < total else "fix them"
        head = f"input={str(self.source)!r}: {self.count} of {total} lines are malformed; {works}:"
        raise SpecbatchError("\n".join([head, *lines]), setting="input")


@dataclass
class InputScan:
    """What the first pass found.

    rows        rows of the job: the valid ones, and the malformed ones if the format keeps them
    end         above the index of every row
    sha256      of the rows
    duplicates  indices of rows with the id of an earlier row, if ids must be unique
    present     columns that only some outputs have
    answers     wanted in all, each sample of a row
    prompt_tokens, new_tokens  in all: an estimate of the prompts, and the most that answers may have
    common      text with which the JSON of all prompts begins; None before the first
    """

    rows: int = 0
    end: int = 0
    sha256: str = ""
    duplicates: frozenset[int] = frozenset()
    present: set[str] = field(default_factory=set)
    id_types: set[str] = field(default_factory=set)
    answers: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    common: str | None = None

    @property
    def shared_tokens(self) -> int:
        """About how many tokens all prompts have in common at their start."""
        return _tokens_in(self.common or "")

    @property
    def id_type(self) -> str | None:
        """The common type of all ids as a column; None without ids, and "" for ids that one column cannot hold."""
        if not self.id_types:
            return None
        return next(iter(self.id_types)) if len(self.id_types) == 1 else ""


def scan(form: JobFormat, bad: BadLines, report: Report | None = None) -> InputScan:
    """Read all rows of the input once. Malformed rows are added to `bad`, unless the format keeps them.

    report   called with how many rows were read
    """
    found, digest = InputScan(), hashlib.sha256()
    ids, places = array("Q"), array("q")
    reported, params = time.monotonic(), None
    for number, row in enumerate(form.rows(), start=1):
        if report is not None and (now := time.monotonic()) - reported > SECONDS_BETWEEN_REPORTS:
            report(number, 0)
            reported = now
        if isinstance(row, BadRow) and not form.keeps_bad_rows:
            bad.add(row.index, row.problem)
            continue
        found.rows += 1
        found.end = row.index + 1
        identity = "".join(_encode(row.identity, 0))
        digest.update(identity.encode() + b"\n")
        if isinstance(row, JobRow):
            found.answers += row.params.n
            found.prompt_tokens += row.params.n * _tokens_in(identity)
            found.new_tokens += row.params.n * row.params.max_new_tokens
            text = identity.partition(", ")[2]  # after the index
            if found.common is None or not text.startswith(found.common):
                found.common = text if found.common is None else _common_start(found.common, text)
        if row.id is not None:
            found.id_types.add(_type_of(row.id))
            found.present.add("id")
            if form.unique_ids:
                ids.append(int.from_bytes(hashlib.blake2b(str(row.id).encode(), digest_size=8).digest()))
                places.append(row.index)
        if isinstance(row, JobRow) and row.params is not params:
            params = row.params
            wanted = {"sample": row.params.n > 1, "logprobs": row.params.logprobs}
            wanted |= {"top_logprobs": row.params.top_logprobs > 0, "prompt_logprobs": row.params.prompt_logprobs}
            found.present |= {name for name, there in wanted.items() if there}
    found.sha256 = digest.hexdigest()
    found.duplicates = _later_ones(ids, places)
    return found


def job_rows(form: JobFormat, found: InputScan) -> Iterator[JobRow | BadRow]:
    """The rows of the job in order, read anew."""
    for row in form.rows():
        if isinstance(row, JobRow) and row.index in found.duplicates:
            yield BadRow(
                row.index, row.id, f"custom_id={shown_json(row.id)} is the id of an earlier row; each row needs its own"
            )
        elif isinstance(row, JobRow) or form.keeps_bad_rows:
            yield row


def rendered_ahead(
    rows: Iterator[JobRow | BadRow], form: JobFormat, engine: InferenceEngine, encoded: Container[int]
) -> Iterator[JobRow | BadRow]:
    """The same rows. The chat template renders those of some rows at once, which is faster than one by one.

    encoded   indices of rows that are not rendered
    """
    while taken := list(islice(rows, ROWS_AHEAD)):
        new = [row for row in taken if isinstance(row, JobRow) and row.index not in encoded]
        conversations = [item for row in new for item in form.conversations(row)]
        if conversations:
            engine.tokenizer.render_ahead(conversations)
        yield from taken


def _tokens_in(identity: str) -> int:
    """About how many tokens a prompt has, whose text or token ids take most of this JSON."""
    numbers = identity.count(",")  # of token ids there is one in five to eight characters, in a text one in fifty
    return numbers if 10 * numbers > len(identity) else len(identity) // CHARACTERS


def _common_start(one: str, other: str) -> str:
    return one[: bisect_left(range(1, len(one) + 1), True, key=lambda count: not other.startswith(one[:count]))]


def _later_ones(ids: array[int], places: array[int]) -> frozenset[int]:
    """Of equal ids all places but the first. Ids are 64-bit hashes, of which a million collide once in 10^7 files."""
    if not ids:
        return frozenset()
    hashes = numpy.frombuffer(ids, dtype=numpy.uint64)
    order = numpy.argsort(hashes, kind="stable")
    ordered = hashes[order]
    again = order[1:][ordered[1:] == ordered[:-1]]
    return frozenset(numpy.frombuffer(places, dtype=numpy.int64)[again].tolist())


def _type_of(own: str | int) -> str:
    if isinstance(own, str):
        return "string"
    return "int64" if -(2**63) <= own < 2**63 else "larger than 64 bits"
