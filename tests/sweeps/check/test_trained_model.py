"""A check of the bundled model on the bundled prompts, in BF16: no alarm without a fault, and every fault is found.

Needs `specbatch models pull smollm2-135m`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import engine_faults
import pytest

from specbatch.config.engine_config import EngineConfig
from specbatch.config.speculation import Speculation
from specbatch.sweeps.check.options import CheckOptions
from specbatch.sweeps.check.report import CheckReport
from specbatch.sweeps.check.run import run_check
from specbatch.weights.known_models import KNOWN_MODELS

MODEL = "smollm2-135m"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not KNOWN_MODELS[MODEL].path.exists(), reason=f"{MODEL} is not downloaded"),
]

FAULTS: dict[str, engine_faults.Fault] = {
    "stale key and value": engine_faults.stale_kv,
    "position off by one": engine_faults.position_off_by_one,
    "rope offset of queries": engine_faults.rope_offset_of_queries,
    "dropped accepted token": engine_faults.dropped_accepted_token,
    "scale of one block": partial(engine_faults.wrong_block_scale, factor=2.0),
}


def check(folder: Path, speculation: Speculation) -> CheckReport:
    config = EngineConfig(
        model=MODEL, device="cpu", dtype="bfloat16", max_running=16, max_model_len=256, speculation=speculation
    )
    return run_check(config, CheckOptions(prompts=20, max_new_tokens=32), folder)


@pytest.mark.parametrize("draft", [None, "self:skip=18-25"])
def test_rounding_passes(tmp_path: Path, draft: str | None) -> None:
    report = check(tmp_path, Speculation("standalone", draft=draft) if draft else Speculation("ngram"))
    assert report.summary()["diverging"], "BF16 rounds"
    assert not report.fails, report.markdown()


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    FAULTS[name](monkeypatch)
    report = check(tmp_path, Speculation("ngram"))
    assert report.fails, report.markdown()
