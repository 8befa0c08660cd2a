"""Opens the checkpoints of an engine and refuses what cannot run, before anything is loaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from typing import NamedTuple

import torch

from specbatch import weights
from specbatch.config.engine_config import EngineConfig
from specbatch.drafters.base import DraftPlan
from specbatch.drafters.corpus import CorpusPlan
from specbatch.drafters.corpus_files import plan_corpus
from specbatch.errors import SpecbatchError, refuse
from specbatch.kernels.attention.hopper import Layout
from specbatch.kernels.attention.prefill.prefill_backends import PrefillAttention, prefill_backend
from specbatch.kernels.common.block_sizes import SCALE_BLOCK
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.formats.cache_scales import FP8
from specbatch.runtime.device import find_device, find_dtype, type_name
from specbatch.runtime.loader import quantizes_activations
from specbatch.weights import Checkpoint, Log
from specbatch.weights.cache_scales import read_cache_scales
from specbatch.weights.draft_heads import check_random

MOST_RANKS = 16  # that are tried when others do not work


class Prepared(NamedTuple):
    """What is known of an engine before its memory is planned. config: with the settings that the draft decides filled
    in; model: the target's config, of one rank if it is divided, as that of the draft; attention: by role; corpus: None
    without one."""

    config: EngineConfig
    device: torch.device
    target: Checkpoint
    model: ModelConfig
    dtype: torch.dtype
    attention: dict[str, PrefillAttention]
    draft: DraftPlan
    corpus: CorpusPlan | None

    @property
    def max_position(self) -> int:
        """Positions that target and draft have."""
        return min(self.model.max_position, self.draft.config.max_position)


def prepare(config: EngineConfig, log: Log, *, shared: Decoder | None = None) -> Prepared:
    """Open the checkpoints and refuse what cannot run, such as a draft for another model, before anything is loaded.

    shared: the target, loaded by another engine.
    """
    device = find_device(config.device)
    config = replace(config, graphs=config.graphs.on(device.type))
    check_device(config, device)
    target = weights.open_checkpoint(
        config.model,
        config.load_format,
        seed=config.seed,
        tokenizer=config.tokenizer,
        log=log,
        device=str(device),
        max_model_len=config.max_model_len,
    )
    dtype = find_dtype(config.dtype, target.config.dtype, device)
    attention = {
        "target": prefill_backend(
            config.attention_backend,
            device,
            layout=Layout(dtype, target.config.head_dim, config.page_size),
            latents=target.config.has_latents,
            deterministic=config.deterministic,
            log=log,
        )
    }
    if shared is not None and (dtype, device) != (shared.dtype, shared.device):
        works = f"the weights are {type_name(shared.dtype)} on {shared.device}; use the same"
        raise refuse("weights_of", f"{type_name(dtype)} on {device}", works)
    sharing = "" if shared is None else ", weights shared"
    log(f"model: {target.name} ({target.origin}), {type_name(dtype)} on {device}{sharing}; {target.config.rope}")
    if target.config.note is not None:
        log(target.config.note)
    config = replace(config, kv_dtype=choose_kv_dtype(config, target, device, log))
    if config.deterministic and device.type == "cuda":
        _check_deterministic_on_cuda(config, device, target.config, dtype)
    if config.load_format == "dummy" and config.speculation.draft is not None:
        check_random(config.speculation.draft)
    draft: DraftPlan = import_module(config.speculation.entry.module).plan(target, config, log)
    config = replace(config, speculation=config.speculation.with_num_drafts(draft.num_drafts))
    to_fp8 = config.speculation.quantizes_draft
    if to_fp8 and draft.config.hidden_size % SCALE_BLOCK:
        works = f"the draft's hidden size is {draft.config.hidden_size}, which must be a multiple of {SCALE_BLOCK}"
        raise refuse("draft_quantization", config.speculation.draft_quantization, f"{works}; leave it out")
    models = target.config, draft.config
    if not config.fp8_activations and not quantizes_activations(True, dtype, device, *models, at_load=to_fp8):
        log("fp8_activations: off has no effect: this model has no FP8 GEMM on this device")
    attention["draft"] = prefill_backend(
        config.draft_attention_backend,
        device,
        "draft_attention_backend",
        layout=Layout(dtype, draft.config.head_dim, config.page_size),
        latents=draft.config.has_latents,
        deterministic=config.deterministic,
    )
    model = target.config
    if config.tensor_parallel > 1:
        model, draft = _divided(model, draft, config.tensor_parallel)
    if draft.catch_up == "target" and not _can_run_again(config, model):
        draft = replace(draft, catch_up="none")
    return Prepared(
        config, device, target, model, dtype, attention, draft, plan_corpus(config.speculation, target, log)
    )


def _can_run_again(config: EngineConfig, target: ModelConfig) -> bool:
    """Whether the target can compute features of committed tokens again: it keeps all of their keys, and no state that
    would advance twice. A corpus learns from each step, with the drafter."""
    return not target.recurrent_layers and target.largest_window is None and config.speculation.corpus is None


def _divided(model: ModelConfig, draft: DraftPlan, ranks: int) -> tuple[ModelConfig, DraftPlan]:
    """The parts of one rank. Refused: models that cannot be divided, with the numbers of ranks that work."""
    whose = ""
    try:
        part = model.divided(ranks)
        whose = "for the draft, "
        return part, draft.divided(ranks)
    except SpecbatchError as error:
        found = []
        for size in range(2, MOST_RANKS + 1):
            with suppress(SpecbatchError):
                model.divided(size), draft.divided(size)
                found.append(str(size))
        works = f"use {' or '.join(found)}" if found else "this model runs on one device only"
        raise refuse("tensor_parallel", ranks, f"{whose}{error.works}; {works}") from None


def check_device(config: EngineConfig, device: torch.device) -> None:
    """Refuse what the device cannot do."""
    if device.type == "cuda":
        return
    for setting, value in (("graphs.decode", config.graphs.decode), ("graphs.prefill", config.graphs.prefill)):
        if value != "off":
            raise refuse(setting, value, "needs a CUDA device and this engine runs on a CPU; use off")
    if config.kv_dtype == "fp8":
        raise refuse("kv_dtype", config.kv_dtype, "needs a CUDA device and this engine runs on a CPU; use auto")


def choose_kv_dtype(config: EngineConfig, target: Checkpoint, device: torch.device, log: Log) -> str:
    """`kv_dtype`, or "fp8" where auto follows the checkpoint. A CPU has no FP8 KV cache."""
    made_for = target.config.cache_type
    if config.kv_dtype == "fp8" and made_for not in (None, FP8) and target.cache:
        works = f"the checkpoint's scales are those of a KV cache in {made_for}; use model"
        raise refuse("kv_dtype", config.kv_dtype, works)
    if config.kv_dtype == "fp8" or (config.kv_dtype == "auto" and made_for == FP8 and device.type == "cuda"):
        read_cache_scales(target)  # refuses some before anything is loaded
        return "fp8"
    if made_for or target.cache:
        log(f"KV cache: in the model's dtype; the checkpoint was made for {made_for or FP8}, whose scales are not used")
    return config.kv_dtype


def _check_deterministic_on_cuda(
    config: EngineConfig, device: torch.device, target: ModelConfig, dtype: torch.dtype
) -> None:
    """Refuse what has no deterministic kernels on a CUDA device, and devices on which their bits were not compared. A
    draft may be any model: no bit of a result depends on it."""
    why = "with deterministic=True a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        works = f"its kernels were compared on Hopper only, and {device} has compute capability {capability}"
        raise refuse("deterministic", True, f"{works}; use an H100 or H200, or device='cpu'")
    if config.attention_backend not in ("auto", "triton"):
        raise refuse("attention_backend", config.attention_backend, f"{why} runs triton only; use auto or triton")
    is_fp8 = target.quantization is not None and any(form.has_fp8_gemm for form in target.quantization.forms)
    if is_fp8 and not quantizes_activations(config.fp8_activations, dtype, device, target):
        raise refuse("fp8_activations", False, f"{why} multiplies FP8 weights by FP8 activations only; use True")
    for size in target.input_widths:
        if size % 8:
            works = f"{why} needs matrices whose columns are a multiple of 8, not {size}; use device='cpu'"
            raise refuse("deterministic", True, works)
