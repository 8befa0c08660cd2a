"""`specbatch advise`: which drafter to use, with how many drafts, and from which concurrency on with none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from specbatch.algorithms import ALGORITHMS, NO_SPECULATION, algorithm_of
from specbatch.cli import workloads
from specbatch.cli.options import SAMPLING_OPTIONS, EngineOptions, Json, options_of, takes_engine
from specbatch.cli.output import fresh_folder, say, show
from specbatch.cli.servers import configured_with_servers
from specbatch.config.draft_shape import AUTO
from specbatch.config.values import whole_numbers
from specbatch.errors import SpecbatchError, refuse
from specbatch.files.atomic_file import write_atomic
from specbatch.files.text_files import read_json
from specbatch.progress.bars import progress
from specbatch.sweeps.workload.defaults import CPU, GPU, REPEATS, default_dataset
from specbatch.sweeps.workload.rounds import Rounds
from specbatch.sweeps.workload.workloads import Workload

if TYPE_CHECKING:
    from specbatch.config.engine_config import EngineConfig
    from specbatch.servers.server import Server

_FREE = [name for name, entry in ALGORITHMS.items() if entry.draft is None and name != NO_SPECULATION]
_OWN = ("spec", "algorithm", "draft", "draft_tokens", "draft_steps", "draft_topk")  # options that candidates set
_DEFAULTS = workloads.DEFAULTS | {"dataset": f"PROMPTS, else {default_dataset(input_len_given=False)}"}


@takes_engine(
    without=_OWN,
    defaults={"prefix_cache": "off; on with --dataset gsp", "max_running": "the highest --concurrency"},
    sampling=SAMPLING_OPTIONS,
    workload=options_of(Workload, workloads.PANEL, defaults=_DEFAULTS),
    rounds=options_of(Rounds, defaults=_DEFAULTS),
)
def advise(
    prompts: Annotated[
        Path | None, Argument(metavar="[PROMPTS]", help="Your prompts: JSONL as for generate.", show_default=False)
    ] = None,
    *,
    engine: EngineOptions,
    sampling: dict[str, Any],
    candidate: Annotated[
        list[str] | None,
        Option(
            "--draft",
            metavar="DRAFT",
            help=f"A candidate, given once for each: an algorithm without a draft ({', '.join(_FREE)}), "
            "ALGORITHM=DRAFT such as eagle3=heads/eagle3, or DRAFT: a draft model, self:skip=12-15, or a folder whose "
            "config names its algorithm. Default: ngram.",
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        Option(
            "--draft-tokens",
            metavar="N,N,...",
            help="Numbers of drafts to try with each candidate. Default: one, half of its usual number, and that "
            "number; of a block draft the whole block.",
        ),
    ] = None,
    configs: Annotated[
        str | None,
        Option(
            help="Instead of --draft: a TOML or YAML file of configurations as for sweep. Its tables may be servers of "
            "other engines, started with the candidates."
        ),
    ] = None,
    rounds: dict[str, Any],
    workload: dict[str, Any],
    output: Annotated[
        Path | None,
        Option("--output", "--out", help="New folder, or that of an interrupted run. Default: out/advise-TIME."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which drafter to use for a model and your prompts, and when to use none.

    specbatch advise prompts.jsonl --model qwen3-8b --draft ngram --draft eagle3=RedHatAI/Qwen3-8B-speculator.eagle3

    specbatch advise prompts.jsonl --concurrency 1,8,32 --slo tpot=0.03,ttft=1

    specbatch advise prompts.jsonl --configs servers.toml

    Each candidate runs with each number of drafts, and the model without drafts, interleaved, at each concurrency. A
    candidate is advised only where its speedup is beyond its interval; with --slo only if 95% of its requests met the
    bound. The advice has the flags for specbatch, vLLM and SGLang. Records are those of a sweep: report and compare
    read them, and the same command with the folder as --out continues.
    """
    from specbatch.records.sweep_plan import PLAN
    from specbatch.runtime.device import device_type
    from specbatch.sweeps.report.advice import advice_json, advice_markdown, advise
    from specbatch.sweeps.report.points import load_records
    from specbatch.sweeps.run.benchmark import SweepOptions
    from specbatch.sweeps.run.configurations import SUFFIXES
    from specbatch.sweeps.run.prompt_loss import PromptLoss
    from specbatch.sweeps.run.sweep import run_sweep

    usual = CPU if device_type(engine.device) == "cpu" else GPU
    engine = engine.having(prefill_graph=engine.prefill_graph or AUTO)  # all candidates are compared with them
    if prompts is not None:
        if workload["dataset"] is not None:
            raise refuse("dataset", workload["dataset"], f"the prompts are those of {prompts}; leave one out")
        workload = workload | {"dataset": str(prompts)}
    asked = workloads.asked_workload(workload, usual, seed=engine.seed, **sampling)
    steps = rounds["concurrency"] or whole_numbers("concurrency", usual.concurrency)
    repeats = REPEATS if rounds["repeats"] is None else rounds["repeats"]
    options = SweepOptions(**rounds | {"concurrency": steps, "repeats": repeats}, workload=asked)
    settings: dict[str, Any] = {"concurrency": max(steps), "prefix_cache": asked.is_grouped or asked.replay}
    if configs is None:
        engines: dict[str, EngineConfig | Server] = dict(candidates(engine, candidate, lengths, **settings))
    else:
        if not configs.endswith(SUFFIXES):
            raise refuse("configs", configs, f"name a file ({', '.join(SUFFIXES)}), or use --draft")
        for name, value in (("candidate", candidate), ("lengths", lengths)):
            if value is not None:
                raise refuse(name, value, "the candidates are those of --configs; leave it out")
        engines = configured_with_servers(engine, configs, workload["thinking"], elsewhere=False, **settings)
    resumes = "*" if output is not None and (output / PLAN).exists() else None
    with fresh_folder(output, "advise", resumes=resumes) as folder:
        options.fitted(engines)
        say(options.described(engines, shortened=False))
        with progress("advise", "requests") as report:
            run_sweep(engines, options, folder, log=say, report=report, measured=PromptLoss(asked))
        advice = advise(load_records(folder))
        text, values = advice_markdown(advice), advice_json(advice)
        write_atomic(folder / "advice.md", text)
        write_atomic(folder / "advice.json", json.dumps(values, indent=2) + "\n")
    show(f"{text}\nresults: {folder}", {"output": str(folder)} | values, as_json=as_json, kept=str(folder))
    if any(record.error is not None for record in advice.records):
        raise typer.Exit(1)


