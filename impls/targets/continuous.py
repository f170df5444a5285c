"""Continuous batching as the transformers library does it, asked as a server is asked."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from impls.request import Request, SamplingParams
from impls.seams import Clock, Emission, KVCacheManager, StepResult, never_runs
from impls.targets.causal_lm import kernels_of, resident_bytes
from impls.targets.pages import FAST_PAGE, is_flash

LOOK_S = 0.5  # how often a wait looks whether the library's thread still lives
CLOSE_S = 30.0


@dataclass
class _Open:
    """A request that has not ended. ``stops``: token ids that end it."""

    request: Request
    key: str
    stops: frozenset[int]
    num_seen: int = 0


class ContinuousBatchingTarget:
    """`ContinuousBatchingManager`: its own thread schedules and computes, tokens arrive here as a stream.

    It is given the arm's slots (``max_num_seqs``), rows a step (``max_num_batched_tokens``) and KV blocks (those of
    ``kv``), and decides for itself within them: decodes first, then parts of prompts first come first served; no new
    prompt while less than 15 % of the blocks are free; whoever must yield is computed again. What its steps were is not
    known outside of it, so `StepResult.stats` is None, and a token's time is when it arrived here.

    All requests are decoded by the parameters of the first one, which the manager is opened with; others are rejected.
    Samples come from torch's one generator, seeded by the first request: they depend on who shares the batch.
    """

    def __init__(
        self,
        *,
        model: Any,
        kv: KVCacheManager,
        clock: Clock,
        eos_token_ids: Seq[int],
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        share_prefixes: bool,
    ) -> None:
        self.max_model_len = max_model_len
        self.weights_bytes = resident_bytes(model)
        self._model, self._kv, self._clock = model, kv, clock
        self._eos_token_ids = frozenset(eos_token_ids)
        self._limits = {
            "max_requests_per_batch": max_num_seqs,
            "max_batch_tokens": max_num_batched_tokens,
            "num_blocks": kv.num_blocks,
            "page_size": kv.block_size,
            "allow_block_sharing": share_prefixes,
        }
        self._open: dict[str, _Open] = {}
        self._ids: dict[str, str] = {}  # the library's id of a request -> ours: an id of ours may come again
        self._rejected: list[Emission] = []
        self._num_added = 0
        self._sampling: tuple[float, int, float] | None = None
        self._manager = self._new_manager(SamplingParams())

    @property
    def kernels(self) -> Mapping[str, str]:
        found = kernels_of(self._model)
        return {**found, "kv_cache": f"{found['kv_cache']} in pages of {self._kv.block_size}"}

    # --- the Target protocol ------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id!r} is already submitted")
        reason = self._never_runs(request)
        if reason is not None:
            self._rejected.append(Emission(request.request_id, (), self._clock.now(), "rejected", reason))
            return
        if self._sampling is None:
            self._start(request.sampling)
        sampling = request.sampling
        stops = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self._eos_token_ids)
        key = str(self._num_added)
        self._num_added += 1
        self._open[request.request_id] = _Open(request, key, stops)
        self._ids[key] = request.request_id
        added = self._manager.add_request(
            list(request.prompt_token_ids),
            request_id=key,
            max_new_tokens=sampling.max_tokens,
            streaming=True,
            eos_token_id=sorted(stops) or -1,
        )
        if added is None:
            raise RuntimeError(self._epitaph())

    @property
    def has_work(self) -> bool:
        return bool(self._open) or bool(self._rejected)

    def abort(self, request_id: str) -> None:
        ended = self._open.pop(request_id, None)
        if ended is not None:
            del self._ids[ended.key]
            self._manager.cancel_request(ended.key)
        self._rejected = [emission for emission in self._rejected if emission.request_id != request_id]

    def close(self) -> None:
        """Ends the library's thread; what it still computes is thrown away."""
        for request_id in list(self._open):
            self.abort(request_id)
        self._rejected = []
        if self._sampling is not None:
            self._manager.stop(block=True, timeout=CLOSE_S, hard_stop=True)
            self._manager.destroy()

    def step(self, until: float) -> StepResult:
        """Wait for tokens, at most until the clock shows ``until``; all that have arrived by then."""
        emissions, self._rejected = self._rejected, []
        if not self._open and not emissions:
            self._clock.sleep_until(until)
        while not emissions and (left := until - self._clock.now()) > 0:
            output = self._manager.get_result(timeout=min(left, LOOK_S))
            if output is None and not self._manager.is_running():
                raise RuntimeError(self._epitaph())
            now = self._clock.now()
            while output is not None:
                emissions += self._arrived(output, now)
                output = self._manager.get_result(timeout=0)
        return StepResult(emissions)

    # --- towards the library ------------------------------------------------------------------------------------------

    def _new_manager(self, sampling: SamplingParams) -> Any:
        transformers: Any = import_module("transformers")
        drawn = {"temperature": float(sampling.temperature), "top_k": sampling.top_k, "top_p": float(sampling.top_p)}
        config = transformers.GenerationConfig(
            eos_token_id=-1, do_sample=sampling.temperature > 0, **(drawn if sampling.temperature > 0 else {})
        )
        limits = transformers.ContinuousBatchingConfig(**self._limits, seed=sampling.seed)
        limits.max_blocks_per_request = self._fast_blocks()
        return self._model.init_continuous_batching(generation_config=config, continuous_batching_config=limits)

    def _fast_blocks(self) -> int:
        """Pages of its longest request, for its kernel for decodes; 0: that one cannot run. As many as it asks for
        itself where it is told of lengths: one more than needed, and even."""
        page = self._kv.block_size
        if page % FAST_PAGE or not is_flash(self._model.config._attn_implementation):
            return 0
        blocks = -(-self.max_model_len // page) + 1
        return blocks + blocks % 2

    @torch.inference_mode()
    def _start(self, sampling: SamplingParams) -> None:
        """Its thread computes in the mode in which it was started."""
        self._sampling = _drawn_by(sampling)
        if sampling.temperature > 0:
            self._manager = self._new_manager(sampling)
        self._manager.start()

    def _never_runs(self, request: Request) -> str | None:
        if (reason := never_runs(request, self.max_model_len, self._kv)) is not None:
            return reason
        if self._sampling is not None and (drawn := _drawn_by(request.sampling)) != self._sampling:
            asked, given = ("temperature {}, top_k {}, top_p {}".format(*each) for each in (drawn, self._sampling))
            return f"{asked}: transformers' continuous batching decodes all requests alike, here by {given}"
        return None

    def _arrived(self, output: Any, now: float) -> list[Emission]:
        """What is new in an output, which holds all tokens so far; nothing if its request was aborted."""
        request_id = self._ids.get(output.request_id)
        if request_id is None:
            return []
        state = self._open[request_id]
        new = tuple(int(token) for token in output.generated_tokens[state.num_seen :])
        state.num_seen += len(new)
        reason = error = None
        if output.is_finished():
            if output.error is not None:
                reason, error = "error", " ".join(str(output.error).split())
            else:
                reason = "stop" if new and new[-1] in state.stops else "length"
            del self._open[request_id], self._ids[output.request_id]
        return [Emission(request_id, new, now, reason, error)] if new or reason else []

    def _epitaph(self) -> str:
        cause = self._manager.background_thread_status.fatal_error
        return f"transformers' continuous batching has stopped: {cause or 'no error is known'}"


def _drawn_by(sampling: SamplingParams) -> tuple[float, int, float]:
    """Greedy requests are alike, whatever else they ask for."""
    greedy = sampling.temperature == 0
    return (0.0, 0, 1.0) if greedy else (float(sampling.temperature), sampling.top_k, float(sampling.top_p))
