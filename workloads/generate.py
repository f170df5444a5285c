"""A stream drawn from laws: arrivals x prompt length x output length x prompts x sessions."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from impls.request import SamplingParams
from workloads.arrivals import ARRIVALS, Burst, ClosedLoop
from workloads.lengths import LENGTHS, MAX_TOKENS, Lengths
from workloads.options import build_law, build_options, require
from workloads.prompts import PROMPTS
from workloads.sessions import SESSIONS
from workloads.setting import Setting, check_overlength
from workloads.stream import Plan, RequestStream

LAWS = ("arrivals", "prompt_length", "output_length", "prompts")


@dataclass(frozen=True)
class Options:
    """``length_scale`` multiplies both lengths (1: as published), shared prefixes not. ``priority_shares``: how much of
    the traffic is of class 0, 1, ..., drawn for each request; none: all of class 0."""

    num_requests: int
    warmup_s: float = 0.0
    length_scale: float = 1.0
    overlength: str = "reject"
    priority_shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require(1 <= self.num_requests <= 10_000_000, "num_requests", self.num_requests, "from 1 to 10000000")
        require(self.warmup_s >= 0, "warmup_s", self.warmup_s, "at least 0 (seconds)")
        require(0 < self.length_scale <= 1000, "length_scale", self.length_scale, "above 0 and at most 1000")
        check_overlength(self.overlength)
        shares = self.priority_shares
        fair = all(share >= 0 for share in shares) and abs(sum(shares) - 1) < 1e-6
        require(fair or not shares, "priority_shares", list(shares), "shares of at least 0 that add up to 1, or []")


def generate(setting: Setting) -> RequestStream:
    """``num_requests`` requests as the laws of the workload draw them. WorkloadError for an option that is wrong."""
    options = build_options(
        "workload", Options, setting.options(*LAWS, "sessions", "sampling"), f"workload={setting.config.get('name')}"
    )
    seeds, n = setting.seeds, options.num_requests
    arrival_law = build_law("workload.arrivals", ARRIVALS, setting.law("arrivals"))
    prompt_law = build_law("workload.prompts", PROMPTS, setting.law("prompts"))
    session_law = build_law("workload.sessions", SESSIONS, setting.config.get("sessions") or {"name": "none"})

    def lengths(group: str) -> Lengths:
        law = build_law(f"workload.{group}", LENGTHS, setting.law(group))
        drawn = law.sample(np.random.default_rng(getattr(seeds, group)), n) * options.length_scale
        scaled: Lengths = np.clip(np.rint(drawn), 1, MAX_TOKENS).astype(np.int64)
        return scaled

    prompt_tokens, output_tokens = lengths("prompt_length"), lengths("output_length")
    sessions = session_law.plan(np.random.default_rng(seeds.sessions), n)
    num_sessions = len(sessions.first) - 1
    arrivals = arrival_law.sample(np.random.default_rng(seeds.arrivals), num_sessions)
    session_ids: list[str | None] = [None] * n
    if sessions.history is not None:
        turns = np.diff(sessions.first)
        session_ids = [f"session-{session}" for session in np.repeat(np.arange(num_sessions), turns).tolist()]
    prompts = prompt_law.build(setting.tokenizer, setting.vocabulary, seeds.prompts, prompt_tokens)
    priorities: list[int] = []
    if shares := options.priority_shares:
        drawn = np.random.default_rng(seeds.priorities).choice(len(shares), n, p=np.array(shares) / sum(shares))
        priorities = drawn.tolist()
    request_seeds, common = setting.request_seeds(n), asdict(setting.sampling)

    def sampling(index: int) -> SamplingParams:
        return SamplingParams(**common, max_tokens=int(output_tokens[index]), seed=int(request_seeds[index]))

    open_loop = not isinstance(arrival_law, ClosedLoop)
    provenance = {
        **setting.describe(prompt_tokens, output_tokens, arrivals if open_loop else None, options.overlength),
        **{group: dict(setting.law(group)) for group in LAWS},
        "text": prompts.describe(),
        "length_scale": options.length_scale,
        "num_sessions": num_sessions,
        "history": sessions.history,
        "identical_across_arms": sessions.history != "generated",
    }
    if sessions.history is not None and options.overlength == "clip":  # a turn's history may be what is too long
        provenance["clipped_to"] = setting.max_model_len
    if priorities:
        provenance["priority_shares"] = list(options.priority_shares)
    return RequestStream(
        Plan(arrivals, prompt_tokens, output_tokens, sessions, sampling, session_ids, priorities),
        prompts,
        window_rule="burst" if isinstance(arrival_law, Burst) else "timed",
        warmup_s=options.warmup_s,
        clip_to=setting.max_model_len if options.overlength == "clip" else None,
        provenance=provenance,
    )
