"""MTP, or NEXTN: the draft head that lies beside a target as `mtp.*`, in the layout of Qwen3-Next and Qwen3.5.

x = fc([norm(embed(t_{i+1})) ; norm(h_i)]) with the target's last hidden state behind its final norm; then a layer with
gated full attention, and a norm whose output goes to the target's head and is the next h. All norms are centred on
zero: they multiply by 1 + weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from specbatch.kernels.linear import Linear
from specbatch.kernels.norm import rms_norm
from specbatch.models.config import ModelConfig
from specbatch.models.decoder import Decoder
from specbatch.models.draft_head import LAYER, DraftHead, Joined, Reader, Shapes, layer_shapes

_ATTENTION = f"{LAYER}.self_attn"


class Mtp(DraftHead):
    def __init__(
        self, config: ModelConfig, names: Shapes, read: Callable[[str], torch.Tensor], target: Decoder, positions: int
    ) -> None:
        """names: the head's tensors, without `mtp.`; read: gives one."""
        tensors = _Plain(config, read)
        reader = Reader(names, tensors, target, config.rms_norm_eps)
        super().__init__(config, reader, target, positions)
        self._fc = Joined(reader("fc.weight"))
        self._token_norm = reader.norm("pre_fc_norm_embedding")
        self._hidden_norm = reader.norm("pre_fc_norm_hidden")
        self._attention_norm = reader.norm(f"{LAYER}.input_layernorm")
        self._qkv = reader.linear(*(f"{_ATTENTION}.{part}_proj" for part in "qkv"))
        self._gate = Linear(tensors.gate().to(device=target.device, dtype=target.dtype))
        self._norm = reader.norm("norm")

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._fc(embedded, hidden, self._token_norm, self._hidden_norm)
        return x, self._qkv(x, norm=self._attention_norm)

    def leave(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        gate = self._gate(x, norm=self._attention_norm)
        return rms_norm(super().leave(x, attended * gate.sigmoid()), *self._norm)


class _Plain:
    """The head's tensors as plain layers read them: norms with their 1 added, and of q_proj the queries only, with the
    channels that turn spread over both halves of a head, as rope pairs them in whole heads.

    In half precision 1 + weight is rounded, which the published code avoids; it is a matter of drafts alone.
    """

    def __init__(self, config: ModelConfig, read: Callable[[str], torch.Tensor]) -> None:
        self._config = config
        self._read = read
        self._order = paired(config.head_dim, config.rope.rotary_dim)

    def __call__(self, name: str) -> torch.Tensor:
        dim = self._config.head_dim
        if name == f"{_ATTENTION}.q_proj.weight":
            return self._queries_and_gates()[:, 0, self._order].flatten(0, 1)
        tensor = self._read(name)
        if name == f"{_ATTENTION}.k_proj.weight":
            return tensor.view(-1, dim, tensor.shape[1])[:, self._order].flatten(0, 1)
        if tensor.dim() > 1:
            return tensor
        weight = 1 + tensor.float()
        return weight[self._order] if name.endswith(("q_norm.weight", "k_norm.weight")) else weight

    def gate(self) -> torch.Tensor:
        return self._queries_and_gates()[:, 1].flatten(0, 1)

    def _queries_and_gates(self) -> torch.Tensor:
        """[heads, 2, head_dim, hidden_size]: they alternate head by head."""
        found = self._read(f"{_ATTENTION}.q_proj.weight")
        return found.view(self._config.num_heads, 2, self._config.head_dim, found.shape[1])


def paired(dim: int, turning: int) -> torch.Tensor:
    """An order of a head's channels in which the first `turning`, paired as their own halves, are paired as halves of
    the head. Queries and keys may be put in any order, if it is the same: their products stay."""
    half, still = turning // 2, (dim - turning) // 2
    channels = torch.arange(dim)
    one, two, rest = channels[:half], channels[half:turning], channels[turning:]
    return torch.cat([one, rest[:still], two, rest[still:]])


def mtp_config(target: ModelConfig) -> ModelConfig:
    """The head's layer: the target's sizes and rope, with norms of queries and keys and without biases."""
    return replace(target, num_layers=1, qk_norm=True, qkv_bias=False, o_bias=False, mlp_bias=False)


def mtp_shapes(config: ModelConfig) -> Shapes:
    """Name, without `mtp.` -> shape of the head's tensors."""
    hidden = config.hidden_size
    shapes: Shapes = {"fc.weight": (hidden, 2 * hidden), **layer_shapes(config)}
    shapes[f"{_ATTENTION}.q_proj.weight"] = (2 * config.num_heads * config.head_dim, hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"{name}.weight"] = (hidden,)
    return shapes
