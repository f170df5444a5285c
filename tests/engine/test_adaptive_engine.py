"""Draft lengths that adapt, through the engine: no greedy token changes, whatever lengths it chooses."""

from __future__ import annotations

import pytest
import torch
from engine_testing import arm_config, build, request, run

from harness.arm import option
from harness.drive import VirtualClock
from impls.models.source import open_model
from impls.seams import DecodeCosts

ADAPTIVE = ("speculative", {"draft_length": "adaptive"})
CHEAP = DecodeCosts({1: 1.0, 100: 1.2}, {1: 0.01})  # every draft is worth a try
DEAR = DecodeCosts({1: 1.0, 100: 100.0}, {1: 0.1})  # none is, however good
BETWEEN = DecodeCosts({1: 1.0, 9: 1.0, 100: 12.0}, {1: 0.05})  # up to nine rows


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


@pytest.fixture(scope="module")
def requests():
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 500, (5 + i,), generator=generator).tolist() for i in range(6)]
    return [request(f"r{i}", prompt, 24) for i, prompt in enumerate(prompts)]


def served(tiny, requests, costs=None, **choices):
    """Output tokens by request, and how many were drafted for how many sequences in each step that decodes."""
    batching = ("continuous", {"max_num_seqs": 3})
    choices = {"model": "tiny", "batching": batching, "precision": "fp32", **choices}
    engine = build(arm_config(budget_tokens=512, source=tiny, max_model_len=64, **choices), tiny, VirtualClock())
    if costs is not None:
        engine.decoder.calibrate(costs)
    outputs, results = run(engine, requests)
    assert not engine.decoder._adaptive or not engine.decoder._adaptive._without, "nothing is kept of what has finished"
    return outputs, [r.stats.draft_tokens for r in results if r.stats is not None and not r.stats.prefill_tokens]


@pytest.fixture(scope="module")
def plain(tiny, requests):
    batching = ("continuous", {"max_num_seqs": 3})
    config = arm_config(
        budget_tokens=512, source=tiny, max_model_len=64, model="tiny", batching=batching, precision="fp32"
    )
    outputs, _ = run(build(config, tiny, VirtualClock()), requests)
    return outputs


@pytest.mark.parametrize("proposer", ["ngram", "layer_skip", "draft_model"])
@pytest.mark.parametrize("costs", [CHEAP, DEAR, BETWEEN], ids=["cheap", "dear", "between"])
def test_no_greedy_token_changes(tiny, requests, plain, proposer, costs):
    outputs, drafted = served(tiny, requests, costs, decoding=ADAPTIVE, proposer=proposer)
    assert outputs == plain
    if costs is DEAR:
        assert not any(drafted)
    elif proposer == "draft_model":  # the target itself in another precision: it drafts well
        assert max(drafted) == (12 if costs is CHEAP else 6)


def test_lengths_change_as_verdicts_come_in(tiny, requests, plain):
    """Half of the synthetic model drafts badly: it is tried, found wanting and probed."""
    costs = DecodeCosts(BETWEEN.step_s, {1: 0.4})  # more than four of ten have to stand
    outputs, drafted = served(tiny, requests, costs, decoding=ADAPTIVE, proposer="layer_skip")
    assert outputs == plain
    assert max(drafted[:3]) > 3 and 0 < sum(drafted[-20:]) / 20 < 1


def test_without_costs_it_is_the_fixed_length(tiny, requests):
    fixed = served(tiny, requests, decoding="speculative", proposer="draft_model")
    assert served(tiny, requests, decoding=ADAPTIVE, proposer="draft_model") == fixed
