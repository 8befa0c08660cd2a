"""Writes the results of an evaluation as lm-eval does: `MODEL/results_DATE.json` and `MODEL/samples_TASK_DATE.jsonl`.

The layout and the keys are those of lm-eval 0.4.13, so that its functions and what is built on them read a run. Its own
writer, `EvaluationTracker`, only logs an error of writing.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbatch.config.engine_config import EngineConfig
from specbatch.files.atomic_file import write_atomic, writing
from specbatch.records.run_record import RunRecord

if TYPE_CHECKING:
    from specbatch.evals.options import EvalOptions
    from specbatch.text.tokenizer import Tokenizer

MODEL = "specbatch"  # the name of the model in lm-eval's registry
_NUMBERS = ("accept_length", "accept_rate", "output_throughput", "scored_tokens", "input_throughput")
_LONGEST = 255  # bytes of a folder's name; for a longer one lm-eval writes nothing
_SECONDS = "total_evaluation_time_seconds"
_TABLES = (
    *("results", "groups", "group_subtasks", "configs", "versions", "n-shot", "higher_is_better", "n-samples"),
    "task_hashes",
)  # of a results file, by task
_DEFAULTS = EngineConfig().as_dict()


class TokenizerInfo:
    """What lm-eval writes about a tokenizer, under the names of transformers. A token that is not there is None."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = tokenizer.special_tokens
        ids = {text: index for index, text in enumerate(tokenizer.vocabulary()) if text}
        self.bos_token_id, self.eos_token_id = tokenizer.bos_id, tokenizer.eos_id
        names = {index: text for text, index in ids.items()}
        self.bos_token, self.eos_token = (
            None if index is None else names.get(index) for index in (self.bos_token_id, self.eos_token_id)
        )
        self.pad_token = special.get("pad_token")
        self.pad_token_id = None if self.pad_token is None else ids.get(self.pad_token)
        self.chat_template = tokenizer.chat_template


