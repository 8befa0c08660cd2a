"""The MTP head of DeepSeek-V3: files as published, and drafts equal to a layer of transformers between its parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

from specbatch.core.attention_metadata import PrefillMetadata, PromptChunk
from specbatch.errors import SpecbatchError
from specbatch.kernels.attention.prefill_backends import prefill_backend
from specbatch.memory.kv_cache import KVCache
from specbatch.models.decoder import Decoder
from specbatch.models.deepseek_mtp import Mtp, mtp_config, own_tensors
from specbatch.models.layers import Reader
from specbatch.weights import open_checkpoint
from specbatch.weights.folder import check_tensors

CPU, LAYERS, TOKENS = torch.device("cpu"), 3, 9
STEM = f"model.layers.{LAYERS}"
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 128, "kv_lora_rank": 24, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 20, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 24, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_mtp_layers": 1,
}  # fmt: skip


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Any, dict[str, torch.Tensor], Path]:
    """A target and its head: the decoder layer as a module of transformers, the other parts as tensors."""
    torch.manual_seed(3)
    config = hf.DeepseekV3Config(**SIZES, attn_implementation="eager")
    target, block = hf.DeepseekV3ForCausalLM(config), theirs.DeepseekV3DecoderLayer(config, LAYERS - 1)
    for module in (target, block):
        for tensor in module.state_dict().values():
            size = tensor[0].numel() ** 0.5 if tensor.dim() > 1 else 1.0
            tensor.copy_(torch.randn_like(tensor) / size if tensor.dim() > 1 else torch.rand_like(tensor) + 0.5)
    target.save_pretrained(tmp_path)
    hidden, stored = SIZES["hidden_size"], dict(block.state_dict())
    ups, downs = stored.pop("mlp.experts.gate_up_proj"), stored.pop("mlp.experts.down_proj")
    for expert, (up, down) in enumerate(zip(ups, downs, strict=True)):
        gate, up = up.chunk(2)
        parts = {"gate": gate, "up": up, "down": down}
        stored |= {f"mlp.experts.{expert}.{name}_proj.weight": part for name, part in parts.items()}
    ends = {f"{name}.weight": torch.rand(hidden) + 0.5 for name in ("enorm", "hnorm", "shared_head.norm")}
    ends["eh_proj.weight"] = torch.randn(hidden, 2 * hidden) / hidden**0.5
    repeated = {
        "embed_tokens.weight": target.model.embed_tokens.weight,
        "shared_head.head.weight": target.lm_head.weight,
    }
    head = {f"{STEM}.{name}": tensor.clone().contiguous() for name, tensor in (stored | ends | repeated).items()}
    save_file(load_file(tmp_path / "model.safetensors") | head, tmp_path / "model.safetensors")
    return target, block, ends, tmp_path


def test_drafts_match_a_layer_of_transformers(saved: Any) -> None:
    target, block, ends, folder = saved
    checkpoint = open_checkpoint(str(folder))
    model = Decoder(checkpoint.config, checkpoint.tensor, dtype=torch.float32, device=CPU, max_positions=64)
    found = own_tensors(checkpoint.config, checkpoint.mtp)
    config = mtp_config(checkpoint.config, found)
    check_tensors(config.tensor_shapes(), found, "the head")
    head = Mtp(Reader(config, checkpoint.tensor, torch.float32, CPU, of_draft=True), model, 64)

    tokens, hidden = torch.randint(0, 61, (TOKENS,)), torch.randn(TOKENS, SIZES["hidden_size"])
    metadata = PrefillMetadata(torch.arange(2)[:, None], [PromptChunk(1, 0, TOKENS)], 16)
    cache = KVCache(config, 1, 1, 16, torch.float32, CPU, prefill_backend("torch", CPU, torch.float32, 8))
    x, projected = head.enter(head.embed(tokens), head.project(hidden))
    following = head.leave(x, metadata.bind(cache).attend(0, projected, head.heads, metadata.positions))

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return ends[f"{name}.weight"] * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()

    with torch.no_grad():
        embedded = target.model.embed_tokens(tokens)
        joined = torch.cat([normed(embedded, "enorm"), normed(hidden, "hnorm")], -1) @ ends["eh_proj.weight"].T
        rope = target.model.rotary_emb(joined[None], torch.arange(TOKENS)[None])
        mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
        wanted = block(joined[None], attention_mask=mask, position_embeddings=rope)
        wanted = normed(wanted[0] if wanted.dim() == 3 else wanted, "shared_head.norm")
        torch.testing.assert_close(following, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(head.logits(following), target.lm_head(wanted), rtol=1e-4, atol=1e-4)


def test_damaged_heads_are_refused(saved: Any) -> None:
    *_, folder = saved
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {f"{STEM}.embed_tokens.weight": torch.zeros(5, 48)}, path)
    checkpoint = open_checkpoint(str(folder))
    with pytest.raises(
        SpecbatchError, match=r"layers.3.embed_tokens.weight': its shape is \[5, 48\], and .* \[61, 48\]"
    ):
        own_tensors(checkpoint.config, checkpoint.mtp)
    del tensors[f"{STEM}.eh_proj.weight"]
    save_file(tensors, path)
    checkpoint = open_checkpoint(str(folder))
    found = own_tensors(checkpoint.config, checkpoint.mtp)
    with pytest.raises(SpecbatchError, match=r"eh_proj\.weight is missing"):
        check_tensors(mtp_config(checkpoint.config, found).tensor_shapes(), found, "the head")
    described = json.loads((folder / "config.json").read_text())
    assert described["num_nextn_predict_layers"] == checkpoint.config.mtp_layers == 1
