"""`specbatch check`: does an algorithm generate the tokens of the baseline, as far as rounding allows?

Two engines share one copy of the weights and continue the same prompts, greedy. The baseline decodes without
speculation, eagerly, under schedule v1 and without a prefix cache: the simplest path through the engine. Then both are
closed and the referee, the model alone in float32, judges the tokens of both (`specbatch.sweeps.check.verdict`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from specbatch.config.engine_config import EngineConfig, Graphs
from specbatch.config.speculation import Speculation
from specbatch.core.completion import Completion
from specbatch.engine.interface import InferenceEngine
from specbatch.errors import counted, refuse
from specbatch.memory.planner import MemoryShare
from specbatch.progress.bars import Report
from specbatch.sweeps.check import prompts as check_prompts
from specbatch.sweeps.check.options import CheckOptions
from specbatch.sweeps.check.referee import Referee, RefereePlan, plan_referee
from specbatch.sweeps.check.report import Answer, CheckReport, Finding
from specbatch.sweeps.check.verdict import Places
from specbatch.sweeps.run.loading import check_draft, load_engine

Log = Callable[[str], None]
# Of the prompts, one in so many runs without log-probabilities, as most requests of users do: greedy steps then need
# no logits, only their argmax.
_WITHOUT_LOGPROBS = 4
_EQUAL_IN_FLOAT32 = 12  # answers that the referee judges although they are equal, as rounding can change next to none


def run_check(
    config: EngineConfig,
    options: CheckOptions,
    folder: Path,
    *,
    log: Log | None = None,
    report: Report | None = None,
) -> CheckReport:
    """Compare the engine of `config` with the baseline, and write what was found into `folder`, which exists.

    Refused: simulated acceptance, whose text is no model's; a referee that does not fit.
    """
    refuse_simulated(config)
    rows = check_prompts.read(options, log)
    plan = None if options.referee == "none" else plan_referee(config, options.referee)
    with ExitStack() as stack:
        base = replace(config, max_model_len=config.max_model_len or options.max_model_len)
        plain, checked = both(base)
        check_draft([checked], log)
        shares = MemoryShare(0, 2), MemoryShare(1, 2)
        reference = stack.enter_context(load_engine("baseline", plain, log, weights_of=None, share=shares[0]))
        engine = stack.enter_context(load_engine("checked", checked, log, weights_of=reference, share=shares[1]))
        prompts, names = check_prompts.encode(rows, options, engine, config.seed)
        progress = Progress(report, 2 * len(prompts))
        plain_answers, answers = (_generate(one, prompts, options, progress) for one in (reference, engine))
        record = engine.record(concurrency=options.concurrency)
    findings = [_compare(a, b, name) for a, b, name in zip(plain_answers, answers, names, strict=True)]
    if plan is not None:
        findings = judged_by(plan, findings, record.caps["dtype"], log, progress)
    record.workload = {
        **check_prompts.describe(options, prompts, config.seed, None if rows is None else len(rows)),
    }
    result = CheckReport(options, findings, record)
    record.workload |= result.summary()
    result.save(folder)
    return result


def refuse_simulated(config: EngineConfig) -> None:
    for setting in ("simulate_accept_length", "simulate_accept"):
        if (simulated := getattr(config.speculation, setting)) is not None:
            raise refuse(setting, simulated, "the text is not a model's output; leave it out")


def both(config: EngineConfig) -> tuple[EngineConfig, EngineConfig]:
    """The baseline, and the configuration that is compared with it."""
    plain = replace(
        config,
        speculation=Speculation(schedule="v1"),
        graphs=Graphs(),
        prefix_cache=False,
        draft_attention_backend="auto",
    )
    return plain, config


class Progress:
    """Counts answers, and then the judgements of the referee."""

    def __init__(self, report: Report | None, total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0

    def __call__(self, *_: object) -> None:
        self._done += 1
        if self._report is not None:
            self._report(self._done, self._total)

    def more(self, count: int) -> None:
        self._total += count


def _generate(
    engine: InferenceEngine, prompts: list[list[int]], options: CheckOptions, progress: Progress
) -> list[Completion]:
    """Answers in the order of the prompts, first those without log-probabilities."""
    without = range(0, len(prompts), _WITHOUT_LOGPROBS)
    parts = [list(without), [place for place in range(len(prompts)) if place % _WITHOUT_LOGPROBS]]
    answers: dict[int, Completion] = {}
    for part, logprobs in zip(parts, (False, True), strict=True):
        params = replace(options.params, logprobs=logprobs)
        found = engine.generate(
            [prompts[place] for place in part], params, concurrency=options.concurrency, on_completion=progress
        )
        answers |= {place: replace(item, index=place) for place, item in zip(part, found, strict=True)}
    return [answers[place] for place in range(len(prompts))]


def find_divergence(plain: Sequence[object], checked: Sequence[object]) -> tuple[int, bool]:
    """The number of equal tokens before the first divergence, and whether there is one."""
    pairs = zip_longest(plain, checked)
    equal = next((place for place, (wanted, found) in enumerate(pairs) if wanted != found), None)
    return len(plain) if equal is None else equal, equal is not None


def _compare(plain: Completion, checked: Completion, name: str | int | None) -> Finding:
    equal, diverges = find_divergence(plain.token_ids, checked.token_ids)
    return Finding(
        index=plain.index,
        id=name,
        equal=equal,
        diverges=diverges,
        plain=Answer(plain.token_ids, plain.logprobs, error=plain.error),
        checked=Answer(checked.token_ids, checked.logprobs, error=checked.error),
        prompt=plain.prompt_token_ids,
    )


def judged_by(
    plan: RefereePlan, findings: list[Finding], dtype: str, log: Log | None, progress: Progress
) -> list[Finding]:
    """The findings with what the referee says of both answers: of all prompts; in float32 of those that diverge and of
    a sample of the others."""
    alike = [item for item in findings if not item.diverges]
    equal = [item.index for item in alike if item.plain.logprobs is not None] or [item.index for item in alike]
    if dtype == "float32":
        equal = equal[:: -(-len(equal) // _EQUAL_IN_FLOAT32) or 1]
        chosen = {*equal, *(item.index for item in findings if item.diverges)}
    else:
        chosen = {item.index for item in findings}
    longest = max((len(item.prompt) + max(len(a.tokens) for a in item.answers) for item in findings), default=1)
    if log is not None:
        judged = counted(len(chosen), "prompt")
        log(f"referee: {str(plan.dtype).removeprefix('torch.')} on {plan.device}, judges {judged}")
    progress.more(len(chosen))
    referee = Referee(plan, longest)
    done = []
    for item in findings:
        if item.index in chosen:
            known: dict[tuple[int, ...], Places] = {}
            sides = []
            for side in item.answers:
                key = tuple(side.tokens)
                if key not in known:
                    known[key] = referee.judge(item.prompt, side.tokens)
                sides.append(replace(side, places=known[key]))
            item = replace(item, plain=sides[0], checked=sides[1])
            progress()
        done.append(item)
    return done
