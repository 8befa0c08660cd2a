"""Mixtures of experts in GGUF files give the logits of their safetensors checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType, GGUFWriter
from uncached import decoder_of, logits_of

from specbatch.errors import SpecbatchError
from specbatch.models.formats.mxfp4 import Mxfp4Weights
from specbatch.weights import Checkpoint, open_checkpoint
from specbatch.weights.gguf_tokenizer import pre_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "pad_token_id": 0,
    "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 64}
QWEN = {"num_experts": 5, "moe_intermediate_size": 32, "norm_topk_prob": True}
GLM = {
    "n_routed_experts": 5, "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.7, "n_group": 1, "topk_group": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip
LFM = {
    "num_experts": 5, "moe_intermediate_size": 32, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"],
    "conv_L_cache": 3, "norm_eps": 1e-5, "routed_scaling_factor": 1.7,
}  # fmt: skip
OSS = {"num_local_experts": 5, "sliding_window": 6, "rope_parameters": YARN | {"truncate": False}}
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3moe": lambda: hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**SIZES, **QWEN)),
    "gpt-oss": lambda: hf.GptOssForCausalLM(hf.GptOssConfig(**SIZES, **OSS)),
    "glm4moe": lambda: hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**SIZES, **GLM)),
    "lfm2moe": lambda: hf.Lfm2MoeForCausalLM(
        hf.Lfm2MoeConfig(**{key: SIZES[key] for key in SIZES if key not in ("rms_norm_eps", "head_dim")}, **LFM)
    ),
}
# Of llama.cpp's converters, for the tensors that are no experts.
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.sinks": "attn_sinks.weight", "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "eh_proj": "nextn.eh_proj", "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm", "shared_head.norm": "nextn.shared_head_norm", "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert_bias": "exp_probs_b.bias",
}  # fmt: skip
ENDS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
ENDS["model.embedding_norm"] = "token_embd_norm"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBATCH_CACHE", str(tmp_path / "cache"))


def made(arch: str, model: Any = None) -> Any:
    torch.manual_seed(5)
    model = (MODELS[arch]() if model is None else model).eval().float()
    with torch.no_grad():
        for one in [*model.parameters(), *model.buffers()]:
            if one.dim() == 1 and len(one) != 8 and len(one) != 4:  # no rope frequencies
                one.copy_(torch.rand_like(one) + 0.5)
            elif one.dim() > 1:
                one.copy_(torch.randn_like(one) * 1.2 / one[0].numel() ** 0.5)
    return model


def stored(arch: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a model as llama.cpp's converter stores them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        if not name.startswith("model.layers."):
            found[f"{ENDS[stem]}.{kind}"] = tensor
            continue
        _, _, layer, part = name.split(".", 3)
        block = f"blk.{layer}"
        if ".experts." in part:
            which, is_bias = part.rpartition(".")[2].removesuffix("_bias"), part.endswith("_bias")
            matrices = tensor if is_bias or arch != "gpt-oss" else tensor.transpose(1, 2)
            kind = "bias" if is_bias else "weight"
            if which == "down_proj":
                found[f"{block}.ffn_down_exps.{kind}"] = matrices
            else:
                halves = (matrices[:, ::2], matrices[:, 1::2]) if arch == "gpt-oss" else matrices.chunk(2, 1)
                for gate, half in zip(("gate", "up"), halves, strict=True):
                    found[f"{block}.ffn_{gate}_exps.{kind}"] = half
        elif part in NAMES:
            found[f"{block}.{NAMES[part]}"] = tensor
        elif part == "conv.conv.weight":
            found[f"{block}.shortconv.conv.weight"] = tensor[:, 0]
        elif part == "post_attention_layernorm.weight":
            found[f"{block}.{'ffn_norm' if arch == 'qwen3moe' else 'post_attention_norm'}.weight"] = tensor
        else:
            found[f"{block}.{NAMES[part.rpartition('.')[0]]}.{kind}"] = tensor
    return found


def quantized(values: Any, kind: GGMLQuantizationType) -> Any:
    """Bytes [..., n]. gguf 0.19.0 dequantizes NVFP4 and does not quantize to it."""
    if kind != GGMLQuantizationType.NVFP4:
        return gguf.quants.quantize(values, kind)
    form = gguf.quants.NVFP4
    groups = values.reshape(-1, 4, 16)
    scales = form.fp32_to_ue4m3(np.abs(groups).max(-1) / 6)
    steps = np.maximum(form.ue4m3_to_fp32(scales), 1e-9)[..., None, None]
    bits = np.abs(groups[..., None] / steps - np.array(form.kvalues)).argmin(-1).astype(np.uint8)
    packed = (bits[..., :8] | bits[..., 8:] << 4).reshape(-1, 32)
    return np.concatenate([scales, packed], 1).reshape(*values.shape[:-1], -1)


def is_quantized(name: str, kind: GGMLQuantizationType) -> bool:
    """Whether `write` quantizes a tensor: those of experts, and in NVFP4 queries, too."""
    ends = ("_exps.weight", *["attn_q.weight"] * (kind == GGMLQuantizationType.NVFP4))
    return kind != GGMLQuantizationType.F32 and name.endswith(ends)


def write(
    path: Path,
    arch: str,
    config: Any,
    tensors: dict[str, torch.Tensor],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    **changes: Any,
) -> str:
    """kind: see `is_quantized`."""
    rope, experts = config.rope_parameters, tensors["blk.1.ffn_gate_exps.weight"]
    keys: dict[str, Any] = {
        "block_count": 2, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16,
        "attention.value_length": 16, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": rope["rope_theta"],
        "expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": experts.shape[1],
    }  # fmt: skip
    if arch == "gpt-oss":
        keys |= {"attention.sliding_window": 6, "rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
        keys |= {"rope.scaling.original_context_length": 64}
    elif arch == "glm4moe":
        keys |= {"expert_shared_count": 2, "leading_dense_block_count": 1, "expert_gating_func": 2}
        keys |= {"expert_weights_scale": 1.7, "expert_weights_norm": True, "rope.dimension_count": 8}
    elif arch == "lfm2moe":
        keys |= {"attention.head_count_kv": [0, 2], "shortconv.l_cache": 3, "leading_dense_block_count": 1}
        keys |= {"expert_gating_func": 2, "expert_weights_scale": 1.7}
    writer = GGUFWriter(path, arch)
    for key, value in (keys | changes).items():
        if isinstance(value, bool):
            writer.add_bool(f"{arch}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{arch}.{key}", value)
        else:
            writer.add_key_value(f"{arch}.{key}", value, gguf.GGUFValueType.get_type(value))
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor.detach().numpy())
        if is_quantized(name, kind):
            writer.add_tensor(name, quantized(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def logits(checkpoint: Checkpoint) -> torch.Tensor:
    tokens = torch.randint(0, 131, (80,), generator=torch.Generator().manual_seed(1))
    return logits_of(decoder_of(checkpoint), tokens)


@pytest.mark.parametrize("arch", MODELS)
def test_logits_of_the_safetensors_checkpoint(tmp_path: Path, arch: str) -> None:
    model = made(arch)
    model.save_pretrained(tmp_path / "folder")
    expected = logits(open_checkpoint(str(tmp_path / "folder")))
    path = write(tmp_path / "model.gguf", arch, model.config, stored(arch, model.state_dict()))
    found = logits(open_checkpoint(path))
    assert torch.equal(found.argmax(1), expected.argmax(1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_quantized_experts(tmp_path: Path) -> None:
    """Those of gpt-oss in MXFP4 stay in it; others are dequantized. Both as the gguf package does."""
    for arch, kind in (("gpt-oss", GGMLQuantizationType.MXFP4), ("qwen3moe", GGMLQuantizationType.Q8_0)):
        model = made(arch)
        tensors = stored(arch, model.state_dict())
        path = write(tmp_path / f"{arch}.gguf", arch, model.config, tensors, kind)
        checkpoint = open_checkpoint(path)
        for name in [name for name in tensors if name.endswith("_exps.weight")]:
            packed = gguf.quants.quantize(np.ascontiguousarray(tensors[name].detach().numpy()), kind)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(packed, kind))
        plain = open_checkpoint(write(tmp_path / f"{arch}-plain.gguf", arch, model.config, tensors))
        assert isinstance(checkpoint.config.quantization, Mxfp4Weights) == (arch == "gpt-oss")
        assert plain.config.quantization is None
        torch.testing.assert_close(logits(checkpoint), logits(plain), rtol=0, atol=1e-6)


def test_nvfp4_and_its_scales(tmp_path: Path) -> None:
    """llama.cpp multiplies by the scale of a matrix, one for each expert; those of activations are not used."""
    config = hf.Qwen3MoeConfig(**SIZES, **QWEN | {"moe_intermediate_size": 64})
    model = made("qwen3moe", hf.Qwen3MoeForCausalLM(config))
    tensors, kind = stored("qwen3moe", model.state_dict()), GGMLQuantizationType.NVFP4
    generator = torch.Generator().manual_seed(3)
    meant, scales = dict(tensors), {}
    for name in [name for name in tensors if is_quantized(name, kind)]:
        values, stem = tensors[name].detach(), name.removesuffix("weight")
        scale = torch.rand(5 if "_exps" in name else 1, generator=generator) + 0.01
        each = scale.view(-1, 1, 1) if values.dim() == 3 else scale
        tensors[name] = values / each
        packed = quantized(np.ascontiguousarray(tensors[name].numpy()), kind)
        meant[name] = torch.from_numpy(gguf.quants.dequantize(packed, kind)) * each
        scales |= {f"{stem}scale": scale, f"{stem}input_scale": torch.ones(1)}
    plain = open_checkpoint(write(tmp_path / "plain.gguf", "qwen3moe", config, meant))
    found = open_checkpoint(write(tmp_path / "nvfp4.gguf", "qwen3moe", config, tensors | scales, kind))
    torch.testing.assert_close(logits(found), logits(plain), rtol=0, atol=1e-5)
    assert found.grouped is not None
    assert "model.layers.1.self_attn.q_proj.weight" in found.grouped.bytes
    for name, scale in (("blk.1.ffn_gate_exps.scale", torch.ones(3)), ("blk.1.attn_q.scale", torch.ones(1).half())):
        path = write(tmp_path / f"{scale.dtype}.gguf", "qwen3moe", config, tensors | {name: scale}, kind)
        with pytest.raises(SpecbatchError, match=f"tensor {name} is no number in F32, nor one for each matrix"):
            open_checkpoint(path)
    for wrong in (0.0, -1.0, np.nan, np.inf):
        path = write(tmp_path / f"{wrong}.gguf", "qwen3moe", config, tensors | {name: torch.tensor([wrong])}, kind)
        with pytest.raises(SpecbatchError, match=r"tensor blk\.1\.attn_q\.scale holds values that are not positive"):
            open_checkpoint(path)
    path = write(tmp_path / "f32.gguf", "qwen3moe", config, meant | scales)
    with pytest.raises(SpecbatchError, match=r"tensor blk.0.ffn_gate_exps.scale is \[5\]"):
        open_checkpoint(path)


def test_mtp_layer_of_glm(tmp_path: Path) -> None:
    model = made("glm4moe")
    state = dict(model.state_dict())
    last = {name: state[name] for name in state if name.startswith("model.layers.1.")}
    state |= {name.replace(".1.", ".2.", 1): tensor for name, tensor in last.items()}
    own = {"eh_proj": torch.randn(64, 128)} | {name: torch.ones(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    state |= {f"model.layers.2.{name}.weight": tensor for name, tensor in own.items()}
    tensors = stored("glm4moe", state)
    path = write(tmp_path / "model.gguf", "glm4moe", model.config, tensors, block_count=3, nextn_predict_layers=1)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.config.num_layers, checkpoint.config.mtp_layers) == (2, 1)
    assert checkpoint.mtp["model.layers.2.eh_proj.weight"] == (64, 128)
    assert checkpoint.mtp["model.layers.2.mlp.experts.gate_up_proj"] == (5, 64, 64)
    assert len(checkpoint.mtp) == len(last) + 4


def test_words_of_gpt_oss() -> None:
    """Splits before capitals, keeps contractions with their word, and digits in threes."""
    text = "helloWorld's 12345 ABCdef//\n"
    words = [text[start:end] for _, (start, end) in pre_tokenizer("gpt-4o").pre_tokenize_str(text)]
    assert words == ["hello", "World's", " ", "123", "45", " ABCdef", "//\n"]


def test_windows_of_gpt_oss(tmp_path: Path) -> None:
    model, key = made("gpt-oss"), "attention.sliding_window_pattern"
    tensors = stored("gpt-oss", model.state_dict())

    def windows(pattern: Any) -> tuple[int | None, ...]:
        return open_checkpoint(
            write(tmp_path / "model.gguf", "gpt-oss", model.config, tensors, **{key: pattern})
        ).config.windows

    assert windows(2) == (6, None)
    assert windows([False, True]) == (None, 6)
    with pytest.raises(SpecbatchError, match="sliding_window_pattern=3: it must be 2 or have true or false"):
        windows(3)


def test_refusals(tmp_path: Path) -> None:
    model = made("qwen3moe")
    tensors = stored("qwen3moe", model.state_dict())

    def refusal(arch: str = "qwen3moe", without: str = "", **changes: Any) -> str:
        some = {name: tensor for name, tensor in tensors.items() if name != without}
        with pytest.raises(SpecbatchError) as error:
            open_checkpoint(write(tmp_path / "model.gguf", arch, model.config, some, **changes))
        return str(error.value)

    assert "general.architecture='deepseek2': supported are llama," in refusal("deepseek2")
    assert "llama.expert_count=5: mixtures of experts are read from qwen3moe, gpt-oss" in refusal("llama")
    assert "ffn_gate_exps.weight has no ffn_up_exps of its shape" in refusal(without="blk.1.ffn_up_exps.weight")
    assert "experts.down_proj is missing" in refusal(without="blk.1.ffn_down_exps.weight")
    assert "experts.gate_up_proj is [5, 64, 64]; its config requires [6, 64, 64]" in refusal(expert_count=6)
    for arch in ("glm4moe", "lfm2moe"):
        assert f"{arch}.expert_gating_func=1: the scores" in refusal(arch, expert_gating_func=1)
    assert "expert_used_count" in refusal(expert_used_count=0)
