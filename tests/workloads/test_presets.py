"""Each preset's samples match what is published (Azure 2023, Mooncake FAST'25, vidur's arXiv lengths, the vLLM paper,
Anyscale, Orca), within `TOLERANCE`: what the published fits themselves leave, and sampling noise.
"""

from dataclasses import replace

import numpy as np
import pytest

from workloads import build_stream

PRESETS = [
    "chat",
    "code",
    "summarize",
    "azure_conv",
    "azure_code",
    "mooncake",
    "anyscale_exponential",
    "orca_uniform",
    "shared_prefix",
    "ladder_burst",
]
N = 20_000


def stream(composed, words, preset, n=N, **changes):
    config = {**composed(f"workload={preset}"), "num_requests": n, **changes}
    return build_stream(config, seed=3, tokenizer=words, max_model_len=131072)


# (preset, prompt or output): mean, p50, p90, p99 as published; None: not published
PUBLISHED = {
    ("chat", "prompt"): (161.31, None, None, None),
    ("chat", "output"): (337.99, None, None, None),
    ("code", "prompt"): (2048, 1469, 5188, 7436),
    ("code", "output"): (27.9, 13, 55, 252),
    ("azure_code", "prompt"): (2048, 1469, 5188, 7436),
    ("azure_code", "output"): (27.9, 13, 55, 252),
    ("azure_conv", "prompt"): (1155, 1020, 2734, 4142),
    ("azure_conv", "output"): (211, 129, 424, 601),
    ("mooncake", "prompt"): (12035, 6909, 27370, 85400),
    ("mooncake", "output"): (343, 350, 597, 1119),
    ("summarize", "prompt"): (2588, 2730, 3702, 3933),
    ("summarize", "output"): (291, 167, 372, 3271),
}
TOLERANCE = (0.06, 0.12, 0.12, 0.21)  # of mean, p50, p90, p99


@pytest.mark.parametrize("key", PUBLISHED, ids="-".join)
def test_lengths_match_the_published_percentiles(composed, words, key):
    plan = stream(composed, words, key[0]).plan
    drawn = plan.prompt_tokens if key[1] == "prompt" else plan.output_tokens
    got = (drawn.mean(), *np.quantile(drawn, [0.5, 0.9, 0.99]))
    for name, value, wanted, tolerance in zip(
        ("mean", "p50", "p90", "p99"), got, PUBLISHED[key], TOLERANCE, strict=True
    ):
        assert wanted is None or value == pytest.approx(wanted, rel=tolerance), name


def test_uniform_and_constant_presets_are_exact(composed, words):
    orca = stream(composed, words, "orca_uniform").plan
    assert (orca.prompt_tokens.min(), orca.prompt_tokens.max()) == (32, 512)
    assert (orca.output_tokens.min(), orca.output_tokens.max()) == (1, 128)
    anyscale = stream(composed, words, "anyscale_exponential").plan
    assert set(anyscale.prompt_tokens.tolist()) == {512} and anyscale.output_tokens.max() <= 1536
    assert anyscale.output_tokens.mean() == pytest.approx(128, rel=0.03)
    assert not anyscale.arrivals_s.any()
    ladder = stream(composed, words, "ladder_burst").plan
    assert (ladder.prompt_tokens.min(), ladder.prompt_tokens.max()) == (32, 96)
    assert ladder.output_tokens.max() == 192 and not ladder.arrivals_s.any()
    # An exponential of mean 48 that rejects above 192 has mean 48 - 192.5 / (e^(192.5/48) - 1).
    assert ladder.output_tokens.mean() == pytest.approx(48 - 192.5 / np.expm1(192.5 / 48), rel=0.03)


def test_azure_code_arrives_on_and_off(composed, words):
    built = stream(composed, words, "azure_code")
    gaps = np.diff(built.plan.arrivals_s)
    assert N / built.plan.arrivals_s[-1] == pytest.approx(2.57, rel=0.15)
    assert gaps.std() / gaps.mean() == pytest.approx(13.15, rel=0.15)
    for window, published in ((1, 13), (10, 72), (60, 164)):
        assert built.provenance[f"idc_{window}s"] == pytest.approx(published, rel=0.35)


def test_azure_conv_rate_drifts(composed, words):
    built = stream(composed, words, "azure_conv", n=19_366)
    gaps = np.diff(built.plan.arrivals_s)
    assert built.plan.arrivals_s[-1] == pytest.approx(3502, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.094, rel=0.05)
    for window, published in ((1, 1.4), (10, 3.9), (60, 16)):
        assert built.provenance[f"idc_{window}s"] == pytest.approx(published, rel=0.3)


def test_mooncake_shares_what_the_trace_shares(composed, words):
    built = stream(composed, words, "mooncake", n=12_031)
    gaps = np.diff(built.plan.arrivals_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.01, abs=0.04)
    assert 12_031 / built.plan.arrivals_s[-1] == pytest.approx(3.4, rel=0.03)
    shared = np.array([built._prompts.shared(i) for i in range(12_031)])
    assert shared.sum() / built.plan.prompt_tokens.sum() == pytest.approx(0.346, rel=0.12)
    assert np.mean(shared == 0) == pytest.approx(0.613, rel=0.08)


def test_shared_prefix_is_the_five_shot_prompt(composed, words):
    requests = stream(composed, words, "shared_prefix", n=20).initial()
    heads = {request.prompt_token_ids[:341] for request in requests}
    assert len(heads) == 1
    assert len({request.prompt_token_ids[341] for request in requests}) == 20
    assert [request.planned_cached_tokens for request in requests] == [0] + [341] * 19


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_says_where_it_comes_from_and_makes_its_requests(composed, words, preset):
    built = stream(composed, words, preset, n=3)
    assert built.provenance["workload"] == preset and built.provenance["source"]
    requests = built.initial()
    assert [len(r.prompt_token_ids) for r in requests] == built.plan.prompt_tokens.tolist()
    assert [r.sampling.max_tokens for r in requests] == built.plan.output_tokens.tolist()
    assert built.window_rule == ("burst" if preset in ("anyscale_exponential", "ladder_burst") else "timed")
    assert all(r.sampling.ignore_eos is (preset not in ("chat", "code", "summarize")) for r in requests)


def test_length_scale_scales_the_published_lengths(composed, words):
    whole = stream(composed, words, "azure_conv", n=1000).plan
    tenth = stream(composed, words, "azure_conv", n=1000, length_scale=0.1).plan
    np.testing.assert_allclose(tenth.prompt_tokens, whole.prompt_tokens / 10, atol=1.0)
    assert tenth.output_tokens.min() >= 1


def test_classes_of_priority_have_their_shares_and_move_no_other_draw(composed, words):
    plain = stream(composed, words, "ladder_burst", n=2000)
    classes = stream(composed, words, "ladder_burst", n=2000, priority_shares=[0.25, 0.0, 0.75])
    drawn = [request.priority for request in classes.initial()]
    assert set(drawn) == {0, 2} and 0.22 < drawn.count(0) / len(drawn) < 0.28
    assert classes.provenance["priority_shares"] == [0.25, 0.0, 0.75]
    assert [replace(request, priority=0) for request in classes.initial()] == plain.initial()
