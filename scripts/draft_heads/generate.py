"""The target's own text with its hidden states: what its draft heads are trained on.

    python -m scripts.draft_heads.generate --tokens 300000

One pass: the engine decodes many natural prompts at once, in BF16, and the final-normed hidden states that its steps
compute anyway are kept. Interrupted at any time (Ctrl-C), it goes on from its last full shard when called again.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from harness.arm import option, resolve_study
from harness.drive import RealClock
from impls.build import build_engine
from impls.engine import Engine
from impls.models.source import ModelSource, open_model
from impls.request import Request, Sequence
from impls.seams import DraftTokens, ModelRunner, Proposer, StepBatch
from impls.user_cache import make_cache
from scripts.draft_heads.prompts import Prompts
from scripts.draft_heads.shards import Generated, done_indices, write_shard

SHARD_SEQUENCES = 96


class HiddenStateCapture(Proposer):
    """Drafts nothing, and keeps what it observes until `take`."""

    num_draft_tokens = 0

    def __init__(self) -> None:
        self._rows: dict[str, list[tuple[int, Tensor]]] = {}

    def propose(self, sequences: Seq[Sequence], k: Mapping[str, int], runner: ModelRunner) -> dict[str, DraftTokens]:
        return {}

    def observe(self, batch: StepBatch, hidden_states: Tensor | None) -> None:
        assert hidden_states is not None
        parts = torch.split(hidden_states[: batch.num_rows].bfloat16().cpu(), batch.query_lens)
        for seq_id, end, part in zip(batch.seq_ids, batch.kv_lens, parts, strict=True):
            self._rows.setdefault(seq_id, []).append((end - len(part), part))

    def take(self, seq_id: str, length: int) -> Tensor:
        """BF16 [length, hidden]; what was computed last counts, where a preemption made it twice."""
        parts = self._rows.pop(seq_id)
        hidden = torch.full((length, parts[0][1].shape[1]), math.nan, dtype=torch.bfloat16)
        for start, part in parts:
            hidden[start : start + len(part)] = part
        if bool(hidden.isnan().any()):
            raise AssertionError(f"request {seq_id}: not every position was observed, or not every state is finite")
        return hidden


def arm_of(model: Mapping[str, Any], max_num_seqs: int, budget: str) -> dict[str, Any]:
    """The resolved arm that generates: continuous batching, paged, BF16, eager."""
    names = {
        **{"device": "auto", "kv_cache": "paged", "prefix": "off", "kv_dtype": "auto", "decoding": "speculative"},
        **{"proposer": "ngram", "precision": "bf16", "attention": "auto", "execution": "eager", "target": "engine"},
        **{"batching": "continuous", "topology": "colocated"},
    }
    arm: dict[str, Any] = {group: option(group, name) for group, name in names.items()}
    arm["batching"]["max_num_seqs"] = max_num_seqs
    arm["kv_cache"]["budget"] = budget
    return resolve_study({"generate": {**arm, "model": dict(model), "workload": {}}})["generate"]


def generate(engine: Engine, requests: Iterator[tuple[Request, bool]], max_num_seqs: int) -> Iterator[Generated]:
    """Sequences in the order in which they end; the batch is kept full as long as there are requests."""
    capture = HiddenStateCapture()
    engine.proposer = capture
    running: dict[str, tuple[Request, bool, list[int]]] = {}
    while True:
        for request, held_out in requests:
            running[request.request_id] = (request, held_out, list(request.prompt_token_ids))
            engine.add_request(request)
            if len(running) >= max_num_seqs:
                break
        if not running:
            return
        for emission in engine.step(math.inf).emissions:
            request, held_out, tokens = running[emission.request_id]
            tokens += emission.token_ids
            if emission.finish_reason is None:
                continue
            del running[emission.request_id]
            if emission.finish_reason not in ("stop", "length"):
                raise RuntimeError(f"request {emission.request_id}: {emission.finish_reason}, {emission.error}")
            yield Generated(
                int(request.request_id),
                held_out,
                request.sampling.temperature,
                len(request.prompt_token_ids),
                torch.tensor(tokens, dtype=torch.int32),
                capture.take(request.request_id, len(tokens) - 1),
            )


def default_folder(model: str) -> Path:
    return make_cache() / "draft_heads" / model


def fill(
    folder: Path, source: ModelSource, engine: Engine, *, tokens: int, seed: int, minutes: float, shard: int
) -> int:
    """Write shards until ``tokens`` are generated in all, or the time is over; tokens that the folder then holds."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model": source.fingerprint, "seed": str(seed)}
    done, made = done_indices(folder, about)
    prompts, deadline = Prompts(source, seed), time.monotonic() + 60 * minutes
    wanted = (prompts.request(index) for index in count() if index not in done)
    kept: list[Generated] = []
    unsaved = 0
    with tqdm(total=tokens, initial=made, unit="tok", desc=str(folder)) as bar:
        for sequence in generate(engine, wanted, engine.scheduler.max_num_seqs):
            kept.append(sequence)
            new = len(sequence.tokens) - sequence.num_prompt_tokens
            unsaved += new
            bar.update(new)
            enough = made + unsaved >= tokens or time.monotonic() > deadline
            if len(kept) >= shard or enough:
                write_shard(folder, kept, about)
                made, unsaved, kept = made + unsaved, 0, []
            if enough:
                break
    return made


def main(arguments: Seq[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2_135m", help="an option of the group model")
    parser.add_argument("--model-path", help="a GGUF file or Hugging Face directory, used instead of the option's own")
    parser.add_argument("--folder", type=Path, help="of the shards; default: below the user's cache")
    parser.add_argument("--tokens", type=int, default=300_000, help="generated tokens in all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--budget", default="40000tokens", help="kv_cache.budget")
    parser.add_argument("--threads", type=int, help="of torch; default: its own")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    model = option("model", chosen.model) | ({"path": chosen.model_path} if chosen.model_path else {})
    source = open_model(model)
    engine = build_engine(arm_of(model, chosen.max_num_seqs, chosen.budget), source, RealClock())
    made = fill(
        chosen.folder or default_folder(chosen.model),
        source,
        engine,
        tokens=chosen.tokens,
        seed=chosen.seed,
        minutes=chosen.minutes,
        shard=SHARD_SEQUENCES,
    )
    print(f"{made} generated tokens")


if __name__ == "__main__":
    main()
