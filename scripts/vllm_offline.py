"""The vLLM side of `scripts.beside_vllm`, run by the interpreter that has vLLM: one line of JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

OUTPUT_TOKENS = 64


def main(model: str, path: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model, dtype="bfloat16", max_model_len=2048, enable_prefix_caching=False)
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    prompts = [{"prompt_token_ids": row["prompt_token_ids"]} for row in rows]

    def seconds(tokens: int, of: list[dict[str, list[int]]]) -> float:
        start = time.perf_counter()
        llm.generate(of, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - start

    seconds(4, [{"prompt_token_ids": list(range(3, 67))}] * min(2, len(prompts)))  # warm-up, with another prompt
    first, all_of_them = seconds(1, prompts), seconds(1 + OUTPUT_TOKENS, prompts)
    tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    step_s = (all_of_them - first) / OUTPUT_TOKENS
    print(json.dumps({"prefill_tokens_per_s": tokens / first, "decode_step_s": step_s}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a Hugging Face folder")
    parser.add_argument("requests", help="a file of prompt_token_ids, one request a line")
    given = parser.parse_args()
    main(given.model, given.requests)
