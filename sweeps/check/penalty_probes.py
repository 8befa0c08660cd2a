"""Does a server honor presence, frequency and repetition penalties?"""

from __future__ import annotations

from specbatch.errors import counted
from specbatch.servers.replies import Reply, Token
from specbatch.sweeps.check.places import first_change, lead, repeats
from specbatch.sweeps.check.probe_requests import HONORED, IGNORED, UNTESTED, WRONG, ProbeRequests


class PenaltyProbes(ProbeRequests):
    """Of penalties."""

    def _presence_penalty(self) -> tuple[str, str]:
        return self._penalty("presence_penalty")

    def _frequency_penalty(self) -> tuple[str, str]:
        return self._penalty("frequency_penalty")

    def _penalty(self, name: str) -> tuple[str, str]:
        """At 2 a token that the answer has must give way to a new one that is less than 2 below it; at -2 a new one to
        one that the answer has."""
        for place, reply in self._answers():
            for value in (-2.0, 2.0):
                end = first_change(reply, self._prompt_of(place, reply), is_raised=value < 0, least=2 - self._clear)
                if end is None:
                    continue
                return self._penalized(place, reply, end, name, value)
        return self._without_effect

    def _penalized(self, place: int, reply: Reply, end: int, name: str, value: float) -> tuple[str, str]:
        """Whether a penalty changes one of the first `end` tokens, as it must. SGLang counts tokens of one verify
        afterwards only, so that its penalties come late with drafts."""
        answer = self._reply(place, max_tokens=end, **{name: value})
        if answer.tokens[:end] != reply.tokens[:end]:
            return HONORED, ""
        pairs = zip(self._reply(place, **{name: value}).tokens, reply.tokens, strict=False)
        late = next((at for at, (found, without) in enumerate(pairs) if found != without), None)
        if late is not None and late < len(reply.top) and lead(reply, late) > self._clear:
            return (
                WRONG,
                f"{value:g} changes token {late} first, and must change one of the first {counted(end, 'token')}",
            )
        return IGNORED, f"{value:g} does not change an answer that it must change"

    def _repetition_penalty(self) -> tuple[str, str]:
        """vLLM and transformers count tokens of prompt and answer, SGLang those of the answer only."""
        found = [(place, reply, repeats(reply, self._prompt_of(place, reply))) for place, reply in self._answers()]
        of_answer = self._repeated([(place, reply, ends) for place, reply, (ends, _) in found])
        if of_answer is not None and of_answer[0] != HONORED:
            return of_answer
        of_prompt = self._repeated([(place, reply, ends) for place, reply, (_, ends) in found])
        if of_prompt is None or of_prompt[0] == HONORED:
            return of_prompt or of_answer or self._without_effect
        text = "tokens of the prompt do not count"
        return (HONORED, text) if of_answer else (UNTESTED, f"{text}, and no answer repeats its own")

    def _repeated(self, found: list[tuple[int, Reply, list[int]]]) -> tuple[str, str] | None:
        """Whether a penalty of 2 changes near ties. It takes half of a logit, which may be small, so that only two that
        stay show that it is ignored."""
        name, tried = "repeat_penalty" if self._is_llamacpp else "repetition_penalty", 0
        for place, reply, ends in sorted(found, key=lambda one: -len(one[2])):
            if not ends:
                break
            result = self._penalized(place, reply, ends[:2][-1], name, 2.0)
            tried += len(ends[:2])
            if result[0] == HONORED or tried > 1:
                return result
        return None

    def _prompt_of(self, place: int, reply: Reply) -> set[Token]:
        """The tokens of a prompt, named as the log-probabilities of its answer name them: SGLang sends ids of answers,
        and texts with its log-probabilities."""
        ids = self._prompts[place]
        if any(isinstance(token, int) for token in reply.pieces):
            return {*ids}
        return {self._decode([token]) for token in ids}

    @property
    def _without_effect(self) -> tuple[str, str]:
        shown = any(reply.top for reply in self._greedy.values())
        return UNTESTED, "no answer that it must change" if shown else "needs log-probabilities"
