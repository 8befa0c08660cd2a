"""Attention of which only the first channels of each head rotate (`partial_rotary_factor`).

Kernels rotate channel i with i + head_dim / 2. Rows of q and k are put in an order in which that pairs the right ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from specbatch.errors import refuse
from specbatch.files.config_values import positive_of, table_of
from specbatch.kernels.gemm.quantized.weight import Weight
from specbatch.models.layers.blocks import Attention
from specbatch.models.weight_reader import Reader, Tables

FACTOR = "partial_rotary_factor"


def paired(dim: int, turning: int) -> torch.Tensor:
    """Permutation of a head's channels. The first `turning` channels are paired as halves of these `turning`; after the
    permutation they are paired as halves of the head. The same permutation of queries and keys does not change their
    dot products."""
    half, still = turning // 2, (dim - turning) // 2
    channels = torch.arange(dim)
    one, two, rest = channels[:half], channels[half:turning], channels[turning:]
    return torch.cat([one, rest[:still], two, rest[still:]])


def turning(config: dict[str, Any], head_dim: int, default: float = 1.0) -> int:
    """How many channels of a head rotate by a config.json, whose partial_rotary_factor has this default."""
    partial = positive_of(config, FACTOR, default, most=1)
    for where in ("rope_parameters", "rope_scaling"):
        partial = positive_of(table_of(config, where), FACTOR, partial, most=1, where=where)
    found = int(head_dim * partial)
    if found < 2 or found % 2:
        raise refuse(FACTOR, partial, f"an even number of the {head_dim} channels must rotate")
    return found


def without_factor(config: dict[str, Any]) -> dict[str, Any]:
    """The config without partial_rotary_factor, to read the rest of its rope."""
    plain = {key: value for key, value in config.items() if key != FACTOR}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(plain.get(key), dict):
            plain[key] = {name: value for name, value in plain[key].items() if name != FACTOR}
    return plain


def attention(
    read: Reader, norm: str, stem: str, tables: Tables, projections: Mapping[str, int], window: int | None = None
) -> Attention:
    """As `llama.attention`. projections: name, without ".weight" -> number of outputs, of q, k and v in this order."""
    config = read.config
    dim, turning, hidden = config.head_dim, config.rope.rotary_dim, config.hidden_size
    heads = read.heads(stem, tables, window=window)
    if turning == dim:
        qkv = read.linear(projections, hidden, config.qkv_bias)
    else:  # the permutation of rows does not respect the blocks of scales of FP8 weights
        names = [f"{name}.weight" for name in projections]
        weight = torch.cat([read(*one, hidden) for one in zip(names, projections.values(), strict=True)])
        biases = [read(f"{name}.bias", count) for name, count in projections.items() if config.qkv_bias]
        order = paired(dim, turning).to(weight.device)
        rotated = config.num_heads + config.num_kv_heads
        starts = torch.arange(0, rotated * dim, dim, device=weight.device)
        values = torch.arange(rotated * dim, len(weight), device=weight.device)
        rows = torch.cat([(starts[:, None] + order).flatten(), values])
        qkv = read.in_fp8(Weight(weight[rows]), *names).linear(torch.cat(biases)[rows] if biases else None)
        if heads.q_norm is not None and heads.k_norm is not None:
            heads = replace(heads, q_norm=heads.q_norm[order].contiguous(), k_norm=heads.k_norm[order].contiguous())
    out = read.linear({f"{stem}.o_proj": hidden}, config.num_heads * dim, config.o_bias)
    return Attention(norm=read.norm(norm), qkv=qkv, heads=heads, out=out)
