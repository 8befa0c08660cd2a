"""Starts on a GPU: with an empty cache kernels are compiled in parallel, and tokens are those of a warm start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

START = """
import json, sys
from specbatch import Engine, EngineConfig, SamplingParams
from specbatch.config.engine_config import Graphs
from specbatch.config.speculation import Speculation

lines = []
config = EngineConfig("qwen3-0.6b", load_format="dummy", device="cuda", max_running=8, max_model_len=1024, kv_pages=600,
    prefill_chunk=512, graphs=Graphs("whole", "piecewise"), speculation=Speculation(sys.argv[1], draft=sys.argv[2]))
engine = Engine(config, log=lines.append)
prompts = [list(range(5, 5 + length)) for length in (1, 7, 40, 300, 511)]
done = engine.generate(prompts, SamplingParams(max_new_tokens=24, ignore_eos=True), concurrency=1)
print(json.dumps({"tokens": [item.token_ids for item in done], "lines": lines, "caps": engine.caps}))
"""


def start(cache: Path, *speculation: str) -> Any:
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", START, *speculation]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("speculation", [("eagle3", "dummy"), ("standalone", "self:skip=14"), ("dflash", "dummy")])
def test_a_cold_start_gives_the_tokens_of_a_warm_one(tmp_path: Path, speculation: tuple[str, str]) -> None:
    cold, warm = start(tmp_path, *speculation), start(tmp_path, *speculation)
    assert cold["tokens"] == warm["tokens"]
    compiled = [[line for line in found["lines"] if line.startswith("kernels: ")] for found in (cold, warm)]
    assert len(compiled[0]) == 1, "a cold start rehearses"
    assert not compiled[1], "a warm start does not"
    assert not any("one by one" in line for line in cold["lines"])
    # What a rehearsal misses is compiled while graphs are recorded.
    assert cold["caps"]["capture_s"] < warm["caps"]["capture_s"] + 3
