"""Sampling parameters that rows of a file set themselves: which a sweep can use, and their description for a record."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from specbatch.core.sampling_params import SAMPLED, SamplingParams, refuse_unsampled
from specbatch.errors import SpecbatchError, refuse
from specbatch.jobs.prompt_file import location
from specbatch.jobs.prompts import Prompt

_UNUSED = {"n", "logprobs", "top_logprobs", "prompt_logprobs"}  # of a row's parameters, in a sweep


def check_rows(rows: Sequence[Prompt], source: str | Path, params: Callable[[int], SamplingParams]) -> None:
    """Refuse parameters in a row that a sweep cannot use: it counts one answer to each prompt, without
    log-probabilities. source: the data set, or its file; params: of the row at a place."""
    names = {item.name for item in fields(SamplingParams)} - _UNUSED
    refuse_named(rows, source, names, "has no effect in a sweep; leave it out")
    for index, row in enumerate(rows):
        try:
            own = params(index)
            refuse_unsampled({name: getattr(own, name) for name in SAMPLED})
        except SpecbatchError as error:  # together with those of the workload
            raise _of_row(row, source, str(error)) from None


def refuse_named(rows: Sequence[Prompt], source: str | Path, names: Collection[str], works: str) -> None:
    """Refuse parameters in a row other than `names`."""
    for row in rows:
        if unused := row.sampling.keys() - names:
            raise _of_row(row, source, f"{', '.join(sorted(unused))} {works}")


def described(own: list[dict[str, Any]], rows: int) -> dict[str, Any]:
    """The parameters that some of so many rows set, for a record."""
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
    return {"rows": len(own), "of": rows, "names": sorted({name for one in own for name in one}), "sha256": digest}


def _of_row(row: Prompt, source: str | Path, problem: str) -> SpecbatchError:
    setting = "data" if isinstance(source, Path) else "dataset"
    return refuse(setting, location(source, row.line), f"sampling: {problem}")
