"""FP32 greedy identity of every combination of options that can run on this CPU; tests/engine covers the pairs.

    python scripts/identity_full.py [--layers 6] [--seed 0] [--seconds 0]

There are tens of thousands, a second or two each. They come in an order drawn from the seed, so that a run that is cut
short (--seconds) has seen a bit of everything, and another seed each night sees all in time. Exit status 1 if any
combination gave another token, read a slot that nobody wrote, lost a block, or did not use what it names.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "engine")]

from identity import NUM_LAYERS, combination, product  # noqa: E402
from identity_runs import check, first_layers, one_model_for_all, oracle  # noqa: E402

from harness.arm import option  # noqa: E402
from impls.models.source import open_model  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=NUM_LAYERS, help="of the model, its first ones (it has 30)")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop after so long (0: never)")
    arguments = parser.parse_args()
    combinations = product()
    random.Random(arguments.seed).shuffle(combinations)
    compiled = combination(execution="compiled")  # first, as what is compiled here need not be in every worker process
    combinations.sort(key=lambda each: each != compiled)
    source = first_layers(open_model(option("model", "smollm2_135m")), arguments.layers)
    failed, done, begun = [], 0, time.monotonic()
    with one_model_for_all(source):
        expected = oracle(source)
        for each in combinations:
            if 0 < arguments.seconds < time.monotonic() - begun:
                break
            try:
                check(each, source, expected)
            except Exception as error:
                failed.append(each)
                print(f"FAILED {'-'.join(each)}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            done += 1
            if done % 10 == 0:
                passed = f"{done - len(failed)} of {done} passed"
                print(f"{passed}, {len(combinations)} in all, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{done - len(failed)} of {done} combinations passed, {len(combinations) - done} were not run")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
