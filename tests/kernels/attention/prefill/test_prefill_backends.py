"""Prefill attention backends: selection by name, refusals, and the arguments passed to each library."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from specbatch.errors import SpecbatchError
from specbatch.kernels.attention.paged_attention import prefill_attention_ref
from specbatch.kernels.attention.prefill.prefill_backends import NAMES, GpuKind, not_gluon, prefill_backend
from specbatch.kernels.attention.queries import PrefillInputs
from specbatch.kernels.attention.ragged_batch import RaggedBatch

CPU, GPU = torch.device("cpu"), torch.device("cuda")
SPANS = [([0, 0], [19, 5]), ([0, 40, 3], [21, 49, 4])]


class Case:
    """Two caches of pages of 8, spans of some of their sequences, and what attention gives."""

    def __init__(self, starts: list[int], ends: list[int], device: torch.device, dtype: torch.dtype) -> None:
        count = len(starts)
        table = (torch.randperm(count * 7) + 1).view(count, 7).to(device)
        self.k_cache, self.v_cache = (torch.randn(count * 7 + 1, 8, 2, 64, device=device).to(dtype) for _ in range(2))
        self.spans = RaggedBatch(starts, ends, list(range(count))[::-1], table, 8)
        self.q = torch.randn(self.spans.offsets[-1], 4, 64, device=device).to(dtype)
        slots = self.spans.key_slots.split(ends)
        own = torch.cat([part[start:] for part, start in zip(slots, starts, strict=True)])
        self.k_new, self.v_new = self.k_cache.flatten(0, 1)[own], self.v_cache.flatten(0, 1)[own]

    def expected(self, window: int) -> torch.Tensor:
        spans = self.spans
        each = zip(self.q.double().split(spans.counts), spans.rows, spans.starts, strict=True)
        caches = self.k_cache.double(), self.v_cache.double()
        return torch.cat([prefill_attention_ref(q, *caches, spans.page_table[row], at, window) for q, row, at in each])


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("bounds", SPANS)
@pytest.mark.parametrize("handed", [True, False])
@pytest.mark.parametrize("name", ["auto", "torch", "triton", "gluon"])
def test_installed_backends_match_reference(
    device: torch.device, name: str, handed: bool, bounds: tuple[list[int], list[int]], window: int
) -> None:
    if name in ("triton", "gluon") and device.type == "cpu":
        pytest.skip("needs a CUDA device")
    for dtype in [torch.float32] if device.type == "cpu" else [torch.float32, torch.float16, torch.bfloat16]:
        if name == "gluon" and dtype == torch.float32:
            continue
        case = Case(*bounds, device, dtype)
        backend = prefill_backend(name, device, dtype, 64)
        assert backend.name == name or name == "auto"
        new = (case.k_new, case.v_new) if handed else (None, None)
        out = backend(PrefillInputs(case.q, *new, case.k_cache, case.v_cache, case.spans, window))
        slack = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
        torch.testing.assert_close(out.double(), case.expected(window), rtol=slack, atol=slack)


def test_auto_selects_torch_without_gpu() -> None:
    assert prefill_backend("auto", CPU, torch.float32, 64).name == "torch"


HOPPER = GpuKind((9, 0), "3.6.0")


@pytest.mark.parametrize(
    ("gpu", "dtype", "dim", "cache", "reason"),
    [
        (HOPPER, torch.bfloat16, 128, {}, None),
        (HOPPER, torch.float16, 64, {"page_size": 8}, None),
        (GpuKind((9, 0), "3.9.1+git"), torch.bfloat16, 256, {}, None),
        (None, torch.bfloat16, 128, {}, "needs a Hopper GPU"),
        (GpuKind((10, 0), "3.6.0"), torch.bfloat16, 128, {}, "needs a Hopper GPU"),
        (GpuKind((9, 0), "3.10.0"), torch.bfloat16, 128, {}, "was compiled with Triton 3.6 to 3.9 only, not 3.10.0"),
        (HOPPER, torch.float32, 128, {}, "has float16 and bfloat16 only"),
        (HOPPER, torch.bfloat16, 80, {}, "has no heads of 80, only 64, 128, 256"),
        (HOPPER, torch.bfloat16, 128, {"fp8_cache": True}, "reads no FP8 cache"),
        (HOPPER, torch.bfloat16, 128, {"page_size": 12}, "reads pages of a multiple of 8 tokens only, not 12"),
    ],
)
def test_what_gluon_is_for(
    gpu: GpuKind | None, dtype: torch.dtype, dim: int, cache: dict[str, Any], reason: str | None
) -> None:
    assert not_gluon(gpu, dtype, dim, **{"fp8_cache": False, "page_size": 16} | cache) == reason


def test_auto_says_why_it_is_not_gluon() -> None:
    if torch.cuda.is_available():
        pytest.skip("it may be gluon here")
    lines: list[str] = []
    assert prefill_backend("auto", GPU, torch.bfloat16, 128, log=lines.append).name == "triton"
    assert lines == ["attention_backend: auto is triton, because gluon needs a Hopper GPU"]
    assert prefill_backend("auto", GPU, torch.bfloat16, 128, deterministic=True, log=lines.append).name == "triton"
    assert len(lines) == 1
    assert "needs a Hopper GPU; use triton or auto" in refusal("gluon")


def refusal(name: str, device: torch.device = GPU, dtype: torch.dtype = torch.bfloat16, dim: int = 128) -> str:
    with pytest.raises(SpecbatchError) as caught:
        prefill_backend(name, device, dtype, dim, "draft_attention_backend")
    text = str(caught.value)
    assert text.startswith(f"draft_attention_backend={name!r}: ")
    assert "\n" not in text
    return text


def test_unsupported_backends_are_refused() -> None:
    assert all(name in refusal("cudnn") for name in NAMES)
    for name in ("gluon", "triton", "flashinfer", "flash-attn"):
        assert "CUDA" in refusal(name, CPU)
    for name in ("flashinfer", "flash-attn"):
        assert "float16" in refusal(name, dtype=torch.float32)
    for name in ("flashinfer", "flash-attn"):
        with pytest.raises(SpecbatchError, match=f"attention_backend='{name}': .*without attention sinks.*triton"):
            prefill_backend(name, GPU, torch.bfloat16, 64, sinks=True)
    assert "heads of 80" in refusal("flashinfer", dim=80)
    assert "not 260" in refusal("flash-attn", dim=260)


@pytest.mark.parametrize(("name", "package"), [("flashinfer", "flashinfer-python"), ("flash-attn", "flash-attn")])
def test_missing_package_is_named(name: str, package: str) -> None:
    if any(find_spec(module) for module in ("flashinfer", "flash_attn", "flash_attn_interface")):
        pytest.skip("one of the packages is installed")
    assert f"the package {package} is not installed" in refusal(name)


# -- stand-ins ------------------------------------------------------------------------------------------------


def install(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """One sequence whose last query is aligned with its last key; `window` -1 is unlimited."""
    return prefill_attention_ref(q, k[None], v[None], torch.tensor([0]), len(k) - len(q), window + 1)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False,
    block_table=None,
):  # fmt: skip
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert window_size[1] in (0, -1)
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert (max(queries), max(keys)) == (max_seqlen_q, max_seqlen_k)
    assert (sum(queries), sum(keys)) == (len(q), len(k))
    parts = zip(q.split(queries), k.split(keys), v.split(keys), strict=True)
    return torch.cat([attend(*part, window_size[0]) for part in parts])


def flash_attn_varlen_func_of_3(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
    softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
    attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
):  # fmt: skip
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal, window_size=window_size
    )
    return out, torch.empty(0)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
        paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
        mask_indptr_buf=None, backend="auto", jit_args=None, jit_kwargs=None,
    ):  # fmt: skip
        assert kv_layout == "NHD"
        assert float_workspace_buffer.dtype == torch.uint8
        self.plans = 0

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
        pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, non_blocking=True,
    ):  # fmt: skip
        tables = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(table.dtype == torch.int32 for table in tables)
        assert causal
        assert (num_qo_heads, num_kv_heads, head_dim_qk, page_size) == (4, 2, 64, 8)
        assert q_data_type == kv_data_type == torch.float32
        self.tables, self.window = tables, window_left
        self.plans += 1

    def run(self, q, paged_kv_cache, *args, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False):
        rows, bounds, pages, last = self.tables
        parts = []
        counts = bounds.diff().tolist()
        for queries, each, end in zip(q.split(rows.diff().tolist()), pages.split(counts), last.tolist(), strict=True):
            length = (len(each) - 1) * 8 + end
            k, v = (cache[each.long()].flatten(0, 1)[:length] for cache in paged_kv_cache)
            parts.append(attend(queries, k, v, self.window))
        return torch.cat(parts)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("bounds", SPANS)
@pytest.mark.parametrize("library", ["flash_attn", "flash_attn_interface", "flashinfer"])
def test_backends_pass_correct_arguments_to_libraries(
    monkeypatch: pytest.MonkeyPatch, library: str, bounds: tuple[list[int], list[int]], window: int
) -> None:
    member = {
        "flash_attn": flash_attn_varlen_func,
        "flash_attn_interface": flash_attn_varlen_func_of_3,
        "flashinfer": BatchPrefillWithPagedKVCacheWrapper,
    }[library]
    install(monkeypatch, library, **{member.__name__.removesuffix("_of_3"): member})
    name = "flashinfer" if library == "flashinfer" else "flash-attn"
    backend = prefill_backend(name, GPU, torch.bfloat16, 64)
    assert backend.name == name
    case = Case(*bounds, CPU, torch.float32)
    for _ in range(2):  # layers
        out = backend(PrefillInputs(case.q, case.k_new, case.v_new, case.k_cache, case.v_cache, case.spans, window))
        torch.testing.assert_close(out.double(), case.expected(window), rtol=3e-6, atol=3e-6)
    if library == "flashinfer":
        assert backend._wrapper.plans == 1
