#!/usr/bin/env bash
# transformers cannot dequantize a checkpoint of compressed-tensors whose layers have different schemes.
#
# Versions: compressed-tensors 0.19.0, transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11.
# Expected: a model whose attention has 8 bits and whose MLP has 4 (two `config_groups`, as a recipe of llm-compressor
#   with two modifiers writes them) loads with `dequantize=True`, as it loads without it, and as each scheme does alone.
# Seen: a RuntimeError of the conversion of weights. All dense layers are dequantized with the scheme of one group.
# Matters: a reference of such a checkpoint has to be computed without `dequantize`; the first forward pass then
#   decompresses the weights. specbatch loads each layer by its own scheme.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0 transformers==5.23.0 \
  compressed-tensors==0.19.0
cat > "$folder/run.py" <<'PYTHON'
import json
import sys
import traceback
from pathlib import Path

import torch
from compressed_tensors.compressors import IntQuantizationCompressor, PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, preset_name_to_scheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, LlamaForCausalLM

KINDS = {  # preset, format, compressor, and the layers that have it
    "eight": ("W8A8", "int-quantized", IntQuantizationCompressor, "self_attn"),
    "four": ("W4A16", "pack-quantized", PackedQuantizationCompressor, "mlp"),
}


def make(folder: Path, kinds: dict[str, str]) -> dict[str, torch.Tensor]:
    """A checkpoint with a scheme for each part of the names of its layers; returns the weights that it stands for."""
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).save_pretrained(folder)
    stored, meant, groups = load_file(folder / "model.safetensors"), {}, {}
    for part, kind in kinds.items():
        preset, form, compressor, _ = KINDS[kind]
        scheme = preset_name_to_scheme(preset, [f"re:.*{part}.*_proj$"])
        scheme.format, scheme.input_activations = form, None
        groups[f"group_{len(groups)}"] = scheme
        size, most = scheme.weights.group_size, 2 ** (scheme.weights.num_bits - 1) - 1
        for name in [name for name in stored if f".{part}." in name and name.endswith("_proj.weight")]:
            weight = stored.pop(name)
            grouped = weight.unflatten(1, (-1, size or weight.shape[1]))
            scale = grouped.abs().amax(-1) / most
            meant[name] = ((grouped / scale[..., None]).round() * scale[..., None]).flatten(1)
            packed = compressor.compress({"weight": meant[name], "weight_scale": scale}, scheme)
            stored |= {name.removesuffix("weight") + key: one.contiguous() for key, one in packed.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    form = KINDS[next(iter(kinds.values()))][1] if len(set(kinds.values())) == 1 else "mixed-precision"
    settings = QuantizationConfig(config_groups=groups, format=form, ignore=["lm_head"],
                                  quantization_status=QuantizationStatus.COMPRESSED).model_dump(mode="json")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return meant


def load(folder: Path, meant: dict[str, torch.Tensor], dequantize: bool) -> str:
    """How it went: "right", "wrong", or the error."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                     quantization_config=CompressedTensorsConfig(dequantize=dequantize))
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    with torch.no_grad():
        model(torch.arange(1, 33)[None])
    found = {name: parameter.detach() for name, parameter in model.named_parameters() if name in meant}
    equal = found.keys() == meant.keys() and all(torch.allclose(found[name], one, atol=1e-6) for name, one in meant.items())
    return "right" if equal else "wrong"


root, seen = Path(sys.argv[1]), {}
for name, kinds in {"eight bits": {"self_attn": "eight", "mlp": "eight"}, "four bits": {"self_attn": "four", "mlp": "four"},
                    "both": {"self_attn": "eight", "mlp": "four"}}.items():
    meant = make(root / name, kinds)
    for dequantize in (True, False):
        seen[name, dequantize] = load(root / name, meant, dequantize)
        print(f"{name}, dequantize={dequantize}: {seen[name, dequantize]}")
assert "automatic conversion of the weights" in seen.pop(("both", True))
assert set(seen.values()) == {"right"}, "only the checkpoint with both schemes fails, and only with dequantize"
PYTHON
"$folder/venv/bin/python" "$folder/run.py" "$folder/model" 2> "$folder/log" || { tail -30 "$folder/log"; exit 1; }
echo "ok: transformers 5.23.0 cannot dequantize several schemes of compressed-tensors 0.19.0"
