"""Mutated policies of the gate: each is accepted or refused in one line."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fuzzing import Fuzz
from mutate import mutate_bytes

from specbatch.errors import SpecbatchError
from specbatch.evals.gate.policy import load_policy

POLICY = """[accuracy]
filter = "flexible-extract"
metric = "exact_match"
at_least = 0.60
may_fall = false
alpha = 0.05
power = 0.8
detects = 0.03
unparsed_at_most = 0.0

[bounds]
accept_length = { at_least = 2.0, worsens_at_most = 0.02 }
p99_ttft_s = { at_most = 0.5, worsens_at_most = 0.10 }
output_throughput = { worsens_at_most = 0.05 }
"""
VALUES = (
    *("true", "nan", "inf", "-inf", "-1", "1e400", "0x10", "1_000", "9" * 400, "9" * 5000, '""', "[]", "{}", "{a=1}"),
    *("[[" * 200 + "]]" * 200, "2024-01-01", "'''x'''", '"\\ud800"', '"' + "a" * 5000 + '"', "0.5 0.5", "12:00:00"),
)
KEYS = ("filter", "may_fall", "bounds", "accept_length", "accuracy.alpha", '""', '"a b"', "x" * 300, "at_least")


def mutate_toml(random: Random, text: str) -> bytes:
    """Other values, other or repeated keys, lines that are missing, repeated or swapped, or broken bytes."""
    lines = text.splitlines()
    for _ in range(random.randint(1, 3)):
        place = random.randrange(len(lines))
        key, equals, _value = lines[place].partition(" = ")
        match random.randrange(6):
            case 0 | 1 if equals:
                lines[place] = f"{key} = {random.choice(VALUES)}"
            case 2 if equals:
                lines[place] = f"{random.choice(KEYS)} = {random.choice(VALUES)}"
            case 3:
                lines.insert(place, random.choice(lines))
            case 4 if len(lines) > 1:
                del lines[place]
            case 5:
                return mutate_bytes(random, "\n".join(lines).encode())
    return "\n".join(lines).encode()


def test_policies(fuzz: Fuzz, tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    for random in fuzz.rounds(quick=300):
        path.write_bytes(mutate_toml(random, POLICY))
        try:
            load_policy(path)
        except SpecbatchError as error:
            fuzz.refused(error)
        else:
            fuzz.outcome("accepted")
