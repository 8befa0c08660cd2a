"""Models of simulated acceptance: geometric, written down, counted in a run, and from golden curves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbatch import SpecbatchError
from specbatch.config.acceptance_profile import (
    AcceptanceProfile,
    from_accept_lengths,
    from_counts,
    geometric,
    read_profile,
    whole_lengths,
)

CURVES = "model:\n  thinking_on:\n    1: 1.86\n    2: '2.55'\n    3: 3.08\n  thinking_off: {1: 1.5, 3: 2.0}\n"


@pytest.mark.parametrize("count", [1, 3, 15, 63])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.4, 0.999, 1.0])
def test_geometric_model_has_the_mean_with_one_probability(count: int, share: float) -> None:
    mean = 1 + share * count
    profile = geometric(mean, count)
    assert len(set(profile.conditional)) == 1
    assert len(profile.conditional) == count
    assert profile.accept_length() == pytest.approx(mean, abs=1e-9)
    assert profile.of_drafts(count) == profile
    if share in (0.0, 1.0):
        assert profile.conditional[0] == share


@pytest.mark.parametrize("form", ["json", "yaml", "record"])
def test_drafts_after_one_that_is_never_accepted_need_no_probability(tmp_path: Path, form: str) -> None:
    counts = {"tried": [8, 4, 0, 0], "accepted": [4, 0, 0, 0]}
    contents = {
        "json": json.dumps({"conditional": from_counts("", **counts).conditional}),
        "yaml": "1: 1.5\n2: 1.5\n",
        "record": json.dumps({"counters": {"acceptance": counts}}),
    }
    path = tmp_path / f"profile.{'yaml' if form == 'yaml' else 'json'}"
    path.write_text(contents[form])
    assert read_profile(str(path)).of_drafts(4).conditional == (0.5, 0.0, 0.0, 0.0)
    assert read_profile(str(path)).of_drafts(1).conditional == (0.5,)


def test_accept_length_of_fewer_drafts_is_the_sum_of_the_first_products() -> None:
    profile = AcceptanceProfile("", (0.5, 0.25, 1.0))
    assert [profile.accept_length(count) for count in range(4)] == [1.0, 1.5, 1.625, 1.75]


def test_curves_are_met_at_every_number_and_constant_between() -> None:
    lengths = {1: 1.8, 4: 3.0, 6: 3.2}
    profile = from_accept_lengths("", lengths)
    assert {count: profile.accept_length(count) for count in lengths} == pytest.approx(lengths)
    assert len(set(profile.conditional[1:4])) == len(set(profile.conditional[4:6])) == 1


# Of thinking_off of minimaxm3_eagle3.yaml, and of thinking_on of dsv4_0813_dspark_probabilistic.yaml, of InferenceX.
MEASURED = [(1.84, 2.52, 2.93, 3.41, 3.59, 3.57, 3.85, 4.06), (1.84, 2.51, 3.01, 3.36, 3.61, 3.77, 3.73, 3.47)]


@pytest.mark.parametrize("lengths", MEASURED)
def test_noisy_curves_are_met_at_the_number_of_drafts(lengths: tuple[float, ...]) -> None:
    curve = from_accept_lengths("curve", dict(enumerate(lengths, start=1)))
    for drafted, length in enumerate(lengths, start=1):
        profile = curve.of_drafts(drafted)
        assert profile.accept_length() == pytest.approx(length)
        assert all(0 <= p <= 1 for p in profile.conditional)
    rising = curve.of_drafts(3)
    assert [rising.accept_length(drafted) for drafted in (1, 2)] == pytest.approx(lengths[:2])


def test_fewer_drafts_than_a_curve_lists_follow_the_next_number() -> None:
    curve = from_accept_lengths("", {1: 1.5, 3: 2.0, 4: 1.9})
    assert curve.of_drafts(2).conditional == curve.of_drafts(3).conditional[:2]
    assert curve.of_drafts(4).accept_length() == pytest.approx(1.9)


def test_lengths_that_drafts_cannot_have_are_refused() -> None:
    with pytest.raises(SpecbatchError, match=r"simulate_accept='high': the probability of draft 1 is 1\.1; use 0 to 1"):
        from_accept_lengths("high", {2: 3.2}).of_drafts(2)
    with pytest.raises(SpecbatchError, match=r"the probability of draft 1 is -0\.5; use 0 to 1"):
        from_accept_lengths("", {1: 0.5}).of_drafts(1)
    assert from_accept_lengths("", {1: 1.0, 2: 1.0}).of_drafts(2).conditional == (0.0, 0.0)


def test_counts_end_where_nothing_was_tried() -> None:
    assert from_counts("run", [8, 4, 0, 0], [4, 1, 0, 0]).conditional == (0.5, 0.25)


def test_whole_lengths_accept_the_number_below_or_above() -> None:
    assert whole_lengths(2.25, 4).conditional == (1.0, 0.25, 0.0, 0.0)


def test_profiles_are_read_from_text_and_files(tmp_path: Path) -> None:
    assert read_profile("0.5, 0.25,1") == AcceptanceProfile("0.5, 0.25,1", (0.5, 0.25, 1.0))
    record = {"counters": {"acceptance": {"drafted": [4, 4], "tried": [4, 2], "accepted": [2, 1]}}}
    (tmp_path / "record.json").write_text(json.dumps(record))
    (tmp_path / "curves.yaml").write_text(CURVES)
    one = tmp_path / "one.json"
    for written in ([0.5, 0.5], {"conditional": [0.5, 0.5]}, {"m": {"default": {"1": 1.5, "2": 1.75}}}, {"2": 1.75}):
        one.write_text(json.dumps(written))
        assert read_profile(str(one)).conditional == pytest.approx((0.5, 0.5))
        assert read_profile(str(one)).name == str(one)
    one.write_text('{"name": "mine", "conditional": [1]}')
    assert read_profile(str(one)) == AcceptanceProfile("mine", (1.0,))
    for text in (str(tmp_path), str(tmp_path / "record.json")):
        assert read_profile(text) == AcceptanceProfile(text, (0.5, 0.5))
    for name in ("thinking_on", "model/thinking_on"):
        profile = read_profile(f"{tmp_path}/curves.yaml#{name}")
        assert [profile.accept_length(count) for count in (1, 2, 3)] == pytest.approx([1.86, 2.55, 3.08])


def test_a_profile_by_context_is_linear_in_the_logarithm_of_the_length(tmp_path: Path) -> None:
    path = tmp_path / "falling.json"
    listed = {"2048": [0.2, 0.1], "512": [0.8, 0.5]}
    for written in (listed, {"conditional": listed}):
        path.write_text(json.dumps(written))
        profile = read_profile(str(path)).of_drafts(1)
        assert profile.by_context == ((512, (0.8,)), (2048, (0.2,)))
        assert [profile.at(length)[0] for length in (1, 512, 1024, 2048, 9999)] == pytest.approx(
            [0.8, 0.8, 0.5, 0.2, 0.2]
        )
        assert profile.conditional == (0.8,)
    for wrong in ({"512": [0.8], "2048": [0.2, 0.1]}, {"512": [0.8], "long": [0.2]}, {"512": [1.2]}, {"0": [0.1]}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(SpecbatchError, match="simulate_accept="):
            read_profile(str(path)).of_drafts(1)


@pytest.mark.parametrize(
    ("content", "works"),
    [
        ("[]", "must list probabilities"),
        ("[true]", "must list probabilities"),
        ('{"conditional": [0.5, "x"]}', "must list probabilities"),
        ("7", "is not a profile; name a JSON file"),
        ("{", "is not JSON"),
        ('{"a": 1}', "is not a profile; name a JSON file"),
        ('{"m": {"0": 1.5}}', "is not a profile; name a JSON file"),
        ('{"m": {"1": 1.5, "1e9": 3}}', "is not a profile; name a JSON file"),
        ('{"m": {"1.5": 1.5}}', "is not a profile; name a JSON file"),
        ('{"m": {"a": {"1": 1.5}, "b": {"1": 1.6}}}', "has 2 curves; add the name of one to the file: #m/a, #m/b"),
        ('{"counters": {}}', "the record of a run that drafted nothing"),
        ('{"counters": {"acceptance": {"tried": [0], "accepted": [0]}}}', "the record of a run that drafted nothing"),
        (None, "cannot be read (No such file or directory); name a JSON file"),
    ],
)
def test_other_files_are_refused(content: str | None, works: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SpecbatchError, match="simulate_accept=") as error:
        read_profile(str(path))
    assert works in str(error.value)


def test_curves_that_a_file_does_not_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "curves.yaml").write_text(CURVES)
    with pytest.raises(
        SpecbatchError, match="add the name of one to the file: #model/thinking_on, #model/thinking_off"
    ):
        read_profile(f"{tmp_path}/curves.yaml#thinking")
