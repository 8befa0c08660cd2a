"""A check passes engines without a fault, whatever they are, and finds faults of a verify in 16 bits."""

from __future__ import annotations

import random as random_module
from pathlib import Path
from typing import Any

import engine_faults
import pytest
from crossed import slow_but
from engine_faults import config_of
from lossless import fits, slots_per_step
from opening import opening
from stand_ins import fake_graphs, late_results
from targets import SPECULATIONS, TARGETS, Targets

from specbatch.config.engine_config import Graphs
from specbatch.memory.page_pool import pages_for, reserved_length
from specbatch.sweeps.check.options import CheckOptions
from specbatch.sweeps.check.report import CheckReport
from specbatch.sweeps.check.run import run_check

TOKENS, LONGEST = 16, 64


def write_prompts(path: Path, random: random_module.Random, count: int) -> Path:
    """Random texts in which parts repeat."""
    lines = []
    for _ in range(count):
        part = [random.randint(3, 36) for _ in range(random.randint(2, 16))]
        lines.append(f'{{"prompt_token_ids": {part + part[: random.randint(0, len(part))]}}}\n')
    path.write_text("".join(lines))
    return path


def check(
    targets: Targets,
    folder: Path,
    target: str,
    drafter: str,
    *,
    seed: int = 0,
    **changes: Any,
) -> CheckReport:
    """A check over 16 prompts; changes: see `config_of`."""
    config = config_of(targets, target, drafter, **{"max_running": 8, "max_model_len": LONGEST} | changes)
    source = write_prompts(folder / "in.jsonl", random_module.Random(seed), 16)
    with opening(lambda model, *_, **__: targets.checkpoint(model)):
        return run_check(config, CheckOptions(source=source, max_new_tokens=TOKENS), folder)


@pytest.mark.parametrize("seed", slow_but((2,), range(200)))
def test_engine_without_a_fault_passes(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random = random_module.Random(seed)
    fake_graphs(monkeypatch)
    if random.random() < 0.3:
        late_results(monkeypatch)
    target = random.choice(list(TARGETS))
    drafter = random.choice([name for name in SPECULATIONS if fits(name, target)])
    page_size = random.choice([1, 2, 4, 16])
    slots = max(16, slots_per_step(**SPECULATIONS[drafter]))  # drafts made in one pass reserve up to 16
    need = pages_for(reserved_length(LONGEST, slots), page_size)
    report = check(
        targets,
        tmp_path,
        target,
        drafter,
        seed=seed,
        schedule=random.choice(["v1", "v2"]),
        dtype=random.choice(["float32", "bfloat16", "bfloat16", "float16"]),
        max_running=random.choice([1, 3, 16]),
        page_size=page_size,
        kv_pages=need * random.choice([1, 2, 8]) + 1,
        prefix_cache=random.random() < 0.7,
        prefill_chunk=random.choice([5, 16, 256]),
        graphs=Graphs(decode=random.choice(["off", "whole"]), prefill=random.choice(["off", "piecewise"])),
    )
    assert not report.fails, report.markdown()


# Faults that a target of another family would show as well are injected into the one whose texts are clearest.
FAULTS: dict[str, tuple[engine_faults.Fault, str, str]] = {
    "stale key and value": (engine_faults.stale_kv, "llama", "model"),
    "position off by one": (engine_faults.position_off_by_one, "llama", "model"),
    "rope offset of queries": (engine_faults.rope_offset_of_queries, "llama", "ngram"),
    "dropped accepted token": (engine_faults.dropped_accepted_token, "llama", "model"),
    "one wrong token": (engine_faults.one_wrong_token, "llama", "ngram"),
    "state of a delta layer": (engine_faults.state_not_rolled_back, "qwen3.5", "ngram"),
    "state of a Mamba layer": (engine_faults.state_not_rolled_back, "nemotron-h", "ngram"),
    "state of a convolution": (engine_faults.state_not_rolled_back, "lfm2", "ngram"),
}


@pytest.mark.parametrize("name", slow_but(("position off by one", "state of a delta layer"), FAULTS))
def test_fault_of_a_verify_is_found_in_bfloat16(
    targets: Targets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fault, target, drafter = FAULTS[name]
    fault(monkeypatch)
    report = check(targets, tmp_path, target, drafter, dtype="bfloat16", max_running=16)
    assert report.fails, report.markdown()
