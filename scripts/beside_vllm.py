"""Decode and prefill beside vLLM on a CPU: the same requests, the same cores, runs alternated ours - vLLM - ours.

    python -m scripts.beside_vllm --vllm <python with vLLM> --model <HF folder> --cores 0-1 --out beside_vllm.json

Every batch is a burst of prompts of random tokens (128 each, or U(32, 224) with --ragged) and 64 output tokens, greedy,
BF16. Ours is an ordinary trial of this harness (continuous, paged): a step's time is its row of steps.parquet. vLLM's
is the difference between generating 65 tokens and 1, divided by 64 (`scripts/vllm_offline.py`): both without prefill.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from harness.provenance import provenance
from scripts.vllm_offline import OUTPUT_TOKENS

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 49152


def requests(batch: int, ragged: bool, seed: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng([seed, batch])
    lengths = rng.integers(32, 225, batch) if ragged else np.full(batch, 128)
    return [
        {
            "arrival_s": 0.0,
            "prompt_token_ids": rng.integers(3, VOCAB, int(length)).tolist(),
            "max_tokens": OUTPUT_TOKENS + 1,
            "ignore_eos": True,
        }
        for length in lengths
    ]


def cores(text: str) -> set[int]:
    first, _, last = text.partition("-")
    return set(range(int(first), int(last or first) + 1))


def ours(model: Path, path: Path, batch: int, folder: Path) -> dict[str, float]:
    """Prefill in tok/s, a decode step in s, and the share of it that is not the forward pass."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    budget = sum(len(row["prompt_token_ids"]) + row["max_tokens"] + 16 for row in rows)
    command = [sys.executable, "-m", "harness", "study=none", f"run_dir={folder}", f"model.path={model}"]
    command += [
        "model.max_model_len=2048",
        f"kv_cache.budget={budget}tokens",
        "workload=trace",
        f"workload.path={path}",
    ]
    command += ["batching=continuous", "batching.max_num_batched_tokens=8192", f"batching.max_num_seqs={batch}"]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    steps = pd.read_parquet(next(folder.glob("*/*/steps.parquet")))
    prefill = steps[steps.prefill_tokens > 0]
    decode = steps[(steps.prefill_tokens == 0) & (steps.decode_tokens == batch)]
    seconds = decode.end_s - decode.start_s
    return {
        "prefill_tokens_per_s": float(prefill.prefill_tokens.sum() / (prefill.end_s - prefill.start_s).sum()),
        "decode_step_s": float(seconds.mean()),
        "overhead": float((seconds - decode.forward_s).sum() / seconds.sum()),
    }


def vllm(python: Path, model: Path, path: Path, on: set[int]) -> dict[str, float]:
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(on))),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [str(python), str(ROOT / "scripts" / "vllm_offline.py"), str(model), str(path)]
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm", type=Path, required=True, help="the Python interpreter of an environment with vLLM")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face folder, read by both")
    parser.add_argument("--cores", type=cores, default=cores("0-1"), help="such as 0 or 0-1")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ragged", action="store_true", help="prompts of U(32, 224) tokens in place of 128")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, options.cores)  # inherited by both
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for batch in options.batches:
            path = Path(scratch, f"{batch}.jsonl")
            path.write_text("".join(json.dumps(row) + "\n" for row in requests(batch, options.ragged, options.seed)))
            for turn in ("ours", "vllm", "ours"):
                if turn == "ours":
                    result = ours(options.model, path, batch, Path(scratch, f"{batch}-{len(rows)}"))
                else:
                    result = vllm(options.vllm, options.model, path, options.cores)
                rows.append({"system": turn, "batch": batch, **result})
                print(rows[-1], flush=True)
    conditions = {
        "cores": len(options.cores),
        "prompt_tokens": "U(32, 224)" if options.ragged else 128,
        "output_tokens": OUTPUT_TOKENS,
        "vllm": vllm_version(options.vllm),
    }
    record = {"conditions": conditions, "provenance": provenance("cpu", {}), "runs": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


def vllm_version(python: Path) -> str:
    code = "import importlib.metadata; print(importlib.metadata.version('vllm'))"
    return subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