def candidates(
    engine: EngineOptions, drafts: list[str] | None, lengths: str | None, **settings: Any
) -> dict[str, EngineConfig]:
    """The configuration without drafts, and each candidate with each number of drafts. settings: of
    `EngineOptions.config`."""
    settings["compares"] = True
    found = {"baseline": engine.having(spec="off").config(**settings)}
    counts = None if lengths is None else whole_numbers("lengths", lengths)
    for text in dict.fromkeys(drafts or ["ngram"]):
        algorithm, draft = _parsed(text)
        own = engine.having(spec="v2", algorithm=algorithm, draft=draft)
        try:
            usual = 0 if counts else _usual_drafts(own.config(**settings))
            label = " ".join([algorithm, *([Path(draft).name] if draft else [])])
            label = (
                f"{label} {len(found)}" if any(name.startswith(f"{label} draft-tokens=") for name in found) else label
            )
            for count in counts or sorted({1, (usual + 1) // 2, usual}):
                found[f"{label} draft-tokens={count}"] = own.having(draft_tokens=str(count)).config(**settings)
        except SpecbatchError as error:
            raise refuse("candidate", text, str(error)) from error
    return found


def _usual_drafts(config: EngineConfig) -> int:
    """The number of drafts if none is asked for: that of a trained draft is in its files."""
    speculation = config.speculation
    if speculation.entry.has_trained_draft or speculation.entry.in_target:
        from specbatch.engine.setup.prepare import prepare

        return prepare(config, lambda line: None).config.speculation.num_drafts
    return speculation.num_drafts


def _parsed(text: str) -> tuple[str, str | None]:
    """Algorithm and draft of a candidate."""
    name, equals, rest = text.partition("=")
    if text == NO_SPECULATION:
        raise refuse("candidate", text, "the model without drafts is always measured; leave it out")
    if text in ALGORITHMS and ALGORITHMS[text].draft is None:
        return text, None
    if text in ALGORITHMS:
        raise refuse("candidate", text, f"this algorithm needs {ALGORITHMS[text].draft}; write {text}=DRAFT")
    if equals and name in ALGORITHMS:
        return name, rest
    config = Path(text) / "config.json"
    known = algorithm_of(read_json("candidate", config, "is no config")) if config.is_file() else None
    return known or "standalone", text
