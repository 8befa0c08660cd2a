"""Documents that JSON schemas accept and refuse as engines of grammars see them: schemas and tests of MaskBench
(github.com/guidance-ai/jsonschemabench, folder maskbench/data), which is not part of the package.

A schema is right if every valid document is accepted and every invalid one refused, both as compact text with a space
after commas and colons. Tokens are bytes. Compile times are CPU times of one thread, to the first mask.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from llguidance import LLMatcher

from specbatch.errors import refuse
from specbatch.grammar.compiler import Compiler
from specbatch.grammar.host_matcher import HostGrammar, HostVocabulary
from specbatch.grammar.limits import RegexError
from specbatch.grammar.token_automaton import TokenAutomaton
from specbatch.memory.grammar_pool import CELLS
from specbatch.sweeps.microbench.runner import Table
from specbatch.text.tokenizer import ByteTokenizer

_VOCABULARY = 257
_TOKENIZER = ByteTokenizer(_VOCABULARY)
[_END] = _TOKENIZER.eos_ids
Grammar = TokenAutomaton | HostGrammar


class Outcome(NamedTuple):
    """Of a schema. error: why it was refused; path: what constrains it."""

    name: str
    seconds: float
    error: str = ""
    path: str = ""
    accepted: int = 0  # valid documents
    valid: int = 0
    wrong: int = 0  # invalid documents that are accepted
    invalid: int = 0

    @property
    def is_right(self) -> bool:
        return not self.error and self.accepted == self.valid and not self.wrong


def tables(
    folder: Annotated[Path, typer.Option(help="Files of MaskBench, maskbench/data of its repository.")],
    sample: Annotated[int, typer.Option(min=0, help="Schemas that are drawn at random; 0: all.")] = 400,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    failures: Annotated[bool, typer.Option(help="List the schemas that are not right.")] = False,
) -> Iterator[Table]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise refuse("folder", str(folder), "it has no JSON files; use maskbench/data of guidance-ai/jsonschemabench")
    chosen = Random(seed).sample(files, min(sample, len(files))) if sample else files
    ours = Compiler(_TOKENIZER.token_bytes, {_END}, _VOCABULARY, CELLS)
    theirs = HostVocabulary(_TOKENIZER.token_bytes(), {_END}, _VOCABULARY)
    engines: dict[str, Callable[[str], Grammar]] = {
        "specbatch": lambda schema: ours.compile("json_schema", schema),
        "llguidance": lambda schema: theirs.compile(LLMatcher.grammar_from_json_schema(schema)),
    }
    found = {name: [_outcome(file, compile) for file in chosen] for name, compile in engines.items()}
    yield Table([{"engine": name} | _summary(found[name]) for name in engines], f"{len(chosen)} schemas")
    if failures:
        rows = [(name, item) for name in engines for item in found[name] if not item.is_right]
        cells = [{"engine": name, "schema": item.name} | _failure(item) for name, item in rows]
        yield Table(cells, "Not right")


def _outcome(file: Path, compile: Callable[[str], Grammar]) -> Outcome:
    try:
        case = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # one of MaskBench's own
        return Outcome(file.stem, 0.0, error="its file is not JSON")
    start = time.thread_time()
    try:
        grammar = compile(json.dumps(case["schema"]))
    except RegexError as error:
        return Outcome(file.stem, time.thread_time() - start, error=str(error))
    seconds = time.thread_time() - start
    verdicts = [(test["valid"], accepts(grammar, test["data"])) for test in case["tests"]]
    return Outcome(
        file.stem,
        seconds,
        path="device" if isinstance(grammar, TokenAutomaton) else "host",
        accepted=verdicts.count((True, True)),
        valid=sum(valid for valid, _ in verdicts),
        wrong=verdicts.count((False, True)),
        invalid=sum(not valid for valid, _ in verdicts),
    )


def accepts(grammar: Grammar, document: Any) -> bool:
    """Whether an answer can be this document."""
    tokens = list(json.dumps(document, ensure_ascii=False).encode(errors="surrogatepass"))
    if isinstance(grammar, HostGrammar):
        matcher = grammar.matcher()
        matcher.follow([*tokens, _END])
        return not matcher.error
    return grammar.after([*tokens, _END]) >= 0


def _summary(outcomes: list[Outcome]) -> dict[str, Any]:
    compiled = [item for item in outcomes if not item.error]
    median, late = np.percentile([item.seconds for item in outcomes], [50, 95])
    return {
        "compiled": len(compiled),
        "right": sum(item.is_right for item in outcomes),
        "on the device": sum(item.path == "device" for item in compiled),
        "valid refused": f"{sum(item.valid - item.accepted for item in compiled)} of {sum(i.valid for i in compiled)}",
        "invalid accepted": f"{sum(item.wrong for item in compiled)} of {sum(item.invalid for item in compiled)}",
        "median (s)": round(float(median), 4),
        "p95 (s)": round(float(late), 4),
        "most (s)": round(max(item.seconds for item in outcomes), 3),
    }


def _failure(item: Outcome) -> dict[str, Any]:
    wrong = f"{item.valid - item.accepted} of {item.valid} valid refused, {item.wrong} invalid accepted"
    return {"path": item.path, "why": item.error or wrong}
