"""The MTP head of GLM-4.5 from a checkpoint as it is published, against `MtpModel` of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from transformers.modeling_layers import MtpModel

from specbatch.models.decoder import Decoder
from specbatch.models.full_forward import UncachedContext
from specbatch.models.layer_mtp import Mtp, mtp_config, own_tensors
from specbatch.models.layers import Reader
from specbatch.weights import open_checkpoint

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
CPU = torch.device("cpu")


def published(head: Any, stem: str) -> dict[str, torch.Tensor]:
    """The tensors of a head under the names of a checkpoint, with an expert each, and copies of the shared matrices."""
    found = {}
    for name, tensor in head.layers[0].state_dict().items():
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


def test_head_computes_what_transformers_does(tmp_path: Path) -> None:
    torch.manual_seed(3)
    theirs = hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**SIZES)).eval()
    head = MtpModel(theirs, 1).eval()
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *head.layers.parameters()):
            parameter.normal_(1 if parameter.dim() == 1 else 0, 1.2 / parameter[0].numel() ** 0.5)
        head.layers[0].mtp_block.mlp.gate.e_score_correction_bias.normal_()
    theirs.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file(load_file(weights) | published(head, "model.layers.2"), weights)

    tokens, positions = torch.randint(0, 97, (20,)), torch.arange(1, 20)
    with torch.no_grad():
        features = theirs.model(tokens[None], use_cache=False).last_hidden_state
        first = head.forward_layer(0, features[:, :-1], positions[None], None, input_ids=tokens[None, 1:])
        second = head.forward_layer(0, first[:, :-1], positions[None, 1:], None, input_ids=tokens[None, 2:])

    checkpoint = open_checkpoint(str(tmp_path))
    ours = Decoder(checkpoint.config, checkpoint.tensor, dtype=torch.float32, device=CPU, max_positions=32)
    layer = mtp_config(checkpoint.config, own_tensors(checkpoint.config, checkpoint.mtp))
    reader = Reader(layer, checkpoint.tensor, torch.float32, CPU)  # type: ignore[arg-type]
    mine = Mtp(reader, ours, 32)
    hidden = ours.forward(tokens, torch.arange(20), UncachedContext(ours, 1, 20)).last
    for place, wanted in ((1, first), (2, second)):
        x, qkv = mine.enter(mine.embed(tokens[place:]), hidden[:-1])
        attended = UncachedContext(ours, 1, 20 - place).attend(0, qkv, mine.heads, torch.arange(place, 20))
        hidden = mine.leave(x, attended)
        torch.testing.assert_close(hidden, wanted[0], rtol=1e-3, atol=1e-4)
