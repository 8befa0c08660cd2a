"""Backends of prefill attention: the Gluon and Triton kernels, and torch.

All see the same call: the keys and values of a pass lie in the cache already, and those of the pass itself are
also handed over as tensors where the caller has them (`k_new`, `v_new`), so that a prompt without a prefix need not
be gathered from its pages.

`auto` is gluon on Hopper GPUs where it has the model's heads, and triton on others: there it beat torch's
FlashAttention 2 on every shape measured (`results/h200/prefill.md`; heads of 64, 80 and 256 too). cuDNN, through
scaled_dot_product_attention, is not among them: it prepares 55 ms for every length that it has not met, which is more
than the whole prefill of 2,048 tokens, and aligns its causal mask with the first key, which is wrong for a chunk after
a prefix. float32 in torch is exact only where the scores are written to memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from specbatch.errors import refuse
from specbatch.kernels.attention.deterministic.span_attention import span_prefill_attention
from specbatch.kernels.attention.hopper import HALVES, Layout, gpu_of, not_gluon
from specbatch.kernels.attention.paged_attention import prefill_attention_ref
from specbatch.kernels.attention.queries import PrefillInputs
from specbatch.kernels.attention.stored_kv import gather_stored
from specbatch.kernels.dispatch import is_deterministic

NAMES = ("auto", "gluon", "triton", "torch")
FEWEST_KEYS = 1024  # of a prompt of 2,048 tokens: TTFT on an H200 was 1% shorter, and of 1,024 tokens 1% longer


class PrefillAttention(Protocol):
    """Causal attention of the query rows of `spans`; `name` is what runs, for the record. `recordable`: given
    `StaticRaggedBatch`, it reads all that changes from the device."""

    @property
    def name(self) -> str: ...

    @property
    def recordable(self) -> bool: ...

    def __call__(self, inputs: PrefillInputs) -> torch.Tensor:
        """Returns [T, count, dim], in the memory of `inputs.out` if that is given and the backend can."""
        ...


def prefill_backend(
    name: str,
    device: torch.device,
    setting: str = "attention_backend",
    *,
    layout: Layout | None = None,
    latents: bool = False,
    deterministic: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> PrefillAttention:
    """The backend called `name`, one of NAMES. layout: without it, `auto` is not gluon; latents: the model has
    latent attention, which has kernels of its own, as has deterministic mode; log: told why `auto` is not gluon.
    Refuses, naming `setting`, what cannot run."""
    if name not in NAMES:
        raise refuse(setting, name, f"use one of {', '.join(NAMES)}")
    if latents and device.type == "cuda" and name not in ("auto", "triton"):
        raise refuse(setting, name, "has no multi-head latent attention here; use triton or auto")
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        return _Torch()
    if device.type != "cuda":
        raise refuse(setting, name, "needs a CUDA device; use torch or auto")
    if name == "triton" or (name == "auto" and (latents or deterministic or layout is None)):
        return TritonPrefill()
    assert layout is not None
    reason = "has no deterministic mode" if deterministic else not_gluon(gpu_of(device), layout)
    if reason is None:
        return GluonPrefill()
    if name == "gluon":
        raise refuse(setting, name, f"{reason}; use triton or auto")
    log(f"{setting}: auto is triton, because gluon {reason}")
    return TritonPrefill()


def _packed(inputs: PrefillInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all spans, span by span: [sum of ends, kv, dim], in the type of q."""
    q, k_new, v_new, k_cache, v_cache, spans, _, _, _, k_scale, v_scale = inputs
    if spans.fresh and k_new is not None and v_new is not None:
        return k_new, v_new
    k, v = (
        gather_stored(cache.flatten(0, 1), spans.key_slots, q.dtype, scale)
        for cache, scale in ((k_cache, k_scale), (v_cache, v_scale))
    )
    return k, v


class GluonPrefill:
    """The kernel for Hopper. Of fewer than so many keys for a query, on average, its large tiles take longer than those
    of the Triton kernel, which is called instead; also for short chunks after a prefix in an FP8 cache, as it converts
    keys by itself."""

    name = "gluon"
    recordable = True

    def __init__(self, fewest_keys: int = FEWEST_KEYS) -> None:
        self._fewest_keys = fewest_keys

    def __call__(self, inputs: PrefillInputs) -> torch.Tensor:
        from specbatch.kernels.attention.prefill import prefill_attention_gluon, prefill_attention_triton
        from specbatch.kernels.attention.prefill.unpacked_cache_triton import unpacked

        inputs = unpacked(inputs)
        has_rows = inputs.spans.fresh and inputs.k_new is not None and inputs.v_new is not None
        is_readable = has_rows or inputs.k_cache.dtype == inputs.q.dtype
        if is_readable and inputs.spans.keys_per_query >= self._fewest_keys:
            return prefill_attention_gluon.prefill_attention(inputs)
        return prefill_attention_triton.prefill_attention(inputs)


class TritonPrefill:
    name = "triton"
    recordable = True

    def __call__(self, inputs: PrefillInputs) -> torch.Tensor:
        from specbatch.kernels.attention.deterministic import span_attention_triton
        from specbatch.kernels.attention.prefill.prefill_attention_triton import prefill_attention

        if is_deterministic():
            return span_attention_triton.prefill_attention(inputs)
        return prefill_attention(inputs)


class _Torch:
    """The FlashAttention 2 in torch for half precision on a GPU, unfused attention otherwise (float32: exact) and for
    sinks."""

    name = "torch"
    recordable = False

    def __call__(self, inputs: PrefillInputs) -> torch.Tensor:
        q, _, _, k_cache, v_cache, spans, window, _, sinks, *scales = inputs
        fused = q.device.type == "cuda" and q.dtype in HALVES and sinks is None
        if fused and q.shape[2] % 8 == 0 and q.shape[2] <= 256:
            attended: torch.Tensor = torch.ops.aten._flash_attention_forward(
                q, *_packed(inputs),
                spans.query_bounds, spans.key_bounds, max(spans.counts), max(spans.ends), 0.0, True, False,
                window_size_left=window - 1 if window else None, window_size_right=0 if window else None,
            )[0]  # fmt: skip
            return attended
        if is_deterministic():
            return span_prefill_attention(q, k_cache, v_cache, spans, window, sinks, None, *scales)
        parts: list[torch.Tensor] = []
        # On a GPU the fused kernels may round float32 to tf32; on a CPU they do not.
        allowed = sdpa_kernel(SDPBackend.MATH) if q.device.type == "cuda" else nullcontext()
        with allowed:
            for rows, row, start, end in zip(q.split(spans.counts), spans.rows, spans.starts, spans.ends, strict=True):
                pages = spans.page_table[row, : -(-end // spans.page_size)]
                parts.append(prefill_attention_ref(rows, k_cache, v_cache, pages, start, window, sinks, *scales))
        return torch.cat(parts)
