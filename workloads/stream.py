"""The request stream: what a driver asks for, and when. The same seed gives the same requests in every arm."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impls.request import Request, SamplingParams
from workloads.prompts import PromptSource, Tokens
from workloads.sessions import SessionPlan


@dataclass(frozen=True)
class Plan:
    """All of a stream that is known before it runs; a prompt is only built when its request is.

    arrivals_s: float64 [num_sessions], or [concurrency] for a closed loop; prompt_tokens, output_tokens: int64 [n], for
    a session's later turns prompt_tokens is what the turn adds; sampling: by request index; session_ids: [n];
    priorities: [n], or none at all.
    """

    arrivals_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    sessions: SessionPlan
    sampling: Callable[[int], SamplingParams]
    session_ids: Seq[str | None]
    priorities: Seq[int] = ()


@dataclass
class _Turn:
    """A request in flight, with what its follow-up needs."""

    session: int
    index: int
    prompt: Tokens


class RequestStream:
    """Open loop, closed loop and sessions in one: `initial`, then whatever `on_finish` adds.

    window_rule: burst | replay | timed (DESIGN section 6); ``warmup_s``: start of a timed window;
    ``num_requests``: how many requests there will be in all; ``provenance``: what this traffic is and where it is from.
    """

    def __init__(
        self,
        plan: Plan,
        prompts: PromptSource,
        *,
        window_rule: str,
        warmup_s: float,
        clip_to: int | None,
        provenance: dict[str, Any],
    ) -> None:
        """``clip_to``: shorten each prompt to clip_to - max_tokens (if that leaves any); None: leave it."""
        self.plan, self.window_rule, self.warmup_s, self.provenance = plan, window_rule, warmup_s, provenance
        self.num_requests = len(plan.prompt_tokens)
        self.last_arrival_s = (
            0.0  # latest intended arrival of the requests issued so far; final when the stream has ended
        )
        self._prompts, self._clip_to = prompts, clip_to
        self._in_flight: dict[str, _Turn] = {}
        self._next_session = 0

    def initial(self) -> list[Request]:
        """The requests whose arrival does not depend on a finish, by intended arrival. Starts the stream afresh."""
        self._in_flight.clear()
        self._next_session, self.last_arrival_s = 0, 0.0
        return [self._start_session(float(arrival)) for arrival in self.plan.arrivals_s]

    def on_finish(self, request: Request, finished_s: float, output_token_ids: Seq[int]) -> list[Request]:
        """Requests that follow from this one's end, whatever its finish reason: the session's next turn, or (closed
        loop) the next session. Empty for an open loop. Call it once for every request of the stream.
        """
        turn = self._in_flight.pop(request.request_id)
        if turn.index + 1 < self.plan.sessions.first[turn.session + 1]:
            return [self._follow_up(turn, finished_s, output_token_ids)]
        if self._next_session < len(self.plan.sessions.first) - 1:
            return [self._start_session(finished_s)]
        return []

    def warmup_requests(
        self, n: int, *, prompt_tokens: int | None = None, max_tokens: int | None = None
    ) -> list[Request]:
        """``n`` requests of the same kind, at t = 0, whose prompts share no first token with the measured ones (prompts
        given in a trace file excepted). Lengths: those of the stream's first requests, unless given.
        """
        requests = []
        for i in range(n):
            like = i % self.num_requests
            output = max_tokens or int(self.plan.output_tokens[like])
            length = self._clipped(prompt_tokens or int(self.plan.prompt_tokens[like]), output)
            sampling = replace(self.plan.sampling(like), max_tokens=output)
            requests.append(Request(f"warmup-{i}", self._prompts.warm_up(i, length), sampling))
        return requests

    def _start_session(self, arrival_s: float) -> Request:
        session = self._next_session
        self._next_session += 1
        index = int(self.plan.sessions.first[session])
        length = self._clipped(int(self.plan.prompt_tokens[index]), int(self.plan.output_tokens[index]))
        prompt = self._prompts.opening(index, length)
        return self._issue(session, index, prompt, arrival_s, min(self._prompts.shared(index), len(prompt) - 1))

    def _follow_up(self, turn: _Turn, finished_s: float, output_token_ids: Seq[int]) -> Request:
        index = turn.index + 1
        if self.plan.sessions.history == "generated":
            reply = tuple(output_token_ids)
            cached = len(turn.prompt) + max(0, len(reply) - 1)  # the last token's keys and values were never computed
        else:
            reply = self._prompts.reply(turn.index, int(self.plan.output_tokens[turn.index]))
            cached = len(turn.prompt)
        history, question = turn.prompt + reply, int(self.plan.prompt_tokens[index])
        room = self._clipped(len(history) + question, int(self.plan.output_tokens[index]))
        asked = self._prompts.follow_up(index, min(question, room))
        if len(history) + len(asked) > room:  # a chat forgets its oldest words, never the question
            kept = max(0, room - len(asked))
            history, cached = history[:1][:kept] + history[len(history) - max(0, kept - 1) :], min(cached, 1)
        prompt = history + asked
        arrival_s = finished_s + float(self.plan.sessions.think_s[index])
        return self._issue(turn.session, index, prompt, arrival_s, min(cached, len(prompt) - 1))

    def _issue(self, session: int, index: int, prompt: Tokens, arrival_s: float, cached: int) -> Request:
        request = Request(
            request_id=f"request-{index}",
            prompt_token_ids=prompt,
            sampling=self.plan.sampling(index),
            arrival_s=arrival_s,
            session_id=self.plan.session_ids[index],
            planned_cached_tokens=cached,
            priority=self.plan.priorities[index] if self.plan.priorities else 0,
        )
        self._in_flight[request.request_id] = _Turn(session, index, prompt)
        self.last_arrival_s = max(self.last_arrival_s, arrival_s)
        return request

    def _clipped(self, prompt_tokens: int, output_tokens: int) -> int:
        room = prompt_tokens if self._clip_to is None else self._clip_to - output_tokens
        return min(prompt_tokens, room) if room >= 1 else prompt_tokens
