"""Writes the keys and values of a context, computed for all layers by one GEMM, to the paged cache (DFlash)."""

from __future__ import annotations

import torch

from specbatch.kernels.attention.queries import ContextKVLayout
from specbatch.kernels.attention.stored_kv import copyable, to_stored
from specbatch.kernels.common.kv_slots import VerifiedRows, kv_slots
from specbatch.kernels.dispatch import op
from specbatch.kernels.elementwise.norm import rms_norm_ref
from specbatch.kernels.elementwise.rope import apply_rope_ref


def write_context_kv_ref(
    kv: torch.Tensor,
    heads: ContextKVLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """Normalise and rotate the keys of kv [T, layers * 2 * kv * dim], and store both at flat `slots` int64 [T].

    keys, values [layers, pages, page_size, kv, dim]; positions int64 [T]; scales float32 [layers, kv], see
    `AttentionInputs`.
    """
    k, v = kv.view(len(kv), len(heads.k_norms), 2, heads.kv, heads.dim).unbind(2)
    k = rms_norm_ref(k, heads.k_norms[:, None], heads.eps).flatten(1, 2)
    k = apply_rope_ref(k, heads.cos[positions][:, None], heads.sin[positions][:, None]).view_as(v)
    for x, cache, scales in ((k, keys, k_scales), (v, values, v_scales)):
        stored = copyable(to_stored(x, cache.dtype, scales))
        copyable(cache).flatten(1, 2).index_copy_(1, slots, stored.transpose(0, 1))


def write_verified_kv_ref(
    kv: torch.Tensor,
    heads: ContextKVLayout,
    keys: torch.Tensor,
    values: torch.Tensor,
    verified: VerifiedRows,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> None:
    """`write_context_kv_ref` for the rows of a verify, as many for each sequence: row i has position lengths + i and is
    stored there if i <= accepted. Others leave the pages of sequences as they are."""
    page_table, slots, lengths, accepted = verified
    size, count = keys.shape[2], len(kv) // len(slots)
    row = torch.arange(count, device=kv.device)
    positions = lengths[:, None] + row
    places = kv_slots(page_table, slots[:, None], positions, size)
    places = torch.where(row <= accepted[:, None], places, 0)  # page 0 is for padding
    write_context_kv_ref(kv, heads, keys, values, positions.flatten(), places.flatten(), k_scales, v_scales)


write_context_kv = op(write_context_kv_ref, "specbatch.kernels.attention.context_kv_triton:write_context_kv")
write_verified_kv = op(write_verified_kv_ref, "specbatch.kernels.attention.context_kv_triton:write_verified_kv")