def save_lm_eval_files(
    folder: Path,
    results: Sequence[Mapping[str, Any]],
    record: RunRecord,
    tokenizer: Tokenizer | None,
    options: EvalOptions,
    started: float,
) -> None:
    """Write the results of one run into the existing `folder`, below a folder with the name of the model.

    results   what each `lm_eval.evaluate` of the run returned, with samples; a task that several have is that of the
              first
    tokenizer  None: not known, of a server's model
    started   when the run began, in seconds since 1970
    Raises UnwritableError.
    """
    from lm_eval.utils import handle_non_serializable, sanitize_model_name

    found = _merged(results)
    samples: dict[str, list[dict[str, Any]]] = found.pop("samples")
    model = record.config["model"]
    if model in (".", ".."):
        model = str(Path(model).resolve())
    body = {
        **found,
        "config": _config(record, options),
        "git_hash": _git_hash(),
        "date": started,
        **_environment(record),
        **_tokenizer(tokenizer, record),
        "task_hashes": {task: _task_hash(rows) for task, rows in samples.items()},
        **_tracked(model, options, tokenizer, started),
    }
    name = sanitize_model_name(model)
    place = folder / (name if len(name.encode()) <= _LONGEST else name[-_LONGEST // 4 :])
    date = datetime.now().isoformat().replace(":", "-")
    with writing(place):
        place.mkdir(exist_ok=True)
    for task, rows in samples.items():
        lines = (json.dumps(sample_row(row), default=handle_non_serializable, ensure_ascii=False) for row in rows)
        name = f"samples_{task.replace('/', '__')}_{date}.jsonl"
        write_atomic(place / name, "".join(f"{line}\n" for line in lines))
    text = json.dumps(body, indent=2, default=handle_non_serializable, ensure_ascii=False)
    write_atomic(place / f"results_{date}.json", text)  # last: what it names is there


def gather_lm_eval_files(folder: Path, parts: Sequence[Path]) -> None:
    """Move what `save_lm_eval_files` wrote into the folders of several tasks to `folder`, as the files of one run:
    programs that look for results in all folders would count a task twice. Tasks that the run was continued with join
    those of before.

    Interrupted at any point, another call finishes it. Numbers about speed are left out, as each is of one task.
    Raises UnwritableError.
    """
    every = sorted((file for part in parts for file in part.glob("*/results_*.json")), key=lambda file: file.name)
    if not every:
        return
    place = folder / every[-1].parent.name
    target = place / every[-1].name
    with writing(place):
        place.mkdir(exist_ok=True)
    every = [*sorted(file for file in place.glob("results_*.json") if file != target), *every]
    added = [_read(file) for file in every]
    bodies = [_read(target), *added] if target.exists() else added
    body = {**bodies[-1], "date": min(one["date"] for one in bodies)}
    for name in _TABLES:
        if table := {task: value for one in bodies for task, value in one.get(name, {}).items()}:
            body[name] = table
    body[_SECONDS] = str(sum(float(one[_SECONDS]) for one in added))
    body["config"] = {name: value for name, value in body["config"].items() if name not in _NUMBERS}
    for file in every:
        with writing(file):
            for samples in file.parent.glob(f"samples_*_{_date_of(file)}.jsonl"):
                samples.replace(place / samples.name.replace(_date_of(file), _date_of(target)))
    write_atomic(target, json.dumps(body, indent=2, ensure_ascii=False))
    for file in every:  # the one that gives the date last
        file.unlink()
        with suppress(OSError):  # other files are there
            file.parent.rmdir()


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _date_of(results: Path) -> str:
    return results.stem.removeprefix("results_")


def model_args(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a record that are not the defaults, as `--model_args` of lm-eval's command takes them."""
    if "server" in config:
        return {"model": config["model"], "base_url": config["device"], "send": config["send"]}
    found = {"pretrained": config["model"]}
    speculation: dict[str, Any] = config["speculation"]
    if speculation["algorithm"] != _DEFAULTS["speculation"]["algorithm"]:
        found["spec"] = speculation["schedule"]
        found |= _other(speculation, _DEFAULTS["speculation"], ("schedule",))
    found |= {f"{kind}_graph": mode for kind, mode in _other(config["graphs"], _DEFAULTS["graphs"]).items()}
    return found | _other(config, _DEFAULTS, ("model", "speculation", "graphs"))


def model_info(record: RunRecord) -> dict[str, Any]:
    """What lm-eval's `results["config"]` has about the model: its dtype, and how fast it answered."""
    numbers = {name: record.metrics[name] for name in _NUMBERS if record.metrics.get(name) is not None}
    prefix = "" if "server" in record.config else "torch."
    return {"model_dtype": f"{prefix}{record.caps['dtype']}", **numbers}


def _other(settings: Mapping[str, Any], defaults: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    return {
        name: value for name, value in settings.items() if name not in without and value != defaults.get(name, value)
    }


def _merged(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Tables of several evaluations as one."""
    found: dict[str, Any] = {}
    for one in results:
        for name, table in one.items():
            known = found.setdefault(name, {})
            known |= {task: value for task, value in table.items() if task not in known}
    return found


def _config(record: RunRecord, options: EvalOptions) -> dict[str, Any]:
    from specbatch.evals.generation import parsed  # imports lm_eval

    return {
        "model": MODEL,
        "model_args": model_args(record.config),
        **model_info(record),
        "batch_size": record.caps.get("max_running"),
        "batch_sizes": [],
        "device": record.caps.get("device"),
        "use_cache": None,
        "limit": options.limit,
        "bootstrap_iters": options.bootstrap_iters,
        "gen_kwargs": {**({} if options.gen_kwargs is None else parsed(options.gen_kwargs)), **options.sampling},
        "random_seed": 0,
        "numpy_seed": 1234,
        "torch_seed": record.config["seed"],
        "fewshot_seed": options.seed,
    }


def _git_hash() -> str | None:
    """The commit of the working folder, as `lm_eval.loggers.utils.get_git_commit_hash`, without Git's messages."""
    try:
        found = subprocess.run(["git", "describe", "--always"], capture_output=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.decode(errors="replace").strip()


def _environment(record: RunRecord) -> dict[str, Any]:
    """As `lm_eval.loggers.utils.add_env_info`. Its text about the machine takes a second and seven processes; this one
    has what the record knows."""
    from lm_eval.loggers.utils import get_commit_from_path

    known = {f"{name} version": text for name, text in record.versions.items()} | record.hardware
    return {
        "pretty_env_info": "\n".join(f"{name}: {value}" for name, value in known.items()),
        "transformers_version": version("transformers"),
        "lm_eval_version": version("lm_eval"),
        "upper_git_hash": get_commit_from_path(Path.cwd().parent),
    }


def _tokenizer(tokenizer: Tokenizer | None, record: RunRecord) -> dict[str, Any]:
    """As `lm_eval.loggers.utils.add_tokenizer_info`."""
    longest = record.caps.get("max_model_len")
    if tokenizer is None:
        return {"max_length": longest}
    info = TokenizerInfo(tokenizer)
    tokens = {
        f"tokenizer_{name}_token": [getattr(info, f"{name}_token"), str(getattr(info, f"{name}_token_id"))]
        for name in ("pad", "eos", "bos")
    }
    return {**tokens, "eot_token_id": tokenizer.eos_id, "max_length": longest}


def _tracked(model: str, options: EvalOptions, tokenizer: Tokenizer | None, started: float) -> dict[str, Any]:
    """The fields of lm-eval's `GeneralConfigTracker`."""
    from lm_eval.loggers.evaluation_tracker import GeneralConfigTracker

    tracker = GeneralConfigTracker()
    tracker.log_experiment_args(
        model_source=MODEL,
        model_args={"pretrained": model},
        system_instruction=options.system_instruction,
        chat_template=tokenizer.chat_template if tokenizer is not None and options.chat_template else None,
        fewshot_as_multiturn=options.as_multiturn if options.chat_template else None,
    )
    return asdict(tracker) | {_SECONDS: str(time.time() - started)}


def _task_hash(rows: Sequence[Mapping[str, Any]]) -> str:
    from lm_eval.utils import hash_string

    return str(hash_string("".join(row["doc_hash"] + row["prompt_hash"] + row["target_hash"] for row in rows)))


def sample_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row as `EvaluationTracker.save_results_samples` writes it: one type per field, as `datasets` needs it."""
    from lm_eval.utils import sanitize_list

    arguments = {
        f"gen_args_{index}": {f"arg_{place}": value for place, value in enumerate(one)}
        for index, one in enumerate(row["arguments"])
    }
    texts = {name: sanitize_list(row[name]) for name in ("resps", "filtered_resps")}
    return {**row, "arguments": arguments, **texts, "target": str(row["target"])}
