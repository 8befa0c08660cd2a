"""Backends of prefill attention: the Gluon and Triton kernels, torch, or an installed flash-attn or flashinfer.

All see the same call: the keys and values of a pass lie in the cache already, and those of the pass itself are
also handed over as tensors where the caller has them (`k_new`, `v_new`), so that a prompt without a prefix need not
be gathered from its pages.

`auto` is gluon on Hopper GPUs where it has the model's heads and cache, and triton on others: there it beat torch's
FlashAttention 2 on every shape measured (`results/h200/prefill.md`; heads of 64, 80 and 256 too). cuDNN, through
scaled_dot_product_attention, prepares 33 ms for every length that it has not met: more than the whole prefill of 1024
tokens. It also aligns its causal mask with the first key, which is wrong for a chunk after a prefix. float32 in torch
is exact only where the scores are written to memory.

flash-attn and flashinfer are written from their documentation (flash-attn 2.8, flash_attn_interface of FlashAttention
3, flashinfer 0.6); they were tested against stand-ins with the same signatures, not run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from specbatch.errors import refuse
from specbatch.kernels.attention.deterministic.span_attention import span_prefill_attention
from specbatch.kernels.attention.paged_attention import prefill_attention_ref
from specbatch.kernels.attention.queries import PrefillInputs
from specbatch.kernels.attention.ragged_batch import RaggedBatch
from specbatch.kernels.common.rehearsal import values_needed
from specbatch.kernels.dispatch import is_deterministic

NAMES = ("auto", "gluon", "triton", "torch", "flashinfer", "flash-attn")
FIRST_TRITON, LAST_TRITON = (3, 6), (3, 9)
GLUON_HEADS = 64, 128, 256
HALVES = (torch.float16, torch.bfloat16)


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
    dtype: torch.dtype,
    head_dim: int,
    setting: str = "attention_backend",
    *,
    sinks: bool = False,
    latents: bool = False,
    fp8_cache: bool = False,
    page_size: int = 16,
    deterministic: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> PrefillAttention:
    """The backend called `name`, one of NAMES. sinks: the model has attention sinks; latents: it has latent attention,
    which has kernels of its own. fp8_cache, page_size: of the cache; log: told why `auto` is not gluon. Refuses, naming
    `setting`, what cannot run."""
    if name not in NAMES:
        raise refuse(setting, name, f"use one of {', '.join(NAMES)}")
    if name == "auto":
        if device.type != "cuda":
            return _Torch()
        if deterministic or latents:  # other kernels, whatever the name
            return TritonPrefill()
        if reason := not_gluon(_gpu_kind(device), dtype, head_dim, fp8_cache=fp8_cache, page_size=page_size):
            log(f"{setting}: auto is triton, because gluon {reason}")
            return TritonPrefill()
        return GluonPrefill()
    if latents and device.type == "cuda" and name != "triton":
        raise refuse(setting, name, "has no multi-head latent attention here; use triton or auto")
    if name == "torch":
        return _Torch()
    if device.type != "cuda":
        raise refuse(setting, name, "needs a CUDA device; use torch or auto")
    if name == "triton":
        return TritonPrefill()
    if name == "gluon":
        if reason := not_gluon(_gpu_kind(device), dtype, head_dim, fp8_cache=fp8_cache, page_size=page_size):
            raise refuse(setting, name, f"{reason}; use triton or auto")
        return GluonPrefill()
    if dtype not in HALVES:
        raise refuse(setting, name, "supports float16 and bfloat16 only; use triton, torch or auto")
    if sinks:
        raise refuse(setting, name, "is called without attention sinks here; use triton, torch or auto")
    if name == "flashinfer":
        if head_dim not in (64, 128, 256):
            raise refuse(setting, name, f"has no heads of {head_dim}, only 64, 128, 256; use triton, torch or auto")
        return _FlashInfer(_installed("flashinfer", name, setting))
    if head_dim > 256 or head_dim % 8:
        raise refuse(
            setting,
            name,
            f"supports head sizes up to 256 that are multiples of 8, not {head_dim}; use triton, torch or auto",
        )
    # FlashAttention 3 (Hopper) installs under its own name.
    module = "flash_attn_interface" if find_spec("flash_attn_interface") else "flash_attn"
    return _FlashAttn(_installed(module, name, setting))


class GpuKind(NamedTuple):
    """Its compute capability, and the version of Triton."""

    capability: tuple[int, int]
    triton: str


def _gpu_kind(device: torch.device) -> GpuKind | None:
    if not torch.cuda.is_available():
        return None
    from triton import __version__

    return GpuKind(torch.cuda.get_device_capability(device), __version__)


def not_gluon(gpu: GpuKind | None, dtype: torch.dtype, head_dim: int, *, fp8_cache: bool, page_size: int) -> str | None:
    """Why the Gluon kernel cannot run, if so. Gluon may change with every version of Triton."""
    if gpu is None or gpu.capability != (9, 0):
        return "needs a Hopper GPU"
    if not FIRST_TRITON <= tuple(map(int, gpu.triton.split(".")[:2])) <= LAST_TRITON:
        return f"was compiled with Triton 3.6 to 3.9 only, not {gpu.triton}"
    if dtype not in HALVES:
        return "has float16 and bfloat16 only"
    if head_dim not in GLUON_HEADS:
        return f"has no heads of {head_dim}, only {', '.join(map(str, GLUON_HEADS))}"
    if fp8_cache:
        return "reads no FP8 cache"
    if page_size % 8:
        return f"reads pages of a multiple of 8 tokens only, not {page_size}"
    return None


def _installed(module: str, name: str, setting: str) -> Any:
    if find_spec(module) is None:
        package = {"flashinfer": "flashinfer-python"}.get(module, "flash-attn")
        raise refuse(setting, name, f"the package {package} is not installed; install it, or use triton, torch or auto")
    return import_module(module)


def _packed(q: torch.Tensor, new: torch.Tensor | None, cache: torch.Tensor, spans: RaggedBatch) -> torch.Tensor:
    """Keys (or values) of all spans, span by span: [sum of ends, kv, dim], in the type of q."""
    if spans.fresh and new is not None:
        return new
    flat = cache.flatten(0, 1)
    if cache.dtype.itemsize == 1:  # few operations support FP8
        return flat.view(torch.uint8).index_select(0, spans.key_slots).view(cache.dtype).to(q.dtype)
    return flat.index_select(0, spans.key_slots)


class GluonPrefill:
    name = "gluon"
    recordable = True

    def __call__(self, inputs: PrefillInputs) -> torch.Tensor:
        from specbatch.kernels.attention.prefill.prefill_attention_gluon import prefill_attention

        return prefill_attention(inputs)


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
        q, k_new, v_new, k_cache, v_cache, spans, window, _, sinks = inputs
        fused = q.device.type == "cuda" and q.dtype in HALVES and sinks is None
        if fused and q.shape[2] % 8 == 0 and q.shape[2] <= 256:
            attended: torch.Tensor = torch.ops.aten._flash_attention_forward(
                q, _packed(q, k_new, k_cache, spans), _packed(q, v_new, v_cache, spans),
                spans.query_bounds, spans.key_bounds, max(spans.counts), max(spans.ends), 0.0, True, False,
                window_size_left=window - 1 if window else None, window_size_right=0 if window else None,
            )[0]  # fmt: skip
            return attended
        if is_deterministic():
            return span_prefill_attention(q, k_cache, v_cache, spans, window, sinks)
        parts: list[torch.Tensor] = []
        # On a GPU the fused kernels may round float32 to tf32; on a CPU they do not.
        allowed = sdpa_kernel(SDPBackend.MATH) if q.device.type == "cuda" else nullcontext()
        with allowed:
            for rows, row, start, end in zip(q.split(spans.counts), spans.rows, spans.starts, spans.ends, strict=True):
                pages = spans.page_table[row, : -(-end // spans.page_size)]
                parts.append(prefill_attention_ref(rows, k_cache, v_cache, pages, start, window, sinks))
        return torch.cat(parts)


class _FlashAttn:
    """`flash_attn_varlen_func` of version 2 or 3 over gathered keys: version 2 takes pages of 256 tokens only."""

    name = "flash-attn"
    recordable = False

    def __init__(self, module: Any) -> None:
        self._attend = module.flash_attn_varlen_func

    def __call__(self, inputs: PrefillInputs) -> torch.Tensor:
        values_needed("flash-attn")
        q, k_new, v_new, k_cache, v_cache, spans, window, _, _ = inputs
        attended = self._attend(
            q, _packed(q, k_new, k_cache, spans), _packed(q, v_new, v_cache, spans),
            spans.query_bounds, spans.key_bounds, max(spans.counts), max(spans.ends),
            causal=True, window_size=(window - 1 if window else -1, 0 if window else -1),
        )  # fmt: skip
        # Early versions of 3 also return the log-sum-exp.
        result: torch.Tensor = attended[0] if isinstance(attended, tuple) else attended
        return result


class _FlashInfer:
    """flashinfer's paged prefill. Its plan is made once per pass and serves all layers of one window."""

    name = "flashinfer"
    recordable = False
    WORKSPACE = 128 << 20  # bytes, as its documentation advises

    def __init__(self, module: Any) -> None:
        self._module = module
        self._wrapper: Any = None
        self._planned: tuple[RaggedBatch, int] | None = None

    def __call__(self, inputs: PrefillInputs) -> torch.Tensor:
        values_needed("flashinfer")
        q, _, _, k_cache, v_cache, spans, window, _, _ = inputs
        if self._planned is None or self._planned[0] is not spans or self._planned[1] != window:
            self._plan(q, k_cache, spans, window)
            self._planned = spans, window
        attended: torch.Tensor = self._wrapper.run(q, (k_cache, v_cache))
        return attended

    def _plan(self, q: torch.Tensor, k_cache: torch.Tensor, spans: RaggedBatch, window: int) -> None:
        if self._wrapper is None:
            workspace = torch.empty(self.WORKSPACE, dtype=torch.uint8, device=q.device)
            self._wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        size = spans.page_size
        counts = [-(-end // size) for end in spans.ends]
        pages = torch.cat([spans.page_table[row, :count] for row, count in zip(spans.rows, counts, strict=True)])
        last = [end - (count - 1) * size for end, count in zip(spans.ends, counts, strict=True)]
        self._wrapper.plan(
            torch.tensor(spans.offsets, dtype=torch.int32),  # it reads all but the pages on the host anyway
            torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32),
            pages.int(),
            torch.tensor(last, dtype=torch.int32),
            q.shape[1],
            k_cache.shape[2],
            q.shape[2],
            size,
            causal=True,
            window_left=window - 1 if window else -1,
            q_data_type=q.dtype,
            kv_data_type=k_cache.dtype,
        )
