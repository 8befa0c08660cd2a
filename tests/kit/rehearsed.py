"""Rehearses an engine with EAGLE-3 for Hopper, which needs no GPU, and compiles its kernels in parallel. One JSON line.
A process of its own: in the tests, kernels are interpreted."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from stand_ins import fake_graphs
from triton.backends.compiler import GPUTarget

from specbatch import Engine, EngineConfig
from specbatch.config.engine_config import Graphs
from specbatch.config.speculation import Speculation
from specbatch.engine.device.device_worker import DeviceWorker
from specbatch.kernels.attention.prefill.prefill_backends import TritonPrefill
from specbatch.kernels.dispatch import force_kernels
from specbatch.progress.bars import Report
from specbatch.runtime.parallel_compilation import Compiled, compile_ahead

HOPPER = SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    launcher_cls=lambda src, metadata: None,
)


def main(described: Mapping[str, Any], **settings: Any) -> None:
    """described: a config.json; settings: of `EngineConfig`."""
    triton.runtime.driver.set_active(HOPPER)
    found: dict[str, Any] = {}

    def compile_kernels(worker: DeviceWorker, report: Report) -> Compiled:
        recordings = worker.recordings()
        before = [item.clone() for item in state_of(worker)]
        with force_kernels(), torch.inference_mode():
            seen: list[tuple[int, int]] = []
            start, parts = time.perf_counter(), [item.capture() for item in recordings]
            compiled = compile_ahead(parts, worker.warm_ups(), lambda done, total: seen.append((done, total)))
            found.update(compiled=len(compiled.kernels), kernels=seen[-1][1], seconds=time.perf_counter() - start)
        found["changed"] = any(not torch.equal(*pair) for pair in zip(before, state_of(worker), strict=True))
        found.update(names=sorted(set(compiled.kernels)), missed=list(compiled.missed))
        return compiled

    with pytest.MonkeyPatch.context() as patch:
        fake_graphs(patch)
        patch.setattr("specbatch.kernels.gemm.dense.skinny_gemm_triton.is_skinny", lambda rows, weight: rows <= 16)
        patch.setattr("specbatch.engine.setup.prepare.prefill_backend", lambda *_, **__: TritonPrefill())
        patch.setattr(DeviceWorker, "compile_kernels", compile_kernels)
        patch.setattr(DeviceWorker, "record_graphs", lambda *_: 0)
        with TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(described))
            Engine(EngineConfig(folder, load_format="dummy", device="cpu", dtype="bfloat16", **settings))
    print(json.dumps(found))


def state_of(worker: DeviceWorker) -> list[torch.Tensor]:
    batch, cache = worker.batch, worker.decode_step.cache
    return [batch.tokens, batch.lengths, batch.page_table, cache.keys, cache.values]


if __name__ == "__main__":
    QWEN3 = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 8000,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    }  # fmt: skip
    main(
        QWEN3 | json.loads(sys.argv[1] if sys.argv[1:] else "{}"),
        speculation=Speculation("eagle3", draft="dummy"),
        graphs=Graphs("whole", "piecewise"),
        prefill_chunk=2048,
        max_running=64,
        max_model_len=4096,
        kv_pages=512,
    )
