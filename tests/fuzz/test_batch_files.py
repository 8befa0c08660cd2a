"""Mutated OpenAI batch files and prompt files through a whole job: each row has one result, or the job is refused."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from echo import Echo
from fuzzing import Fuzz
from mutate import dump_json, mutate_bytes, mutate_value
from openai_types import ErrorLine, OutputLine

from specbatch.config.engine_config import EngineConfig
from specbatch.core.sampling_params import SamplingParams
from specbatch.errors import SpecbatchError
from specbatch.jobs.batch_job import BatchJob
from specbatch.jobs.job_settings import JobSettings

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
COMMON = {"model": "m", "max_tokens": 5, "temperature": 0.7, "top_p": 0.9, "n": 2, "stop": ["a"], "seed": 3}
BATCH = [
    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": MESSAGES} | COMMON},
    {
        "custom_id": "b",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": ["x", "y"], "logprobs": 2, "top_k": 4, "min_tokens": 1} | COMMON,
    },
    {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": [[1, 2], [3]]}},
    {
        "custom_id": "d",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "frequency_penalty": 0},
    },
]
PROMPTS = [
    {"prompt": "The capital of France is", "id": 1, "sampling": {"temperature": 0.5, "n": 2, "stop": ["b"]}},
    {"messages": [{"role": "user", "content": "Name a river."}], "sampling": {"max_new_tokens": 3, "top_logprobs": 2}},
    {"prompt_token_ids": [3, 4, 5], "id": "x"},
    {"question": "How many?", "sampling": {"seed": 4, "min_tokens": 2}},
]


def mutated(random: Random, rows: list[dict[str, Any]]) -> list[bytes]:
    """The rows as lines, most of them with a hostile value somewhere, some with broken bytes."""
    lines = []
    for row in rows:
        value = mutate_value(random, row) if random.random() < 0.8 else row
        line = dump_json(value).encode("utf-8", "surrogatepass")
        lines.append(mutate_bytes(random, line).replace(b"\n", b"") if random.random() < 0.1 else line)
    return lines


def run_job(folder: Path, lines: list[bytes], **options: Any) -> tuple[BatchJob, list[dict[str, Any]]]:
    """The job over these lines, and the rows of its output and error file."""
    source, out = folder / "in.jsonl", folder / "out.jsonl"
    source.write_bytes(b"\n".join(lines))
    config = EngineConfig(model="m")
    settings = JobSettings(overwrite=True, chat_template=False, **options)
    job = BatchJob.open(source, out, config, SamplingParams(), settings=settings)
    assert job.run(Echo())  # type: ignore[arg-type]
    errors = Path(f"{out}.errors.jsonl")
    found = [json.loads(line) for path in (out, errors) if path.exists() for line in path.read_text().splitlines()]
    assert not job.partial.exists()
    return job, found


def test_openai_batch(fuzz: Fuzz, tmp_path: Path) -> None:
    """A good row at the front makes it a batch; every line that is not blank has one row in one of the files."""
    for random in fuzz.rounds(quick=40):
        lines = [json.dumps(BATCH[0]).encode(), *mutated(random, BATCH[1:])]
        job, found = run_job(tmp_path, lines)
        assert len(found) == job.total == sum(bool(line.strip()) for line in lines)
        for row in found:
            (OutputLine if row["error"] is None else ErrorLine).model_validate(row)
            if row["error"] is None:
                fuzz.outcome("answered rows")
            else:
                message = row["error"]["message"]
                assert message.strip()
                assert "\n" not in message
                assert len(message) < 2_000
                fuzz.outcome("error rows")


def test_prompt_file(fuzz: Fuzz, tmp_path: Path) -> None:
    """With --skip-bad malformed lines are left out; without it the job is refused before it runs."""
    for random in fuzz.rounds(quick=40):
        lines = [json.dumps(PROMPTS[0]).encode(), *mutated(random, PROMPTS)]
        try:
            job, found = run_job(tmp_path, lines, skip_bad=random.random() < 0.7)
        except SpecbatchError as error:
            for line in str(error).splitlines():  # one for each malformed line
                fuzz.refused(SpecbatchError(line))
            continue
        assert len({row["index"] for row in found}) == job.total
        fuzz.outcome("rows", len(found))
        fuzz.outcome("malformed lines", job.skipped)
