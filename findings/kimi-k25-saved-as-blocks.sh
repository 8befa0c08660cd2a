#!/usr/bin/env bash
# transformers saves the layers of a Kimi-K2.5 as `blocks.N`, where published checkpoints have `layers.N`.
#
# Versions: transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11.
# Expected: save_pretrained writes the names that published checkpoints have and that other engines read:
#   `language_model.model.layers.0.self_attn.o_proj.weight`, as it does for the embedding, the final norm and the vision
#   tower, and as it keeps `model.layers.0` for a DeepSeek-V3, which the text model is.
# Seen: `language_model.model.blocks.0.self_attn.o_proj.weight` for every tensor of every layer. transformers reads both
#   names and gives the same model.
# Matters: a checkpoint that was fine-tuned or cut down with transformers is one of its own: readers of the published names
#   find no layers in it, and transformers itself reports no difference. specbatch reads the published names only and
#   refuses such a folder, with the first name that it misses.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0 transformers==5.23.0
cat > "$folder/run.py" <<'PYTHON'
import re
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Kimi_K25Config, Kimi_K25ForConditionalGeneration

folder = Path(sys.argv[1])
text = DeepseekV3Config(
    vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, kv_lora_rank=24,
    num_key_value_heads=4, q_lora_rank=20, qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=12, n_routed_experts=4,
    num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1, first_k_dense_replace=1,
)
vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
config = Kimi_K25Config(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=False)
model = Kimi_K25ForConditionalGeneration(config)
model.save_pretrained(folder / "kimi")
DeepseekV3ForCausalLM(text).save_pretrained(folder / "deepseek")


def prefixes(names) -> set[str]:
    """Of the text model's layers, without their numbers."""
    matches = [re.match(r"((?:language_model\.)?model\.\w+)\.\d+\.", name) for name in names]
    return {match[1] for match in matches if match}


saved = load_file(folder / "kimi" / "model.safetensors")
found, text_alone = prefixes(saved), prefixes(load_file(folder / "deepseek" / "model.safetensors"))
others = sorted(name for name in saved if name.startswith("language_model.") and not re.search(r"\.\d+\.", name))
print(f"transformers {transformers.__version__}: layers are saved as {found}, those of the text model alone as {text_alone}")
print(f"other tensors of the text model: {others}")
assert text_alone == {"model.layers"}, "the names of DeepSeek-V3 are other ones"
assert found == {"language_model.model.blocks"}, "the names are other ones"
assert {"language_model.model.embed_tokens.weight", "language_model.model.norm.weight"} <= set(others)
renamed = "language_model.model.layers."
published = {name.replace("language_model.model.blocks.", renamed): tensor for name, tensor in saved.items()}
assert len(published) == len(saved) and published.keys() != saved.keys()
save_file(published, folder / "kimi" / "model.safetensors", {"format": "pt"})
again = Kimi_K25ForConditionalGeneration.from_pretrained(folder / "kimi").state_dict()
wrong = [name for name, one in model.state_dict().items() if not torch.equal(one, again[name])]
assert not wrong, f"transformers does not read the published names: {wrong[:3]}"
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder" 2> "$folder/log" || { tail -20 "$folder/log"; exit 1; }
echo "ok: transformers 5.23.0 saves the layers of Kimi-K2.5 as blocks and reads both names"
