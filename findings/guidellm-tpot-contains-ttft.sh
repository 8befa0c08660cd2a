#!/usr/bin/env bash
# guidellm's "time per output token" contains the time to first token; what others call TPOT is its inter-token latency.
#
# Versions: guidellm 0.8.1.
# Expected: (last token - first token) / (tokens - 1), as in vllm bench serve 0.33.0 and SGLang's bench_serving 0.5.23;
#           of an answer of one token, none.
# Seen:     (last token - start of the request) / tokens. With a TTFT of 1 s and 10 more tokens in 1 s it is 182 ms, not
#           100 ms. An answer of one token has its whole latency as time per output token.
# Matters:  a speedup of TPOT by speculation looks smaller the longer the prompts are, and figures of two tools under
#           one name cannot be compared. docs/other-tools.md lists the definitions; specbatch's TPOT leaves TTFT out.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install -q torch==2.13.0 guidellm==0.8.1
"$dir/venv/bin/python" - <<'END'
import math

from guidellm.schemas.base.info import RequestInfo, RequestTimings
from guidellm.schemas.base.request import UsageMetrics
from guidellm.schemas.base.request_stats import GenerativeRequestStats


def stats(tokens):
    """A request that is sent at 100 s, has its first token at 101 s and its last one at 102 s."""
    timings = RequestTimings(
        request_start=100.0, resolve_start=100.0, first_token_iteration=101.0, last_token_iteration=102.0,
        request_end=102.0, resolve_end=102.0,
    )
    info = RequestInfo(request_id="r", status="completed", timings=timings)
    counts = {"input_metrics": UsageMetrics(text_tokens=5), "output_metrics": UsageMetrics(text_tokens=tokens)}
    return GenerativeRequestStats(request_id="r", info=info, request_args="{}", output="x", **counts)


found = stats(11)
ttft, tpot, itl = found.time_to_first_token_ms, found.time_per_output_token_ms, found.inter_token_latency_ms
single = stats(1)
print(f"TTFT {ttft:.0f} ms, TPOT {tpot:.1f} ms, ITL {itl:.1f} ms")
print(f"one token: TPOT {single.time_per_output_token_ms:.0f} ms")
assert math.isclose(tpot, 2000 / 11)
assert math.isclose(itl, 100)
assert single.inter_token_latency_ms is None
assert math.isclose(single.time_per_output_token_ms, 2000)
END
