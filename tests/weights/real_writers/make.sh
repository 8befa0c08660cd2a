#!/bin/bash
# Writes the checkpoints of `files` again, each with its tool in an environment of its own, on a CPU:
#   bash make.sh ENVIRONMENTS FOLDER
# Some gigabytes and half an hour. Not part of the tests; those read what is kept in `files` (folders that are not kept
# are variants that were compared once).
set -euo pipefail
environments=$(realpath -m "$1") out=$(realpath -m "$2")
here=$(realpath "$(dirname "$0")")
mkdir -p "$environments" "$out"
echo torch==2.13.0 > "$environments/constraints.txt"

environment() {  # NAME PACKAGE...: torch first, so that no other build of it is installed
    python3 -m venv "$environments/$1"
    "$environments/$1/bin/pip" install -q torch==2.13.0
    "$environments/$1/bin/pip" install -q -c "$environments/constraints.txt" "${@:2}"
}
run() { (cd "$environments" && "$environments/$1/bin/python" "$here/$2" "$out"); }  # gptqmodel leaves logs behind

environment auto-round auto-round==0.16.1
run auto-round write_auto_round.py

# gptqmodel 7.7.0 asks for torch 2.14.1, and works with 2.13.0.
environment gptqmodel "setuptools>=84.2.1,<85" wheel "accelerate>=1.15" "datasets>=5.1" defuser device-smi dill \
    jinja2 logbar packaging pillow protobuf pyarrow pypcre requests safetensors threadpoolctl tokenicer "transformers>=5.20.2"
"$environments/gptqmodel/bin/pip" install -q --no-deps torchao==0.18.0
BUILD_CUDA_EXT=0 "$environments/gptqmodel/bin/pip" install -q --no-deps --no-build-isolation gptqmodel==7.7.0
run gptqmodel write_gptqmodel.py

environment llm-compressor llmcompressor==0.14.0.1 compressed-tensors==0.19.0
run llm-compressor write_llm_compressor.py

environment modelopt "nvidia-modelopt[hf]==0.47.0"
run modelopt write_modelopt.py

environment quark amd-quark==0.13 transformers accelerate
run quark write_quark.py

environment speculators speculators==0.9.0
"$environments/speculators/bin/pip" uninstall -q -y torchvision torchaudio # builds for another torch
"$environments/speculators/bin/pip" install -q --no-deps specforge==0.2.0
run speculators write_speculators.py
run speculators write_specforge.py
