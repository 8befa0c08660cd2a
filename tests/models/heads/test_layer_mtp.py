"""The MTP heads of GLM-4.5 and DeepSeek-V3 from a checkpoint as it is published, against `MtpModel` of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers import modeling_layers
from transformers_features import MTP_LAYERS
from uncached import decoder_of, features_of

from specbatch.errors import SpecbatchError
from specbatch.models.full_forward import UncachedContext
from specbatch.models.heads.layer_mtp import Mtp, mtp_config, own_tensors
from specbatch.models.weight_reader import Reader
from specbatch.models.weight_shapes import tensor_shapes
from specbatch.weights import open_checkpoint
from specbatch.weights.folder import check_tensors

pytestmark = MTP_LAYERS.needed

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
LATENT = SIZES | {
    "kv_lora_rank": 24, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12, "q_lora_rank": 20,
    "n_group": 3, "topk_group": 2, "num_key_value_heads": 4, "attention_bias": False,
}  # fmt: skip
del LATENT["head_dim"], LATENT["use_qk_norm"]
TARGETS = {
    "glm-4.5": lambda: hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**SIZES)),
    "deepseek-v3": lambda: hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**LATENT)),
}
CPU = torch.device("cpu")


def published(head: Any, stem: str, depth: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a head's layer under the names of a checkpoint, with an expert each, and copies of the shared
    matrices."""
    found = {}
    for name, tensor in head.layers[depth].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if name == "mlp.experts.gate_up_proj":
            for expert, parts in enumerate(tensor):
                for part, values in zip(("gate", "up"), parts.chunk(2), strict=True):
                    found[f"{stem}.mlp.experts.{expert}.{part}_proj.weight"] = values
        elif name == "mlp.experts.down_proj":
            found |= {f"{stem}.mlp.experts.{expert}.down_proj.weight": part for expert, part in enumerate(tensor)}
        else:
            found[f"{stem}.{name}"] = tensor
    found |= {f"{stem}.{name}.weight": torch.zeros(97, 48) for name in ("embed_tokens", "shared_head.head")}
    return {name: tensor.contiguous() for name, tensor in found.items()}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", TARGETS)
def test_head_computes_what_transformers_does(name: str, layers: int, tmp_path: Path) -> None:
    """Its only layer twice, or one for each draft."""
    torch.manual_seed(3)
    theirs = TARGETS[name]().eval()
    head = modeling_layers.MtpModel(theirs, layers).eval()
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *head.layers.parameters()):
            parameter.normal_(1 if parameter.dim() == 1 else 0, 1.2 / parameter[0].numel() ** 0.5)
        for layer in head.layers:
            layer.mtp_block.mlp.gate.e_score_correction_bias.normal_()
    theirs.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    for depth in range(layers):
        tensors |= published(head, f"model.layers.{2 + depth}", depth)
    save_file(tensors, weights)

    tokens, positions = torch.randint(0, 97, (20,)), torch.arange(1, 20)
    with torch.no_grad():
        features = theirs.model(tokens[None], use_cache=False).last_hidden_state
        first = head.forward_layer(0, features[:, :-1], positions[None], None, input_ids=tokens[None, 1:])
        second = head.forward_layer(layers - 1, first[:, :-1], positions[None, 1:], None, input_ids=tokens[None, 2:])

    checkpoint = open_checkpoint(str(tmp_path))
    ours = decoder_of(checkpoint)
    found = own_tensors(checkpoint.config, checkpoint.mtp)
    config = mtp_config(checkpoint.config, found, layers)
    check_tensors(tensor_shapes(config), found, "the head")
    reader = Reader(config, checkpoint.tensor, torch.float32, CPU)  # type: ignore[arg-type]
    mine = Mtp(reader, ours, 32)
    hidden = features_of(ours, tokens).last
    for place, wanted in ((1, first), (2, second)):
        depth = min(place, layers) - 1
        x, qkv = mine.start(depth, mine.embed(tokens[place:]), hidden[:-1])
        heads = mine.heads_of(depth)
        attended = UncachedContext(ours, 1, 20 - place).attend(0, qkv, heads, torch.arange(place, 20))
        hidden = mine.finish(depth, x, attended)
        torch.testing.assert_close(hidden, wanted[0], rtol=1e-3, atol=1e-4)


def test_heads_of_other_shapes_are_refused(tmp_path: Path) -> None:
    theirs, weights = TARGETS["deepseek-v3"](), tmp_path / "model.safetensors"
    theirs.save_pretrained(tmp_path)
    tensors = load_file(weights) | published(modeling_layers.MtpModel(theirs, 1), "model.layers.2")
    save_file(tensors | {"model.layers.2.embed_tokens.weight": torch.zeros(5, 48)}, weights)
    checkpoint = open_checkpoint(str(tmp_path))
    with pytest.raises(
        SpecbatchError, match=r"layers.2.embed_tokens.weight': its shape is \[5, 48\], and .* \[97, 48\]"
    ):
        own_tensors(checkpoint.config, checkpoint.mtp)
    del tensors["model.layers.2.eh_proj.weight"]
    save_file(tensors, weights)
    checkpoint = open_checkpoint(str(tmp_path))
    found = own_tensors(checkpoint.config, checkpoint.mtp)
    with pytest.raises(SpecbatchError, match=r"eh_proj\.weight is missing"):
        check_tensors(tensor_shapes(mtp_config(checkpoint.config, found)), found, "the head")
