"""Some steps of a trial, to be run again: which ones, and the requests of them as they stood."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.driven import Driven
from impls.request import Request


@dataclass(frozen=True)
class Excerpt:
    """``count`` steps from number ``first`` on.

    running: what ran before them and after, its prompt prolonged so that computing it yields the last token that there
    was. joining: by step (0 is ``first``), what ran for the first time there.
    """

    first: int
    count: int
    running: list[Request]
    joining: dict[int, list[Request]]


def excerpt(seen: Driven, *, count: int, at: float) -> Excerpt | None:
    """At most ``count`` steps around the prompt whose step began nearest to ``at``: 0 is the first step, 1 the last.
    None without a step."""
    starts = seen.steps["start_s"].to_numpy(float)
    if not len(starts):
        return None
    count = min(count, len(starts))
    place = starts[0] + at * (starts[-1] - starts[0])
    prompts = np.flatnonzero(seen.steps["prefill_tokens"].to_numpy(float) > 0)
    nearest = int(prompts[np.abs(starts[prompts] - place).argmin()]) if len(prompts) else 0
    first = int(np.clip(nearest - count // 2, 0, len(starts) - count))
    begin = starts[first]
    running: list[Request] = []
    joining: dict[int, list[Request]] = {}
    for request, row in zip(seen.sent, seen.requests.to_dict("records"), strict=True):
        if row["scheduled_s"] < begin and not row["finished_s"] < begin:
            running.append(_prolonged(request, row, begin))
        elif row["scheduled_s"] >= begin:
            step = int(np.searchsorted(starts, row["scheduled_s"])) - first
            if step < count:
                joining.setdefault(step, []).append(request)
    return Excerpt(first, count, running, joining)


def _prolonged(request: Request, row: dict[Any, Any], until_s: float) -> Request:
    """As it stood then: what it had yielded is prompt, all but the last token, which computing this prompt yields."""
    emissions = zip(row["emission_times_s"], row["emission_tokens"], strict=True)
    yielded = sum(int(tokens) for time_s, tokens in emissions if time_s < until_s)
    known = max(0, yielded - 1)
    tokens = [int(token) for token in row["output_token_ids"][:known]]
    sampling = replace(request.sampling, max_tokens=request.sampling.max_tokens - known)
    return replace(request, prompt_token_ids=(*request.prompt_token_ids, *tokens), sampling=sampling)
