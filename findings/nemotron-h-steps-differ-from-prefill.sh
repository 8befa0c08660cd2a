#!/usr/bin/env bash
# Nemotron-H in transformers gives other logits token by token with a cache than in one pass over the same text.
#
# Versions: transformers 5.23.0, torch 2.13.0 (CPU), Python 3.11.
# Expected: the logits of the two differ by float32 rounding, and the time step of a Mamba2 layer has the limits
#   `time_step_limit` of the config, by default (0, inf).
# Seen: a pass over several tokens clamps the time step to at least `time_step_min` (0.001), which initializes weights; a
#   pass over one token with a cache does not. In this random model, with time steps of 0.0001 to 0.05, logits differ by
#   6% of the largest. Passes over 8 tokens with a cache are those of one pass, and with the limits (0, inf) all are equal.
# Matters: scores of a text (loglikelihood, perplexity) are of another model than its answers, and a token that is verified
#   with others gets other logits than one decoded alone. specbatch clamps neither.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.0 transformers==5.23.0
cat > "$folder/run.py" <<'PYTHON'
import torch
import transformers
from transformers import NemotronHConfig, NemotronHForCausalLM

PROMPT, LENGTH = 8, 64
config = NemotronHConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    layer_types=["linear_attention", "mlp", "full_attention", "linear_attention"], ssm_state_size=16, mamba_num_heads=8,
    mamba_head_dim=16, n_groups=2, chunk_size=16,
)
assert config.time_step_limit[0] == 0.0 and config.time_step_min == 0.001, "the config has other limits"
model = NemotronHForCausalLM(config).eval().float()
mixers = [module for module in model.modules() if hasattr(module, "dt_bias")]
generator = torch.Generator().manual_seed(0)
with torch.no_grad():
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() > 1:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.2 / parameter[0].numel() ** 0.5)
    for mixer in mixers:  # time steps of about 0.0001 to 0.05
        mixer.dt_bias.copy_(torch.linspace(-9, -3, len(mixer.dt_bias)))
tokens = torch.randint(0, config.vocab_size, (1, LENGTH), generator=generator)


@torch.no_grad()
def with_cache(step: int) -> torch.Tensor:
    """The logits of the prompt in one pass and of the other tokens in passes over `step` of them."""
    output = model(tokens[:, :PROMPT], use_cache=True)
    found = [output.logits]
    for start in range(PROMPT, LENGTH, step):
        output = model(tokens[:, start : start + step], past_key_values=output.past_key_values, use_cache=True)
        found.append(output.logits)
    return torch.cat(found, dim=1)


def differences() -> list[float]:
    """Of passes over 8 tokens and over one from a single pass, relative to the largest logit."""
    with torch.no_grad():
        whole = model(tokens).logits
    return [((with_cache(step) - whole).abs().max() / whole.abs().max()).item() for step in (8, 1)]


print(f"transformers {transformers.__version__}: limits of the time step {mixers[0].time_step_limit}")
eight, one = differences()
print(f"from one pass, 8 tokens at a time differ by {eight:.0e} of the largest logit, one at a time by {one:.1%}")
for mixer in mixers:
    mixer.time_step_limit = tuple(config.time_step_limit)
eight_without, one_without = differences()
print(f"with the limits {mixers[0].time_step_limit}: by {eight_without:.0e} and {one_without:.0e}")
assert eight < 1e-5 and eight_without < 1e-5, "passes over several tokens with a cache differ for another reason"
assert one > 0.005, "one token at a time gives the logits of one pass"
assert one_without < 1e-5, "one token at a time differs for another reason"
PYTHON
"$folder/venv/bin/python" "$folder/run.py" 2> "$folder/log" || { tail -20 "$folder/log"; exit 1; }
echo "ok: transformers 5.23.0 clamps the time step of Nemotron-H except in passes over one token"
