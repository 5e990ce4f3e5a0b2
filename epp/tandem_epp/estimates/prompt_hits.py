"""Cached share of the prompts that one pod computes: as the choice predicted it, and as measured.

The engine measures it. vLLM's counters tell how many tokens of the prompts that got their first
token were computed, and how many came from its cache or from elsewhere: those of every request,
while the `usage` of a stream comes too late for the response's headers, and many clients do not
ask for it. Only for an engine whose page lacks these counters, the `usage` in answers is taken.
A pod has one source, so no request counts twice.

A decode pod also counts the prompts that prefill pods computed for it. They are counted there, so
here they are left out:

    prompt = tokens of all prompts - tokens of prompts that were handed over
    cached = prompt - computed

What is handed over is known from the placements, and exactly from the responses, which say how long
the prompts were. A hand-over is left out from its placement on, before the engine counts it, with
room for a prompt that is longer than predicted. So the pod's own prompts may count late, but no
prompt counts for both pods meanwhile.

A request whose response is not seen counts as not handed over: most of these ended before their KV
was transferred. For the others, and for hand-offs of other routers, the KV that the pod received is
a lower bound of what was handed over. It bounds the sum, so it is the weaker, the more of the
prompts that were handed over the decode pod had cached itself.
"""

from typing import Final

from tandem_contract.pod_reports import HitReport, Reporter

from .engine_figures import EngineCounters, difference

_RECENT_TOKENS: Final = 1e6
"""Prompt tokens after which older ones count half in the ratio that `/debug/pods` shows."""

_RESERVE: Final = 2.0
"""Tokens left out for each predicted one until the response tells: a text without a known count has
four bytes per token by prediction, and rarely less than two."""


_NO_COUNTS: Final = EngineCounters(prompt_tokens=0.0, computed_tokens=0.0, external_tokens=0.0)
"""Of a process that has just started."""


class HitTokens:
    """Tokens of prompts, and of these the cached ones; they never fall."""

    def __init__(self) -> None:
        self.prompt = self.cached = 0.0
        self._recent = self._recent_cached = 0.0

    def add(self, prompt: float, cached: float) -> None:
        """Count `prompt` more tokens, of which `cached` were cached."""
        self.prompt, self.cached = self.prompt + prompt, self.cached + cached
        self._recent, self._recent_cached = self._recent + prompt, self._recent_cached + cached
        if self._recent > _RECENT_TOKENS:
            self._recent, self._recent_cached = self._recent / 2, self._recent_cached / 2

    def report(self, reported_by: Reporter) -> HitReport | None:
        """The share over the latest tokens; None before the first one."""
        if not self._recent:
            return None
        return HitReport(self._recent_cached / self._recent, self._recent, reported_by)


class PromptHits:
    """The prompts that one pod computed since the EPP knows it."""

    def __init__(self) -> None:
        self.estimated = HitTokens()
        """Of answered requests of this EPP and its replicas, as the choice predicted it."""
        self._answers, self._counted = HitTokens(), HitTokens()
        self._engine: _EngineHits | None = None
        """None: the engine's page has no such counters, or was not read yet."""

    @property
    def measured(self) -> tuple[Reporter, HitTokens]:
        """What was measured, and who reports it."""
        if self._engine is not None:
            return Reporter.ENGINE, self._counted
        return Reporter.ANSWERS, self._answers

    def on_answer(self, prompt: float, cached: float) -> None:
        """An answer tells of a prompt that this pod computed."""
        self._answers.add(prompt, min(prompt, cached))

    def hand_over(self, prompt: float) -> "HandOver":
        """Another pod is to compute a prompt of about `prompt` tokens for this one."""
        return HandOver(self._engine, prompt)

    def on_counters(self, counters: EngineCounters, *, receives_kv: bool) -> None:
        """Take in a scrape. `receives_kv`: external tokens are those of hand-offs, and not of a
        cache outside the engine."""
        if counters.prompt_tokens is None or counters.computed_tokens is None:
            return
        if self._engine is None:
            # What was counted before belongs to requests that were not predicted here.
            self._engine = _EngineHits(counters)
        else:
            self._counted.add(*self._engine.advance(counters, receives_kv=receives_kv))

    def restart(self) -> None:
        """Another process answers, with an empty cache and counters that began at 0."""
        if self._engine is not None:
            self._engine = _EngineHits(_NO_COUNTS)


class HandOver:
    """A prompt that one pod computes for another."""

    def __init__(self, engine: "_EngineHits | None", prompt: float) -> None:
        self._engine, self._reserved = engine, _RESERVE * prompt
        if engine is not None:
            engine.handed_over += self._reserved
            engine.under_way += 1

    def settle(self, prompt: float) -> None:
        """The response, or the end, has come: `prompt` tokens were handed over; 0: the pod computed
        the prompt itself, or not at all, or there was no response. A second call does nothing."""
        if (engine := self._engine) is not None:
            # A process that was replaced meanwhile has no say any more.
            self._engine = None
            engine.under_way -= 1
            engine.handed_over += prompt - self._reserved


class _EngineHits:
    """The prompts that one process of an engine counts."""

    def __init__(self, counters: EngineCounters) -> None:
        """Counts from `counters` on."""
        self.handed_over = 0.0
        """Tokens of prompts that other pods compute, by placements and responses."""
        self.under_way = 0
        """Hand-overs without a response."""
        self._counters = counters
        self._external = 0.0
        """Tokens whose KV came from elsewhere."""
        self._left_out = 0.0
        """Tokens that were handed over, as of the last page."""
        self._owed = 0.0
        """Those of them that the engine has not counted. Below 0: it has counted a prompt of its
        own that was believed to be handed over."""
        self._computed = 0.0
        """Tokens computed for prompts that count once what is owed has been counted."""
        self._was_under_way = 0
        """`under_way` at the last page."""

    def advance(self, counters: EngineCounters, *, receives_kv: bool) -> tuple[float, float]:
        """Take in a page; returns the tokens of the pod's own prompts, and the cached ones."""
        before, self._counters = self._counters, counters
        self._external += difference(before.external_tokens or 0.0, counters.external_tokens or 0.0)
        left_out = max(self.handed_over, self._external if receives_kv else 0.0)
        self._owed += left_out - self._left_out
        # A page may be older than the response that passed before it was read.
        was_under_way, self._was_under_way = self._was_under_way, self.under_way
        is_quiet = not self.under_way and not was_under_way and left_out == self._left_out
        self._left_out = left_out
        counted = difference(before.prompt_tokens, counters.prompt_tokens)
        self._computed += difference(before.computed_tokens, counters.computed_tokens)
        prompt = max(0.0, counted - self._owed)
        self._owed -= counted - prompt
        computed = min(prompt, self._computed)
        self._computed -= computed
        if is_quiet and not counted:
            # At rest the engine has counted all that it ever will: what is left are hand-overs that
            # failed, and the last tokens of others, which an engine may compute again.
            self._owed = self._computed = 0.0
        return prompt, prompt - computed
