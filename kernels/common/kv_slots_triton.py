"""`kv_slots` within Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def kv_slot(pages, position, PAGE: tl.constexpr, mask=None):
    """The slot of each position of a sequence whose row of the page table is `pages`; 0 where not `mask`."""
    at = pages + position // PAGE
    page = tl.load(at) if mask is None else tl.load(at, mask, 0)
    return page * PAGE + position % PAGE
