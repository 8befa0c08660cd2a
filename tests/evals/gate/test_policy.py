"""Policies in TOML: refused mistakes, and the documented example."""

from __future__ import annotations

import pytest

from specbatch.errors import SpecbatchError
from specbatch.evals.gate import policy as module
from specbatch.evals.gate.policy import load_policy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rule"),
        ("[bounds]", "has no rule"),
        ("bounds = [", "is not TOML"),
        ("[speed]\na = 1", "speed is unknown; use one of alpha, accuracy, answers, bounds$"),
        ("alpha = 1\n[bounds]\nstep_s = {worsens_at_most = 0.1}", r"alpha=1: use a number below 1$"),
        ("alpha = 0.1\n[accuracy]\nalpha = 0.1", r"alpha is given twice, also in \[accuracy\]; remove one$"),
        ("alpha = 0.1\n[bounds]\nstep_s = {at_most = 1}", "alpha has no effect: no rule is a test; leave it out$"),
        ("alpha = 0.1\n[accuracy]\nmay_fall = true", "alpha has no effect"),
        ("[accuracy]\nmay_fall = true\nalpha = 0.1", r"alpha of \[bounds\] goes above the tables$"),
        (
            "[bounds]\noutput_throughput = {worsens_at_most = 5}",
            "output_throughput: worsens_at_most=5 allows any value; use a share below 1, such as 0.05 for 5%$",
        ),
        ("[accuracy]\natleast = 0.5", r"accuracy\.atleast is unknown; did you mean at_least\?$"),
        ('[answers]\nequals = "yes"', r"answers\.equals is unknown; did you mean equal\? \(1 more mistake\)$"),
        ("[accuracy]\nat_least = 1.5", r"accuracy\.at_least=1\.5: use at most 1$"),
        ("[accuracy]\nat_least = true", r"accuracy\.at_least=true: use a number$"),
        ("[accuracy]\nalpha = 0", r"accuracy\.alpha=0: use a number above 0$"),
        ("[accuracy]\nmay_fall = true\ndetects = 0.1", "which may_fall = true skips"),
        ("[bounds]\nttft_s = {at_most = 1}", r"no such metric: ttft_s; did you mean .*mean_ttft_s"),
        ("[bounds]\nmean_ttft_s = {at_least = 1}", "mean_ttft_s: lower is better; use at_most instead of at_least"),
        ("[bounds]\naccept_length = {at_most = 1}", "accept_length: higher is better; use at_least"),
        ("accuracy = 0.5", r"accuracy=0\.5: write a table of filter, metric, at_least, "),
        (
            "[bounds]\naccept_length = 2",
            r"bounds\.accept_length=2: write a table of at_least, at_most, worsens_at_most$",
        ),
        ("[bounds]\naccept_length = {least = 2}", r"accept_length\.least is unknown; did you mean at_least\?$"),
        ("[bounds]\naccept_length = {}", "has no limit"),
        ("[bounds]\naccept_length = {at_least = nan}", "finite"),
        ("[bounds]\naccept_length = {worsens_at_most = -0.1}", r"worsens_at_most=-0\.1: use at least 0$"),
        ('[bounds]\naccept_length = {at_least = "2"}', 'at_least="2": use a number'),
        ("[bounds]\na = {at_least = 1, z = 2}\nb = {y = 1}", r"\(1 more mistake\)"),
    ],
)
def test_mistakes_in_a_policy_are_refused_in_one_line(policy, text, message):
    with pytest.raises(SpecbatchError, match=message) as error:
        load_policy(policy(text))
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("policy='")


@pytest.mark.parametrize(
    ("text", "alpha"),
    [
        ("[bounds]\nstep_s = {worsens_at_most = 2}", 0.05),
        ("alpha = 0.01\n[bounds]\nstep_s = {worsens_at_most = 0}", 0.01),
        ("alpha = 0.01\n[accuracy]\n", 0.01),
        ("alpha = 0.01\n[accuracy]\nmay_fall = true\n[bounds]\nstep_s = {worsens_at_most = 0}", 0.01),
        ("[accuracy]\nalpha = 0.01", 0.01),
    ],
)
def test_alpha_above_the_tables_or_of_accuracy(policy, text, alpha):
    assert load_policy(policy(text)).significance == alpha


def test_unreadable_policies_are_refused(tmp_path):
    with pytest.raises(SpecbatchError, match="cannot be read"):
        load_policy(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff")
    with pytest.raises(SpecbatchError, match="is not UTF-8"):
        load_policy(tmp_path / "bytes.toml")


def test_example_of_the_docstring_is_a_policy(policy):
    text = "\n".join(line[4:] for line in (module.__doc__ or "").splitlines() if line.startswith("    "))
    found = load_policy(policy(text))
    assert found.needs_baseline
    assert found.accuracy is not None
    assert (found.accuracy.at_least, found.accuracy.detects, found.bounds["p99_ttft_s"].at_most) == (0.6, 0.03, 0.5)
