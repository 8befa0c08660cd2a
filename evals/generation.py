"""Generation arguments of lm-eval (`generation_kwargs` of tasks, `--gen-kwargs`) as sampling parameters of the engine.

They mean what lm-eval's model for transformers makes of them (`HFLM` of lm-eval 0.4.13 with transformers 5.23): it
normalizes them (`normalize_gen_kwargs`) and passes the others to `generate`. What is not supported is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from specbatch.config.settings import Rule, is_number
from specbatch.core.sampling_params import SAMPLED, SamplingParams, refuse_unsampled
from specbatch.errors import refuse
from specbatch.evals.options import MAX_NEW_TOKENS

LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one given counts
_PARAMS = {  # sampling parameters by the arguments that set them
    **{name: name for name in SAMPLED if name != "temperature"},
    **{name: name for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")},
    "min_new_tokens": "min_tokens",
}
_RULES: dict[str, Rule] = {item.name: item.metadata["rule"] for item in fields(SamplingParams) if item.metadata}
# Arguments with the value that changes nothing, which some tasks have.
_WITHOUT_EFFECT = {
    "num_beams": 1, "num_return_sequences": 1, "no_repeat_ngram_size": 0, "length_penalty": 1, "use_cache": True,
}  # fmt: skip
_INSTEAD = {
    "max_length": "it limits prompt and answer together: use max_gen_toks",
    "min_length": "it counts the prompt, too: use min_new_tokens",
    "stop": "use until",
    "seed": "use the engine's seed",
}
_KNOWN = ("until", "do_sample", "temperature", *LIMITS, *_PARAMS)
Where = tuple[str, object]  # a setting and its value, to which a refusal is attributed


class Generation(NamedTuple):
    """What a request asks for.

    params  arguments of `SamplingParams`, without the stop strings
    stops   stop strings
    given   names of the arguments that have a value
    notes   arguments that have no effect, one line each
    """

    params: dict[str, Any]
    stops: tuple[str, ...]
    given: tuple[str, ...]
    notes: tuple[str, ...]


def parsed(text: str) -> dict[str, Any]:
    """The arguments in the text of `--gen-kwargs`: `temperature=0.8,top_p=0.95` or JSON, read by lm-eval's parser."""
    from lm_eval._cli.utils import key_val_to_dict, try_parse_json

    try:
        found = try_parse_json(text)
        found = found if isinstance(found, dict) else key_val_to_dict(text)
    except ValueError as error:
        works = "use arguments such as temperature=0.8,top_p=0.95 or until=['Q:'], or a JSON object"
        raise refuse("gen_kwargs", text, f"{error}; {works}") from None
    check_arguments(found, ("gen_kwargs", text))
    return found


def check_arguments(wanted: Mapping[str, Any], where: Where) -> None:
    """Refuse arguments and values that the engine does not support."""
    unknown = [
        name
        for name, value in wanted.items()
        if name not in _KNOWN and not (name in _WITHOUT_EFFECT and value == _WITHOUT_EFFECT[name])
    ]
    if unknown:
        instead = "; ".join(f"{name}: {_INSTEAD[name]}" for name in unknown if name in _INSTEAD)
        shown = ", ".join(f"{name}={wanted[name]!r}" for name in sorted(unknown))
        works = instead or "leave it out, or use another task"
        raise refuse(*where, f"sets {shown}, which the engine does not support; {works}")
    until = wanted.get("until", [])
    listed = [until] if isinstance(until, str) else until
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise refuse(*where, f"sets until={until!r}; use a text or a list of texts")
    if "" in listed:
        # In HFLM it ends every answer after its first token.
        raise refuse(*where, f"sets until={until!r}, but a stop string must not be empty; use until=[] for none")
    if (sample := wanted.get("do_sample")) not in (True, False, None):
        raise refuse(*where, f"sets do_sample={sample!r}; use true or false")
    if not is_number(temperature := wanted.get("temperature", 0.0)) or temperature < 0:
        raise refuse(*where, f"sets temperature={temperature!r}; use 0 (greedy) or a positive number")
    for name in LIMITS:
        if (limit := wanted.get(name)) is not None and not (str(limit).isdecimal() and int(limit) > 0):
            raise refuse(*where, f"sets {name}={limit!r}; use a whole number of at least 1")
    for name, param in _PARAMS.items():
        if (value := wanted.get(name)) is not None and not _RULES[param].fits(value):
            raise refuse(*where, f"sets {name}={value!r}; {_RULES[param].works}")


def generation_of(
    wanted: Mapping[str, Any], where: Where, chosen: Mapping[str, float], max_new_tokens: int | None = None
) -> Generation:
    """What a task's arguments ask for.

    chosen          sampling parameters that replace the task's, by name
    max_new_tokens  replaces the task's limit

    Refused: what `check_arguments` refuses; do_sample without a temperature; more tokens at least
    than at most; chosen parameters that have no effect because answers are greedy.
    """
    from lm_eval.models.utils import normalize_gen_kwargs

    check_arguments(wanted, where)
    kwargs = normalize_gen_kwargs(wanted, default_max_gen_toks=MAX_NEW_TOKENS)
    found: dict[str, Any] = {
        name: kwargs[argument] for argument, name in _PARAMS.items() if kwargs.get(argument) is not None
    }
    asked = wanted.get("temperature", 0.0)
    found["temperature"] = float(asked) if kwargs["do_sample"] else 0.0
    found |= chosen
    if kwargs["do_sample"] and not asked and "temperature" not in chosen:
        works = "transformers does not sample with temperature 0; set a temperature, such as 1.0, or do_sample=False"
        raise refuse(*where, f"sets do_sample=True without a temperature: {works}")
    refuse_unsampled({**chosen, "temperature": found["temperature"]})
    notes = []
    if asked and "temperature" not in chosen and not kwargs["do_sample"]:
        notes.append(f"temperature={asked:g} has no effect, because of do_sample=False; add do_sample=True")
    if not found["temperature"]:
        without = {name: found.pop(name) for name in SAMPLED[1:] if name in found}
        notes += [
            f"{name}={value} has no effect, because answers are greedy"
            for name, value in without.items()
            if value != getattr(SamplingParams, name)
        ]
    limits = {name: limit for name in LIMITS if (limit := wanted.get(name)) is not None}
    if max_new_tokens is None and len({*map(int, limits.values())}) > 1:
        first, *others = (f"{name}={limit}" for name, limit in limits.items())
        notes.append(f"{first} counts and {', '.join(others)} does not, as in lm-eval")
    found["max_new_tokens"] = most = max_new_tokens or kwargs["max_gen_toks"]
    if (least := found.get("min_tokens", 0)) > most:
        raise refuse(*where, f"sets min_new_tokens={least}, but answers have at most {most} tokens; use at most {most}")
    given = tuple(name for name, value in wanted.items() if value is not None)
    return Generation(found, tuple(kwargs["until"]), given, tuple(notes))
