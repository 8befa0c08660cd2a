#!/usr/bin/env bash
# The zero point 8 of symmetric INT4 weights is stored as 0x77777777, as 0x88888888 or not at all.
#
# Versions: auto-round 0.16.1, compressed-tensors 0.19.0, torch 2.13.0
# Expected: one spelling; or that `sym: true` or `zero_point: false` means that no zero points are stored.
# Seen: auto-round's GPTQ packing stores 7 (less 1), its AWQ packing 8 with `zero_point: false` in the config, and
#   compressed-tensors' pack-quantized nothing.
# Matters: a reader that adds 1 to all of them, or refuses AWQ without `zero_point`, computes another model without a
#   message: of a target all answers are wrong, of a draft the accept length is 1. specbatch takes 8 for GPTQ with
#   `sym: true` whatever is stored (docs/quantization.md, "INT4").
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install -q --disable-pip-version-check "$@"; }
pip torch==2.13.0
echo torch==2.13.0 > "$folder/constraints.txt"
pip -c "$folder/constraints.txt" auto-round==0.16.1 compressed-tensors==0.19.0
cat > "$folder/run.py" <<'PYTHON'
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from auto_round import AutoRound
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

found = {}
with TemporaryDirectory() as folder:
    plain = f"{folder}/plain"
    LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                                 num_attention_heads=2)).half().save_pretrained(plain)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w2").save_pretrained(plain)
    for form in ("auto_gptq", "auto_awq"):
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float16)
        texts = list(torch.randint(3, 64, (4, 32)).split(1))
        tool = AutoRound(model, AutoTokenizer.from_pretrained(plain), bits=4, group_size=32, sym=True, iters=0,
                         disable_opt_rtn=True, nsamples=4, seqlen=32, dataset=texts, device_map="cpu")
        tool.quantize_and_save(f"{folder}/{form}", format=form)
        path = next(Path(folder, form).rglob("model.safetensors"))
        zeros = [tensor for name, tensor in load_file(path).items() if name.endswith("qzeros")]
        settings = json.loads((path.parent / "config.json").read_text())["quantization_config"]
        found[form] = {hex(word & 0xFFFFFFFF) for tensor in zeros for word in tensor.flatten().tolist()}
        print(form, found[form], {key: settings.get(key) for key in ("sym", "zero_point")})
        assert settings["sym"] is True and settings.get("zero_point") in (None, False)
scheme = preset_name_to_scheme("W4A16", ["Linear"])
state = {"weight": torch.randn(64, 128), "weight_scale": torch.ones(64, 1), "weight_zero_point": torch.zeros(64, 1).char()}
packed = PackedQuantizationCompressor.compress(state, scheme)
print("pack-quantized", sorted(packed))
assert found == {"auto_gptq": {"0x77777777"}, "auto_awq": {"0x88888888"}}, found
assert not any("zero_point" in name for name in packed)
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2> "$folder/log" || { tail -20 "$folder/log"; exit 1; }
