"""Engine configuration: `EngineConfig` with its parts `Speculation` and `Graphs`.

Each field has its help text and rule in its metadata (`specbatch.config.settings`), from which the command line derives
its options. Invalid values and combinations are rejected here, before anything is loaded.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from specbatch.config.draft_shape import AUTO
from specbatch.config.job_size import JobSize
from specbatch.config.settings import FLAG, check_fields, foreign_names, number, or_auto, setting, whole
from specbatch.config.speculation import Speculation
from specbatch.errors import MOST_SEED, refuse

DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DECODE_GRAPHS = ("off", "whole", "auto")
PREFILL_GRAPHS = ("off", "piecewise", "auto")
ATTENTION_BACKENDS = ("auto", "gluon", "triton", "torch")
LIMIT_RUNNING = 1 << 14  # requests: beyond that a step takes proportionally longer, so that nothing is gained
KV_DTYPES = ("auto", "fp8", "model")
STATE_DTYPES = ("fp32", "bf16", "fp16")
MODEL, BATCH, CACHE, EXECUTION = "Model", "Batch and memory", "Cache and quantization", "Execution"  # boxes of --help


@dataclass(frozen=True)
class Graphs:
    """CUDA graphs: one per batch size for decode iterations, one set per number of tokens for prefill passes."""

    decode: str = setting(
        "off",
        "whole: one CUDA graph for each decode iteration (draft, verify, accept, commit). auto: whole on a CUDA "
        "device, off on a CPU.",
        choices=DECODE_GRAPHS,
    )
    prefill: str = setting(
        "off",
        "piecewise: CUDA graphs for the parts of a prefill pass between attention layers. auto: piecewise on a CUDA "
        "device, off on a CPU.",
        choices=PREFILL_GRAPHS,
    )

    def __post_init__(self) -> None:
        check_fields(self, "graphs.")

    def on(self, device_type: str) -> Graphs:
        """With the choice of auto on a device of this type."""
        whole, piecewise = ("whole", "piecewise") if device_type == "cuda" else ("off", "off")
        return Graphs(
            whole if self.decode == "auto" else self.decode, piecewise if self.prefill == "auto" else self.prefill
        )

    def __str__(self) -> str:
        asked = [f"{name} {mode}" for name, mode in asdict(self).items() if mode != "off"]
        return f"graphs: {', '.join(asked)}" if asked else "eager"

    @property
    def any(self) -> bool:
        return (self.decode, self.prefill) != ("off", "off")


AUTO_GRAPHS = Graphs("auto", "auto")

# Parameters of vLLM and SGLang that users try, and what works here.
_FOREIGN_NAMES = {
    "tensor_parallel_size": "use tensor_parallel",
    "tp_size": "use tensor_parallel",
    "data_parallel_size": "use data_parallel",
    "dp_size": "use data_parallel",
    "gpu_memory_utilization": "use memory_fraction",
    "mem_fraction_static": "use memory_fraction",
    "max_num_seqs": "use max_running",
    "block_size": "use page_size",
    "enable_prefix_caching": "use prefix_cache",
    "kv_cache_dtype": "use kv_dtype",
    "speculative_config": "use speculation=Speculation(algorithm, draft=...)",
    "enforce_eager": "leave it out; graphs=Graphs() runs eagerly",
    "trust_remote_code": "leave it out; code of a checkpoint never runs",
}


@foreign_names(_FOREIGN_NAMES)
@dataclass(frozen=True)
class EngineConfig:
    """Everything an `Engine` is built from.

    fp8_activations applies to BF16 and FP16 activations. Each row gets one scale per 128 columns, as a checkpoint's
    `activation_scheme: dynamic` asks for.

    job: what is known of the requests, for max_running, prefill_chunk and memory_fraction "auto". An engine's `caps`
    have the numbers that it chose, and why.
    """

    model: str = setting(
        "smollm2-135m",
        "Known name, hub id, folder or .gguf file; for dummy weights, a named shape or a config.json.",
        panel=MODEL,
    )
    device: str = setting("auto", "auto (CUDA if there is a GPU), cpu, cuda or cuda:N.", panel=MODEL)
    tensor_parallel: int = setting(1, "Divide the model over N devices of this machine.", whole(1))
    data_parallel: int = setting(
        1, "Run N replicas of the model, each on devices of its own, on one queue of prompts.", whole(1)
    )
    dtype: str = setting(
        "auto",
        "Data type of the computation. auto: float32 on a CPU, the checkpoint's dtype on a GPU.",
        choices=DTYPES,
        panel=MODEL,
    )
    load_format: str = setting(
        "auto", "dummy: random weights, for a named shape or a config.json.", choices=LOAD_FORMATS, panel=MODEL
    )
    tokenizer: str | None = setting(
        None, "Known name, folder, .gguf file or hub id of a tokenizer to use instead of the model's own.", panel=MODEL
    )
    max_running: int | Literal["auto"] = setting(
        AUTO,
        "Requests that decode at the same time. auto: as many as the GPU's memory holds, up to 1024 (2048 of a mixture "
        "of experts); 32 on a CPU.",
        or_auto(whole(1, LIMIT_RUNNING, f"use a whole number of at least 1 and at most {LIMIT_RUNNING}")),
        panel=BATCH,
        metavar="INTEGER|auto",
    )
    max_model_len: int | None = setting(
        None, "Maximum prompt + output, in tokens. Default: the model's context length.", whole(2), panel=BATCH
    )
    page_size: int = setting(16, "Tokens per KV page.", whole(1), panel=BATCH)
    kv_pages: int | None = setting(
        None,
        "Pages in the KV pool. Default: enough for max_running requests of full length, limited by memory.",
        whole(2),
        panel=BATCH,
    )
    memory_fraction: float | Literal["auto"] = setting(
        AUTO,
        "Share of the device's free memory for weights and KV pages. auto: all but a reserve, 0.93 of an empty H200; "
        "0.8 on a CPU.",
        or_auto(number(lambda share: 0 < share <= 1, "use a fraction above 0 and up to 1")),
        panel=BATCH,
        metavar="FLOAT|auto",
    )
    prefill_chunk: int | Literal["auto"] = setting(
        AUTO,
        "Maximum number of prompt tokens computed in one step. auto: up to 16384, as the GPU's memory allows; 2048 on "
        "a CPU.",
        or_auto(whole(1)),
        panel=BATCH,
        metavar="INTEGER|auto",
    )
    prefix_cache: bool = setting(
        True, "Keep the KV pages of finished prompts for later ones with the same prefix.", FLAG, panel=CACHE
    )
    kv_dtype: str = setting(
        "auto",
        "Data type of the KV cache. auto: FP8 on a GPU if the checkpoint was made for it, else the model's dtype. fp8: "
        "FP8 (e4m3), with the checkpoint's scales or computed ones. model: the model's dtype.",
        choices=KV_DTYPES,
        panel=CACHE,
    )
    fp8_activations: bool = setting(
        True, "For FP8 weights: quantize activations to FP8 as well, and run GEMMs in FP8.", FLAG, panel=CACHE
    )
    state_dtype: str = setting(
        "fp32", "Data type of the matrix states of recurrent layers.", choices=STATE_DTYPES, panel=CACHE
    )
    attention_backend: str = setting(
        "auto",
        "Attention backend for prompts. auto: gluon on Hopper GPUs where it can, else triton; torch on a CPU.",
        choices=ATTENTION_BACKENDS,
    )
    draft_attention_backend: str = setting(
        "auto", "Attention backend for the prompts of a draft with attention over them.", choices=ATTENTION_BACKENDS
    )
    deterministic: bool = setting(
        False,
        "Tokens and log-probabilities of a request do not depend, in any bit, on the draft, the batch, the schedule, "
        "chunks or cached prefixes. On CPUs, and on Hopper GPUs with some models.",
        FLAG,
        panel=CACHE,
    )
    seed: int = setting(
        0, "Seed for requests that have none, for random prompts and for dummy weights.", whole(0, MOST_SEED)
    )
    speculation: Speculation = field(default_factory=Speculation)
    graphs: Graphs = AUTO_GRAPHS
    job: JobSize = field(default_factory=JobSize)

    def __post_init__(self) -> None:
        if not self.model or not isinstance(self.model, str):
            raise refuse("model", self.model, "name a model, for example smollm2-135m")
        if not isinstance(self.job, JobSize):
            raise refuse("job", self.job, "give a JobSize, such as JobSize(requests=1500, prompt_tokens=300)")
        if not isinstance(self.graphs, Graphs):
            raise refuse("graphs", self.graphs, "give a Graphs, such as Graphs(decode='whole')")
        if not isinstance(self.speculation, Speculation):
            raise refuse("speculation", self.speculation, "give a Speculation, such as Speculation(algorithm='ngram')")
        takes = self.speculation.entry.settings
        if self.draft_attention_backend != "auto" and "draft_attention_backend" not in takes:
            works = f"{self.speculation.algorithm!r} computes no attention for the prompts of a draft; leave it out"
            raise refuse("draft_attention_backend", self.draft_attention_backend, works)
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", str(self.device)):
            raise refuse("device", self.device, "use auto, cpu, cuda or cuda:N")
        check_fields(self)
        if self.deterministic:
            self._check_deterministic()
        if self.speculation.verify_budget is not None and self.tensor_parallel > 1:
            works = f"verify_budget={self.speculation.verify_budget} is for models on one device; use 1"
            raise refuse("tensor_parallel", self.tensor_parallel, works)

    def as_dict(self) -> dict[str, Any]:
        """The settings, as records have them. The job is none: an engine's `caps` say what followed from it."""
        return {name: value for name, value in asdict(self).items() if name != "job"}

    def _check_deterministic(self) -> None:
        if self.speculation.verification != "token":
            works = "with deterministic=True drafts are not verified by rejection sampling; use 'token'"
            raise refuse("verification", self.speculation.verification, works)
        if self.tensor_parallel > 1:
            works = "with deterministic=True a model is not divided, because sums over devices are not fixed; use 1"
            raise refuse("tensor_parallel", self.tensor_parallel, works)
