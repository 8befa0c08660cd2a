"""A LoRA adapter on disk in the format of PEFT, for the toy model, and a float64 reference of the pass that drafts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

RANK, ALPHA = 3, 6.0
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG: dict[str, Any] = {  # as PEFT 0.18 writes it, without keys that have no meaning here
    "peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(MODULES), "bias": "none",
    "use_dora": False, "use_rslora": False, "fan_in_fan_out": False, "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "layers_to_transform": None, "lora_bias": False, "task_type": "CAUSAL_LM",
}  # fmt: skip


class UnoReference:
    """A Llama in float64, layer by layer: rows of noise have other weights."""

    def __init__(self, config: Any, tensors: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.tensors = {name: value.double() for name, value in tensors.items()}
        self.adapter = {name: value.double() for name, value in adapter.items()}

    def linear(self, x: torch.Tensor, name: str, noise: int) -> torch.Tensor:
        """x [T, in], of which the last `noise` rows have the adapter."""
        y = F.linear(x, self.tensors[f"model.{name}.weight"])
        a, b = (self.adapter.get(f"base_model.model.model.{name}.lora_{part}.weight") for part in "AB")
        if a is None or b is None or not noise:
            return y
        added = ALPHA / RANK * F.linear(F.linear(x[-noise:], a), b)
        return torch.cat([y[:-noise], y[-noise:] + added])

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[1],), self.tensors[f"model.{name}.weight"], self.config.rms_norm_eps)

    def logits(self, tokens: list[int], noise: int) -> torch.Tensor:
        """[T, V] of a text, of whose tokens the last `noise` are noise."""
        config, count = self.config, len(tokens)
        x = self.tensors["model.embed_tokens.weight"][tokens]
        angle = torch.outer(torch.arange(count).double(), config.rope.inverse_frequencies().double())
        angle = angle.repeat(1, 2)[:, None]

        def turned(part: torch.Tensor) -> torch.Tensor:
            half = part.shape[-1] // 2
            return part * angle.cos() + torch.cat([-part[..., half:], part[..., :half]], -1) * angle.sin()

        for index in range(config.num_layers):
            name = f"layers.{index}"
            read = self.norm(x, f"{name}.input_layernorm")
            q, k, v = (
                self.linear(read, f"{name}.self_attn.{part}_proj", noise).view(count, -1, config.head_dim)
                for part in "qkv"
            )
            q, k = turned(q), turned(k)
            k, v = (part.repeat_interleave(config.num_heads // config.num_kv_heads, 1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(config.head_dim)
            weights = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
            x = x + self.linear(mixed, f"{name}.self_attn.o_proj", noise)
            read = self.norm(x, f"{name}.post_attention_layernorm")
            gate, up = (self.linear(read, f"{name}.mlp.{part}_proj", noise) for part in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, f"{name}.mlp.down_proj", noise)
        return self.norm(x, "norm") @ self.tensors["model.embed_tokens.weight"].T


@pytest.fixture
def write_adapter(tmp_path: Path, toy: Any) -> Callable[..., tuple[Path, dict[str, torch.Tensor]]]:
    """`write_adapter(**changes of its config)` -> the folder and its tensors."""

    def write(**changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
        config, found = CONFIG | changes, toy.checkpoint.config
        inner, hidden, keys = found.intermediate_size, found.hidden_size, found.num_kv_heads * found.head_dim
        sizes = dict(zip(MODULES, [(hidden, hidden), (hidden, keys), (hidden, keys), (hidden, hidden)], strict=False))
        sizes |= {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
        generator = torch.Generator().manual_seed(3)
        tensors = {}
        for index in range(found.num_layers):
            for name in config["target_modules"]:
                columns, rows = sizes[name]
                stem = f"base_model.model.model.layers.{index}.{'mlp' if name in MODULES[4:] else 'self_attn'}.{name}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / math.sqrt(columns)
                tensors[f"{stem}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 3
        (tmp_path / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        return tmp_path, tensors

    return write
