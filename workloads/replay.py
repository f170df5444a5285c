"""A stream that repeats recorded traffic (`workload=trace`)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from impls.request import SamplingParams
from workloads.errors import WorkloadError
from workloads.options import METADATA, build_law, build_options, require
from workloads.prompts import PROMPTS
from workloads.sessions import SingleTurn
from workloads.setting import Setting, check_overlength, check_stop_tokens
from workloads.stream import Plan, RequestStream
from workloads.trace import dequantise, read_trace, trace_fingerprint
from workloads.trace_prompts import TracePrompts, given_prompts

MAX_SCALE = 1e6  # beyond it a run has no end, and its reciprocal no beginning


@dataclass(frozen=True)
class Options:
    """``time_scale`` multiplies timestamps (0.5: twice as fast) once ``dequantise_s`` has spread them."""

    path: str | None
    limit: int | None = None
    skip_head: int = 0
    dequantise_s: float | None = None
    time_scale: float = 1.0
    overlength: str = "reject"

    def __post_init__(self) -> None:
        require(bool(self.path), "path", "null", "a JSONL or Azure CSV file, for instance workload.path=requests.jsonl")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1, or null for all")
        require(self.skip_head >= 0, "skip_head", self.skip_head, "at least 0")
        require(
            self.dequantise_s is None or self.dequantise_s > 0,
            "dequantise_s",
            self.dequantise_s,
            "above 0 (seconds), or null",
        )
        allowed = f"from {1 / MAX_SCALE:g} to {MAX_SCALE:g} (0.5 is twice as fast)"
        require(1 / MAX_SCALE <= self.time_scale <= MAX_SCALE, "time_scale", self.time_scale, allowed)
        check_overlength(self.overlength)


def replay(setting: Setting) -> RequestStream:
    """The requests of ``workload.path``, at the times recorded there. WorkloadError for what is missing or wrong."""
    _refuse_rates(setting)
    options = build_options("workload", Options, setting.options("arrivals", "prompts", "sampling"), "workload=trace")
    prompt_law = build_law("workload.prompts", PROMPTS, setting.config.get("prompts") or {"name": "random"})
    path = Path(str(options.path)).expanduser()
    rows = read_trace(path, limit=options.limit, skip_head=options.skip_head)
    timed = rows[0].arrival_s is not None
    if options.dequantise_s is not None:
        if not timed:
            raise WorkloadError(
                f"workload.dequantise_s={options.dequantise_s}: must be null, the trace has no timestamps"
            )
        rows = dequantise(rows, options.dequantise_s, np.random.default_rng(setting.seeds.arrivals))
    n = len(rows)
    arrivals = np.array([row.arrival_s or 0.0 for row in rows]) * options.time_scale
    given = given_prompts(rows, setting.tokenizer, setting.vocab_size)
    prompt_tokens = np.array(
        [len(given[i]) if i in given else row.input_length for i, row in enumerate(rows)], dtype=np.int64
    )
    output_tokens = np.array([row.max_tokens for row in rows], dtype=np.int64)
    text_seed, block_seed = setting.seeds.prompts.spawn(2)
    text = prompt_law.build(setting.tokenizer, setting.vocabulary, text_seed, prompt_tokens)
    prompts = TracePrompts(rows, text, setting.vocabulary, block_seed, given)
    for row in rows:
        where = f"workload.path, line {row.line}: stop_token_ids"
        check_stop_tokens(where, row.stop_token_ids or (), setting.vocab_size)
    request_seeds, common = setting.request_seeds(n), asdict(setting.sampling)

    def sampling(index: int) -> SamplingParams:
        row = rows[index]
        own = {name: getattr(row, name) for name in ("temperature", "ignore_eos", "stop_token_ids", "seed")}
        recorded = {key: value for key, value in own.items() if value is not None}
        return SamplingParams(**{**common, "seed": int(request_seeds[index]), **recorded, "max_tokens": row.max_tokens})

    provenance = {
        **setting.describe(prompt_tokens, output_tokens, arrivals, options.overlength),
        "arrivals": "as recorded" if timed else "none recorded, all at 0",
        "file": path.name,
        "file_sha256": trace_fingerprint(path),
        "limit": options.limit,
        "skip_head": options.skip_head,
        "dequantise_s": options.dequantise_s,
        "time_scale": options.time_scale,
        "text": prompts.describe(),
        "identical_across_arms": True,
    }
    return RequestStream(
        Plan(
            arrivals,
            prompt_tokens,
            output_tokens,
            SingleTurn().plan(np.random.default_rng(0), n),
            sampling,
            [row.session_id for row in rows],
            [row.priority for row in rows],
        ),
        prompts,
        window_rule="replay" if timed else "burst",
        warmup_s=0.0,
        clip_to=setting.max_model_len if options.overlength == "clip" else None,
        provenance=provenance,
    )


def _refuse_rates(setting: Setting) -> None:
    """A rate that is silently ignored mislabels a run; here it is an error."""
    arrivals = setting.config.get("arrivals") or {"name": "replay"}
    for key, value in arrivals.items():
        if (key == "name" and value != "replay") or (key not in METADATA and value is not None):
            typed = f"workload/arrivals={value}" if key == "name" else f"workload.arrivals.{key}={value}"
            raise WorkloadError(
                f"{typed}: must be left out, a replay's arrivals come from its file; use workload.time_scale"
            )
