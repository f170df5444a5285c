"""How much of the KV memory holds keys and values, by how it is reserved: the vLLM paper's Figure 2 from lengths alone.

    python -m scripts.kv_waste
    python -m scripts.kv_waste --prompts five_shot --outputs five_shot --capacity 4096 --requests 200

No model: the scheduler and the cache managers that serve one run requests of drawn lengths, one token a step, while
others wait. Every position of the cache is, in each step, one of: *used*; *reserved*, which its sequence will still
fill; *internal*, which it was given and will not; *other*: free, or what a power of two adds to a piece.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from impls.batching.continuous import ContinuousBatching
from impls.kv_cache.contiguous import ContiguousCache
from impls.kv_cache.paged import PagedCache
from impls.kv_cache.reserved import ExactCache, Pow2Cache
from impls.request import Request, SamplingParams, Sequence
from impls.seams import KVCacheManager
from workloads.lengths import LENGTHS
from workloads.options import build_law

CONF = Path(__file__).parents[1] / "conf" / "workload"
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MAX_NUM_SEQS = 256
PAPER = {"contiguous (Orca Max)": 20.4, "pow2 (Orca Pow2)": 26.8, "exact (Orca Oracle)": 38.2, "paged, 16 (vLLM)": 96.3}


@dataclass(frozen=True)
class Shares:
    """Of the cache's positions, over the steps in which a request waited; ``sequences``: mean number that ran."""

    used: float
    reserved: float
    internal: float
    other: float
    sequences: float
    preemptions: int


def draw(prompts: str, outputs: str, count: int, max_model_len: int, seed: int) -> list[tuple[int, int]]:
    """(prompt, output) lengths by two options of conf/workload; pairs longer than max_model_len are drawn again."""

    def sample(group: str, option: str, rng: np.random.Generator) -> list[int]:
        config = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
        lengths: list[int] = build_law(group, LENGTHS, config).sample(rng, 2 * count).tolist()
        return lengths

    rngs = np.random.default_rng(seed).spawn(2)
    drawn = zip(sample("prompt_length", prompts, rngs[0]), sample("output_length", outputs, rngs[1]), strict=True)
    pairs = [(prompt, output) for prompt, output in drawn if prompt + output <= max_model_len][:count]
    if len(pairs) < count:
        raise SystemExit(f"more than half of the pairs are longer than {max_model_len} tokens: raise --max-model-len")
    return pairs


def measure(
    kv: KVCacheManager, lengths: list[tuple[int, int]], asked: Callable[[int, int], int | None], max_model_len: int
) -> Shares:
    """All requests wait from the start. ``asked``: what a rule reserves for (prompt, output); None: what it holds."""
    scheduler = ContinuousBatching(
        kv=kv, max_model_len=max_model_len, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=max(2048, max_model_len)
    )
    live: dict[str, Sequence] = {}
    for i, (prompt, output) in enumerate(lengths):
        sequence = Sequence(Request(str(i), (0,) * prompt, SamplingParams(max_tokens=output)))
        live[sequence.seq_id] = sequence
        scheduler.add(sequence, 0.0)
    totals, steps, running, preemptions = np.zeros(4), 0, 0, 0
    while live:
        step = scheduler.schedule(0.0)
        preemptions += len(step.preempted)
        for seq_id in step.num_scheduled_tokens:
            sequence = live[seq_id]
            sequence.token_ids.append(0)
            sequence.num_computed_tokens = sequence.num_tokens - 1
            kv.commit(seq_id, sequence.num_computed_tokens)
        if scheduler.num_waiting:
            totals += _parts(kv, [live[seq_id] for seq_id in step.num_scheduled_tokens], asked)
            steps += 1
            running += len(step.num_scheduled_tokens)
        for seq_id in step.num_scheduled_tokens:
            sequence = live[seq_id]
            if sequence.num_tokens == sequence.max_total_tokens:
                sequence.finish_reason = "length"
                scheduler.finish(live.pop(seq_id))
    if not steps:
        raise SystemExit("no request ever waited: lower --capacity or raise --requests")
    used, reserved, internal, other = (totals / totals.sum()).tolist()
    return Shares(used, reserved, internal, other, running / steps, preemptions)


def _parts(kv: KVCacheManager, sequences: list[Sequence], asked: Callable[[int, int], int | None]) -> np.ndarray:
    used = reserved = internal = 0
    for sequence in sequences:
        held, written = kv.reserved_tokens(sequence.seq_id), sequence.num_computed_tokens
        given = asked(sequence.num_prompt_tokens, sequence.request.sampling.max_tokens) or held
        final = sequence.max_total_tokens - 1  # the last token is never an input
        used += written
        reserved += max(0, min(given, final) - written)
        internal += given - max(written, min(given, final))
    return np.array([used, reserved, internal, kv.capacity_tokens - used - reserved - internal])


def table(lengths: list[tuple[int, int]], capacity: int, max_model_len: int) -> list[tuple[str, Shares]]:
    common = {"budget_bytes": capacity, "bytes_per_token": 1, "max_model_len": max_model_len}
    exact, pow2 = ExactCache(**common, block_size=1), Pow2Cache(**common, block_size=1)

    def pow2_asks(prompt: int, output: int) -> int:
        return min(pow2.reserves(prompt, prompt + output), max_model_len)

    def run(kv: KVCacheManager, asked: Callable[[int, int], int | None] = lambda prompt, output: None) -> Shares:
        return measure(kv, lengths, asked, max_model_len)

    rows = [
        ("contiguous (Orca Max)", run(ContiguousCache(**common))),
        ("pow2 (Orca Pow2)", run(pow2, pow2_asks)),
        ("exact (Orca Oracle)", run(exact, lambda prompt, output: prompt + output)),
    ]
    for size in BLOCK_SIZES:
        name = f"paged, {size}" + (" (vLLM)" if size == 16 else "")
        rows.append((name, run(PagedCache(**common, block_size=size))))
    return rows


def markdown(rows: list[tuple[str, Shares]], paper: bool) -> str:
    lines = [
        "| kv_cache | used | paper | reserved | internal | other | sequences | preemptions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, shares in rows:
        theirs = f"{PAPER[name]:.1f} %" if paper and name in PAPER else "-"
        parts = [shares.used, None, shares.reserved, shares.internal, shares.other]
        cells = [theirs if part is None else f"{100 * part:.1f} %" for part in parts]
        lines.append(f"| {' | '.join([name, *cells, f'{shares.sequences:.1f}', str(shares.preemptions)])} |")
    return "\n".join(lines)


def main() -> None:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m scripts.kv_waste", description=summary)
    parser.add_argument("--prompts", default="sharegpt", help="an option of workload/prompt_length")
    parser.add_argument("--outputs", default="sharegpt", help="an option of workload/output_length")
    parser.add_argument("--capacity", type=int, default=15_700, help="positions (default: OPT-13B on an A100-40)")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    lengths = draw(given.prompts, given.outputs, given.requests, given.max_model_len, given.seed)
    means = np.mean(lengths, axis=0)
    print(
        f"{len(lengths)} requests, mean prompt {means[0]:.0f} and output {means[1]:.0f} tokens ({given.prompts}, "
        f"{given.outputs}), {given.capacity} positions, max_model_len {given.max_model_len}, seed {given.seed}\n"
    )
    try:
        rows = table(lengths, given.capacity, given.max_model_len)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    print(markdown(rows, paper=given.prompts == given.outputs == "sharegpt"))


if __name__ == "__main__":
    main()
