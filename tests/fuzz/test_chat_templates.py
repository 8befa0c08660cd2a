"""Mutated chat templates: each renders or is refused in one line, within its limits."""

from __future__ import annotations

from random import Random

from chat_templates import PLAIN, REFUSED, RENDERED
from fuzzing import Fuzz

from specbatch.errors import SpecbatchError
from specbatch.text.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 < 2 & 'x'\n"},
    {"role": "assistant", "content": "<think>\nyes\n</think>\nTrue"},
]
KNOWN = [text for text in (*REFUSED.values(), *RENDERED.values()) if len(text) < 1_000]
TOKENS = [
    "{{", "}}", "{%", "%}", "{#", "#}", "(", ")", "[", "]", "{", "}", "|", ".", "~", "*", "**", "'", '"', "-%}", "{%-",
    " for ", " in ", " if ", " not ", " is ", " recursive ", "macro", "endfor", "endif", "set", "loop", "messages",
    "namespace", "range", "10000000000", "1e308", "\x00", "\ud800", "\u202e", "content", "__class__", "_x", "\\",
]  # fmt: skip


def mutated(random: Random) -> str:
    """A template with parts of it removed, repeated, nested or replaced by parts of others."""
    text = random.choice(PLAIN if random.random() < 0.5 else KNOWN)
    for _ in range(random.randint(1, 4)):
        start = random.randrange(len(text) + 1)
        end = min(len(text), start + random.choice((0, 1, 4, 30, 200)))
        other = random.choice(random.choice((PLAIN, KNOWN)))
        at = random.randrange(len(other) + 1)
        match random.randrange(5):
            case 0:
                new = random.choice(TOKENS)
            case 1:
                new = other[at : at + random.choice((10, 50, 500))]
            case 2:
                new = text[start:end] * random.choice((2, 100, 10_000))
            case 3:
                new = ""
            case _:
                new = random.choice(TOKENS) * random.choice((2, 1_000))
        text = text[:start] + new + text[end:]
    return text


def test_chat_templates(fuzz: Fuzz, short_renderings: None) -> None:
    for random in fuzz.rounds(quick=12):
        template = ChatTemplate(mutated(random), "mine")
        try:
            template.render(messages=MESSAGES, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")
            fuzz.outcome("rendered")
        except SpecbatchError as error:
            fuzz.refused(error)
            if "ended its process" in str(error):
                fuzz.outcome("crashed")
