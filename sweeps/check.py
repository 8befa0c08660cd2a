"""`specbatch check`: does an algorithm generate the same tokens as the baseline?

Two engines share one copy of the weights and continue the same prompts, greedy. The baseline decodes without
speculation, eagerly, under schedule v1 and without a prefix cache: the simplest path through the engine. At the first
divergence of a prompt, one more prefill of the baseline over the common tokens shows how close the two choices were.
Tokens after a divergence belong to a different text and are not compared.

* margin: logit of the most likely token - logit of the second.
* gap: logit of the most likely token - the lower logit of the two that were chosen. A divergence is a near tie if the
  gap is at most the allowed margin. The gap is never below the margin, so an unlikely token is no near tie just because
  the two most likely ones are close.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.atomic_file import write_atomic
from specbatch.config import EngineConfig, Graphs, Speculation
from specbatch.core.request import Completion
from specbatch.errors import refuse
from specbatch.jobs.configurations import check_draft, load_engine
from specbatch.jobs.prompts import Prompt, read_prompts
from specbatch.memory.planner import MemoryShare
from specbatch.progress import Report
from specbatch.records.markdown import acceptance_table, draft_length_lines, markdown_table
from specbatch.records.run_record import RunRecord
from specbatch.sweeps.check_options import CheckOptions
from specbatch.sweeps.report.notes import replay_notes
from specbatch.sweeps.report.summaries import heading, run_on
from specbatch.sweeps.run.workloads import Workload, sha256_of

if TYPE_CHECKING:
    import torch

    from specbatch.tokenizer import Tokenizer

MARGIN = 0.1
MARGIN_FLOAT32 = 1e-3  # rounding moves logits by less
RANDOM_PROMPTS = 32


@dataclass(frozen=True)
class Finding:
    """One prompt: the number of equal tokens and, at a divergence, what each engine chose next (None: it had ended) and
    how close the choices were. Without a divergence these are None."""

    index: int
    id: str | int | None
    equal: int
    plain: int | None = None
    checked: int | None = None
    margin: float | None = None
    gap: float | None = None
    verdict: str = "equal"  # or "near tie", or "differs"


@dataclass(frozen=True)
class CheckReport:
    """The result of a check. record: of the engine that was checked."""

    options: CheckOptions
    findings: list[Finding]
    record: RunRecord

    def count(self, verdict: str) -> int:
        return sum(item.verdict == verdict for item in self.findings)

    @property
    def differs(self) -> bool:
        return self.count("differs") > 0

    def counts(self) -> dict[str, int]:
        return {
            "prompts": len(self.findings),
            "equal": self.count("equal"),
            "near_ties": self.count("near tie"),
            "differing": self.count("differs"),
        }

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        rows = [asdict(item) for item in self.findings]
        return {**self.counts(), "margin": self.options.margin, "rows": rows, "metrics": self.record.metrics}

    def markdown(self) -> str:
        """The setup, the result, and every prompt that is not equal."""
        record, parted = self.record, [item for item in self.findings if item.verdict != "equal"]
        lines = run_on([record]) | {
            "checked": f"{Speculation(**record.config['speculation'])}, {Graphs(**record.config['graphs'])}",
            "against": "baseline, schedule v1, eager",
            "prompts": self._prompts(),
        }
        parts = [heading(lines), self._answer()]
        if parted:
            headers = ["prompt", "equal tokens", "then baseline", "then checked", "margin", "gap", "verdict"]
            numbers = ("equal", "plain", "checked", "margin", "gap", "verdict")
            body = [[_name(item), *(_shown(getattr(item, name)) for name in numbers)] for item in parted]
            parts.append(markdown_table(body, headers))
        parts.append(acceptance_table({(): [record.counters]}, sampling="greedy"))
        parts.append("\n".join(draft_length_lines([record.counters], record.caps)))
        parts.append("\n".join(f"* {note}" for note in self._notes()))
        return "\n\n".join(part.rstrip("\n") for part in parts if part)

    def save(self, folder: Path) -> None:
        """Write record.json, requests.jsonl, prompts.jsonl (a row per prompt) and summary.md."""
        self.record.save(folder)
        write_atomic(folder / "prompts.jsonl", "".join(json.dumps(asdict(item)) + "\n" for item in self.findings))
        write_atomic(folder / "summary.md", self.markdown() + "\n")

    def _prompts(self) -> str:
        options, work = self.options, self.record.workload
        text = f"random, {options.input_len} tokens each, seed {work['seed']}" if not options.source else options.source
        bound = "exactly" if options.source is None else "at most"
        return f"{text}; {bound} {options.max_new_tokens} tokens each, greedy, {options.concurrency} at once"

    def _answer(self) -> str:
        found = self.counts()
        text = f"{found['equal']} of {found['prompts']} prompts have the baseline's tokens"
        more = {
            f"diverge at a near tie (gap of {self.options.margin:g} logits at most)": found["near_ties"],
            "DIFFER": found["differing"],
        }
        return ", ".join([text, *(f"{count} {what}" for what, count in more.items() if count)]) + "."

    def _notes(self) -> list[str]:
        record, notes = self.record, []
        if any(item.verdict != "equal" for item in self.findings):
            notes.append(
                "Margin: the baseline's logit of its most likely token minus that of the second. Gap: the logit of the "
                "most likely token minus the lower one of the two chosen tokens; it decides what a near tie is."
            )
        if record.caps["dtype"] == "float32" and self.count("near tie"):
            notes.append("NEAR TIES IN FLOAT32, where none are expected; --margin 0 counts them as differences.")
        if notes and record.caps["fp8_activations"] == "on":
            notes.append(
                "Activations were quantized to FP8: where a verify, chunks or graphs change the last bit of an "
                "activation, it can round to the next FP8 value and change logits by more than the margin. "
                "--no-fp8-activations shows which divergences remain."
            )
        if record.drafts and not record.metrics["drafted_tokens"]:
            notes.append("NO DRAFTS: nothing was drafted, so drafts were not tested.")
        notes += map(str, replay_notes(record, "checked"))
        return notes


def run_check(
    config: EngineConfig,
    options: CheckOptions,
    folder: Path,
    *,
    log: Callable[[str], None] | None = None,
    report: Report | None = None,
) -> CheckReport:
    """Compare the engine of `config` with the baseline, and write what was found into `folder`, which exists.

    Refused: simulated acceptance, whose text is no model's.
    """
    for setting in ("simulate_accept_length", "simulate_accept"):
        if (simulated := getattr(config.speculation, setting)) is not None:
            raise refuse(setting, simulated, "the text is not a model's output; leave it out")
    rows = read_prompts(options.source)[: options.prompts] if options.source is not None else None
    done = 0

    def count(completion: Completion) -> None:
        nonlocal done
        done += 1
        if report is not None:
            report(done, 2 * len(prompts))

    with ExitStack() as stack:
        base = replace(config, max_model_len=config.max_model_len or options.max_model_len)
        plain, checked = _both(base)
        check_draft([checked], log)
        first, second = MemoryShare(0, 2), MemoryShare(1, 2)
        reference = stack.enter_context(load_engine("baseline", plain, log, weights_of=None, share=first))
        engine = stack.enter_context(load_engine("checked", checked, log, weights_of=reference, share=second))
        margin = options.margin
        if margin is None:
            margin = MARGIN_FLOAT32 if engine.caps["dtype"] == "float32" else MARGIN
            options = replace(options, margin=margin)
        prompts = _encode(rows, options, engine.tokenizer, config.seed)
        wanted, found = (
            one.generate(prompts, options.params, concurrency=options.concurrency, on_completion=count)
            for one in (reference, engine)
        )
        record = engine.record(concurrency=options.concurrency)
        findings = [
            _compare(a, b, None if rows is None else rows[b.index].id, margin, reference.next_logits)
            for a, b in zip(wanted, found, strict=True)
        ]
    result = CheckReport(options, findings, record)
    settings = asdict(options) | {"source": str(options.source) if options.source else None}
    record.workload = {
        "command": "check",
        "seed": config.seed,
        **settings,
        "prompts_sha256": sha256_of(prompts),
        **result.counts(),
    }
    result.save(folder)
    return result


def _both(config: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """The baseline, and the configuration that is compared with it."""
    plain = replace(
        config,
        speculation=Speculation(schedule="v1"),
        graphs=Graphs(),
        prefix_cache=False,
        draft_attention_backend="auto",
    )
    return plain, config


def _encode(rows: list[Prompt] | None, options: CheckOptions, tokenizer: Tokenizer, seed: int) -> list[list[int]]:
    if rows is not None:
        return [row.encode(tokenizer, chat_template=options.chat_template) for row in rows]
    workload = Workload(input_len=options.input_len, output_len=options.max_new_tokens, seed=seed)
    prompts = workload.prompts(tokenizer, options.prompts or RANDOM_PROMPTS)
    half = (options.input_len + 1) // 2
    return [(ids[:half] * 2)[: options.input_len] if index % 2 else ids for index, ids in enumerate(prompts)]


def _compare(
    plain: Completion,
    checked: Completion,
    name: str | int | None,
    margin: float,
    next_logits: Callable[[list[int]], torch.Tensor],
) -> Finding:
    pairs = zip_longest(plain.token_ids, checked.token_ids)
    for place, (wanted, found) in enumerate(pairs):
        if wanted == found:
            continue
        same = Finding(plain.index, name, place, wanted, found, verdict="differs")
        if wanted is None or found is None:  # one ended and the other did not: no token was chosen
            return same
        logits = next_logits(plain.prompt_token_ids + plain.token_ids[:place])
        best, second = logits.topk(2).values.tolist()
        gap = best - min(float(logits[wanted]), float(logits[found]))
        verdict = "near tie" if gap <= margin else "differs"
        return replace(same, margin=best - second, gap=gap, verdict=verdict)
    return Finding(plain.index, name, len(plain.token_ids))


def _name(item: Finding) -> str:
    return str(item.index if item.id is None else item.id)


def _shown(value: object) -> str:
    return "-" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
