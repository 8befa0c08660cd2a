#!/usr/bin/env bash
# GPTQModel's AWQ ignores the group_size of a `dynamic` rule, writes it into config.json, and cannot load the result.
#
# Versions: gptqmodel 7.7.0, transformers 5.24.0, torch 2.13.0
# Expected: a rule such as {"+:.*down_proj": {"group_size": 64}} sets the groups of a layer, as it does with GPTQ.
# Seen: with AWQ the layer is quantized in groups of the whole config (32), and config.json has the rule. GPTQModel
#   refuses to load its own file: the shape of the scales differs.
# Matters: the table of such a file describes other tensors than it has. specbatch refuses it by the name of the tensor;
#   take the rule out of config.json.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
pip() { "$folder/venv/bin/pip" install -q --disable-pip-version-check "$@"; }
pip torch==2.13.0
echo torch==2.13.0 > "$folder/constraints.txt"
pip -c "$folder/constraints.txt" "setuptools>=84.2.1,<85" wheel "accelerate>=1.15" "datasets>=5.1" defuser device-smi \
    dill jinja2 logbar packaging pillow protobuf pyarrow pypcre requests safetensors threadpoolctl tokenicer \
    transformers==5.24.0
pip --no-deps torchao==0.18.0
BUILD_CUDA_EXT=0 pip --no-deps --no-build-isolation gptqmodel==7.7.0
cat > "$folder/run.py" <<'PYTHON'
import json
import os
import sys

os.cpu_count = lambda: 8  # gptqmodel 7.7.0 cannot be imported where it finds two cores

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT, METHOD
from safetensors.torch import load_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

plain, out = f"{sys.argv[1]}/plain", f"{sys.argv[1]}/written"
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, tie_word_embeddings=False, max_position_embeddings=128,
)
LlamaForCausalLM(config).half().save_pretrained(plain)
words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
PreTrainedTokenizerFast(
    tokenizer_object=words, bos_token="w1", eos_token="w2", pad_token="w2", unk_token="w0"
).save_pretrained(plain)
ids = torch.randint(3, 64, (8, 64), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids.split(1)]
groups = {}
for name, settings in {"gptq": {}, "awq": {"quant_method": METHOD.AWQ, "format": FORMAT.GEMM}}.items():
    rules = {"+:.*down_proj": {"group_size": 64}}
    settings = QuantizeConfig(bits=4, group_size=32, device="cpu", dynamic=rules, **settings)
    model = GPTQModel.load(plain, settings)
    model.quantize(data)
    model.save(f"{out}-{name}")
    groups[name] = len(load_file(f"{out}-{name}/model.safetensors")["model.layers.0.mlp.down_proj.scales"])
with open(f"{out}-awq/config.json") as file:
    stated = json.load(file)["quantization_config"]["dynamic"]
print("groups of 128 inputs:", groups, "config.json of AWQ:", stated)
assert groups == {"gptq": 2, "awq": 4}
assert stated == {"+:.*down_proj": {"group_size": 64}}
try:
    GPTQModel.load(f"{out}-awq", device="cpu", backend=BACKEND.TORCH_AWQ, dtype=torch.float16)
except ValueError as error:
    print(error)
    assert "scales" in str(error)
else:
    raise SystemExit("GPTQModel loaded it")
PYTHON
(cd "$folder" && venv/bin/python run.py "$folder" 2>&1 | grep -v "INFO\|WARN\|^ *$\|[│┌└]") # it leaves logs behind
