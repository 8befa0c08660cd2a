"""Mixtures of experts in GGUF files: tensor names, settings from the metadata, and stacked experts.

A file has the experts of a layer in `ffn_gate_exps`, `ffn_up_exps` and `ffn_down_exps`, [experts, out, in] each. Names
and keys are those of the `gguf` package; what files do not state is what llama.cpp computes for the architecture
(https://github.com/ggml-org/llama.cpp, `convert_hf_to_gguf.py` and `src/llama-model.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specbatch.errors import refuse
from specbatch.files.config_values import flag_of
from specbatch.kernels.common.block_sizes import MX_BLOCK
from specbatch.models.formats import mxfp4
from specbatch.weights.gguf_values import dequantize_tensor

if TYPE_CHECKING:
    import torch

    from specbatch.weights.gguf_file import GgufFile
    from specbatch.weights.gguf_header import GgufTensor

_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
# Architecture -> names of the parts of a layer, in addition to those of dense models. A name with a kind, such as
# "attn_sinks.weight", is that of a tensor.
NAMES = {
    "qwen3moe": _EXPERTS,
    "gpt-oss": _EXPERTS
    | {
        "ffn_gate_inp": "mlp.router",
        "post_attention_norm": "post_attention_layernorm",
        "attn_sinks.weight": "self_attn.sinks",
    },
    "glm4moe": _EXPERTS
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj",
        "ffn_down_shexp": "mlp.shared_experts.down_proj",
        "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        "nextn.eh_proj": "eh_proj",
        "nextn.embed_tokens": "embed_tokens",
        "nextn.enorm": "enorm",
        "nextn.hnorm": "hnorm",
        "nextn.shared_head_head": "shared_head.head",
        "nextn.shared_head_norm": "shared_head.norm",
    },
    "lfm2moe": {
        "ffn_gate_inp": "feed_forward.gate",
        "ffn_gate_exps": "feed_forward.experts.gate_proj",
        "ffn_up_exps": "feed_forward.experts.up_proj",
        "ffn_down_exps": "feed_forward.experts.down_proj",
        "exp_probs_b.bias": "feed_forward.expert_bias",
    },
}
_SIGMOID = 2  # of expert_gating_func
_MXFP4_BYTES = 17  # of a block: the scale, then values j and j + 16 in byte j


def mixture_config(file: GgufFile) -> dict[str, Any]:
    """The settings of a mixture, as in a config.json."""
    own: dict[str, Any] = {
        "num_experts_per_tok": file.count(".expert_used_count"),
        "moe_intermediate_size": file.count(".expert_feed_forward_length"),
    }
    experts = file.count(".expert_count")
    if file.arch == "qwen3moe":
        return own | {"model_type": "qwen3_moe", "num_experts": experts, "norm_topk_prob": _normalises(file)}
    if file.arch == "gpt-oss":
        window = {"sliding_window": file.count(".attention.sliding_window")}
        quantized = {"quantization_config": {"quant_method": mxfp4.METHOD}} if has_mxfp4(file) else {}
        return own | window | quantized | {"model_type": "gpt_oss", "num_local_experts": experts}
    if file.metadata(".expert_gating_func", _SIGMOID) != _SIGMOID:
        works = f"the scores of {file.arch} files are sigmoids; {_SIGMOID}"
        raise refuse(file.full(".expert_gating_func"), file.metadata(".expert_gating_func"), works)
    dense = file.count(".leading_dense_block_count", 0, least=0)
    own |= {"norm_topk_prob": _normalises(file), "routed_scaling_factor": file.number(".expert_weights_scale", 1.0)}
    if file.arch == "lfm2moe":
        biased = f"blk.{dense}.exp_probs_b.bias" in file.tensors
        own |= {"num_experts": experts, "num_dense_layers": dense, "use_expert_bias": biased}
        return own | {"model_type": "lfm2_moe"}
    extra = file.count(".nextn_predict_layers", 0, least=0)
    return own | {
        "model_type": "glm4_moe",
        "num_hidden_layers": file.count(".block_count") - extra,
        "num_nextn_predict_layers": extra,
        "n_routed_experts": experts,
        "n_shared_experts": file.count(".expert_shared_count", 0, least=0),
        "first_k_dense_replace": dense,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _normalises(file: GgufFile) -> bool:
    key = file.full(".expert_weights_norm")
    return flag_of({key: file.metadata(".expert_weights_norm")}, key, True)


def has_mxfp4(file: GgufFile) -> bool:
    """Whether all experts are in MXFP4."""
    from gguf import GGMLQuantizationType

    stacks = [tensor for name, tensor in file.tensors.items() if name.endswith("_exps.weight")]
    return bool(stacks) and all(tensor.kind == GGMLQuantizationType.MXFP4 for tensor in stacks)


class Stored(NamedTuple):
    """A tensor of the converted checkpoint: its shape, the tensors of the file it consists of, and what makes it."""

    shape: tuple[int, ...]
    parts: tuple[GgufTensor, ...]
    make: Callable[..., torch.Tensor]

    @property
    def size(self) -> int:
        """Number of values."""
        return sum(part.size for part in self.parts)

    def tensor(self) -> torch.Tensor:
        return self.make(*self.parts)


def join_experts(file: GgufFile, tensors: dict[str, GgufTensor]) -> dict[str, Stored]:
    """The tensors of a file by their checkpoint names, with gate and up of all experts of a layer as one."""
    found: dict[str, Stored] = {}
    is_oss, quantized = file.arch == "gpt-oss", file.arch == "gpt-oss" and has_mxfp4(file)
    for name, tensor in tensors.items():
        stem, is_expert, part = name.partition(".experts.")
        projection, _, kind = part.partition(".")
        if name.endswith(".conv.conv.weight"):  # LFM2: files have no dimension of size 1
            found[name] = Stored((tensor.shape[0], 1, *tensor.shape[1:]), (tensor,), _with_second)
        elif not is_expert:
            found[name] = Stored(tensor.shape, (tensor,), dequantize_tensor)
        elif projection != "up_proj":  # it comes with the gate
            parts: tuple[GgufTensor, ...] = (tensor,)
            target = f"{stem}.experts.{projection}"
            if projection == "gate_proj":
                up = tensors.get(f"{stem}.experts.up_proj.{kind}")
                if up is None or up.shape != tensor.shape:
                    raise file.refusal(f"tensor {tensor.name} has no ffn_up_exps of its shape, {list(tensor.shape)}")
                parts, target = (tensor, up), f"{stem}.experts.gate_up_proj"
            if len(tensor.shape) != (3 if kind == "weight" else 2):
                raise file.refusal(f"tensor {tensor.name} is {list(tensor.shape)}; experts are stacks of matrices")
            count, rows = tensor.shape[0], len(parts) * tensor.shape[1]
            if kind == "bias":
                found[f"{target}_bias"] = Stored((count, rows), parts, _interleaved)
            elif quantized:
                groups = count, rows, tensor.shape[2] // MX_BLOCK
                found[target + mxfp4.BLOCKS] = Stored((*groups, MX_BLOCK // 2), parts, _blocks)
                found[target + mxfp4.SCALES] = Stored(groups, parts, _scales)
            elif is_oss:
                found[target] = Stored((count, tensor.shape[2], rows), parts, _transposed)
            else:
                found[target] = Stored((count, rows, tensor.shape[2]), parts, _stacked)
    return found


def _with_second(tensor: GgufTensor) -> torch.Tensor:
    """[n, k] -> [n, 1, k]."""
    return dequantize_tensor(tensor)[:, None]


def _stacked(*parts: GgufTensor) -> torch.Tensor:
    """All rows of the first part before those of the second."""
    import torch

    return torch.cat([dequantize_tensor(part) for part in parts], 1)


def _interleaved(*parts: GgufTensor) -> torch.Tensor:
    """gpt-oss: interleaved rows of the parts, of [experts, rows, ...]."""
    import torch

    return torch.stack([dequantize_tensor(part) for part in parts], 2).flatten(1, 2)


def _transposed(*parts: GgufTensor) -> torch.Tensor:
    return _interleaved(*parts).transpose(1, 2).contiguous()


def _mx_blocks(*parts: GgufTensor) -> np.ndarray[Any, Any]:
    """Bytes of the parts' blocks, [experts, rows, blocks, 17], rows interleaved."""
    blocks = [part.data.reshape(*part.data.shape[:-1], -1, _MXFP4_BYTES) for part in parts]
    return np.stack(blocks, 2).reshape(blocks[0].shape[0], -1, *blocks[0].shape[2:])


def _blocks(*parts: GgufTensor) -> torch.Tensor:
    """With values 2 j and 2 j + 1 in byte j."""
    import torch

    packed = _mx_blocks(*parts)[..., 1:]
    values = np.concatenate([packed & 15, packed >> 4], -1)
    return torch.from_numpy(values[..., ::2] | values[..., 1::2] << 4)


def _scales(*parts: GgufTensor) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(_mx_blocks(*parts)[..., 0]))
