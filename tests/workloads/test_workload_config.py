"""conf/workload composes, laws can be switched, and a key that no law takes is refused by name."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from workloads import WorkloadError, build_stream
from workloads.arrivals import ARRIVALS
from workloads.lengths import LENGTHS
from workloads.prompts import PROMPTS
from workloads.sessions import SESSIONS

CONF = Path(__file__).parents[2] / "conf" / "workload"


def build(config, words):
    return build_stream(config, seed=0, tokenizer=words, max_model_len=8192)


def test_switching_a_law_leaves_nothing_of_the_old_one(composed, words):
    config = composed(
        "workload=chat",
        "workload/output_length=constant",
        "workload.output_length.value=32",
        "workload.arrivals.rate=7",
    )
    assert config["output_length"] == {"name": "constant", "value": 32}
    stream = build(config, words)
    assert set(stream.plan.output_tokens.tolist()) == {32}
    assert config["arrivals"]["rate"] == 7


@pytest.mark.parametrize(
    ("group", "laws"),
    [("arrivals", ARRIVALS), ("prompt_length", LENGTHS), ("output_length", LENGTHS), ("sessions", SESSIONS)],
)
def test_every_law_has_an_option_that_builds(composed, words, group, laws):
    for law in laws:
        option = OmegaConf.to_container(OmegaConf.load(CONF / group / f"{law}.yaml"))
        assert option["name"] == law
        stream = build({**composed("workload=ladder_burst"), group: option}, words)
        assert len(stream.initial()) > 0


@pytest.mark.parametrize("option", ["random", "prose", "chat", "summarize", "code", "shared_prefix"])
def test_every_prompt_option_builds(composed, words, option):
    stream = build(composed("workload=ladder_burst", f"workload/prompts={option}"), words)
    assert len(stream.initial()) == 48
    assert stream.provenance["prompts"]["name"] == option


def test_a_trace_composes_and_refuses_a_rate(composed, words):
    with pytest.raises(WorkloadError, match=r"workload\.path=null"):
        build(composed("workload=trace"), words)
    with pytest.raises(WorkloadError, match=r"workload.arrivals.rate=4: must be left out"):
        build(composed("workload=trace", "workload.path=x", "workload.arrivals.rate=4"), words)
    with pytest.raises(WorkloadError, match=r"workload/arrivals=gamma: must be left out"):
        build(composed("workload=trace", "workload.path=x", "workload/arrivals=gamma"), words)


BAD = [
    ({"arrivals": {"name": "poison", "rate": 1}}, r"workload.arrivals=poison: must be one of .*\(nearest: poisson\)"),
    (
        {"arrivals": {"name": "poisson", "rate": 1, "cv": 2}},
        r"workload.arrivals.cv=2: not an option of poisson, must be one of rate",
    ),
    (
        {"output_length": {"name": "constant", "values": 3}},
        r"output_length.values=3: not an option of constant.*nearest: value\)",
    ),
    ({"output_length": {"name": "constant"}}, r"workload.output_length.value is missing"),
    ({"arrivals": {"name": "poisson", "rate": 0}}, r"workload.arrivals.rate=0.0: must be from 1e-06 to 1e\+09 \(req"),
    ({"arrivals": {"name": "poisson", "rate": float("nan")}}, r"workload.arrivals.rate=nan: must be a finite number"),
    ({"arrivals": {"name": "poisson", "rate": "fast"}}, r"workload.arrivals.rate=fast: must be a finite number"),
    ({"arrivals": {"name": "piecewise", "rate": 1, "segments": [[1, 2, 3]]}}, "a list of lists of 2"),
    ({"arrivals": {"name": "piecewise", "rate": 1, "segments": [[1, 0]]}}, "somewhere above 0"),
    ({"arrivals": {"name": "piecewise", "rate": 1, "segments": [[1e-9, 1]]}}, "durations from 0.001 to 1e"),
    ({"arrivals": {"name": "piecewise", "rate": 1, "segments": [[1, 1], [1, 1e-99]]}}, "relative rates of 0 or from"),
    ({"arrivals": {"name": "onoff", "rate": 1, "on_s": 1e-30, "off_s": 1}}, "on_s=1e-30: must be from 0.001 to 1e"),
    ({"arrivals": {"name": "onoff", "rate": 1, "on_s": 1, "off_s": 1e30}}, r"off_s=1e\+30: must be from 0.001 to 1e"),
    ({"arrivals": {"name": "onoff", "rate": 1, "on_s": 1, "off_s": 1, "cv": 1e-200}}, "cv=1e-200: must be 0 or from"),
    ({"arrivals": {"name": "gamma", "rate": 1, "cv": 1e-200}}, "cv=1e-200: must be from 0.001 to 100"),
    ({"sessions": {"name": "multi_turn", "min_turns": 1, "max_turns": 2, "think_s": 1e300}}, "think_s=1e"),
    (
        {"arrivals": {"name": "onoff", "rate": 1, "on_s": 1, "off_s": 2, "off_min_s": 3}},
        "off_min_s=3.0: must be from 0 to off_s",
    ),
    ({"arrivals": None}, "workload.arrivals is missing"),
    ({"arrivals": "poisson"}, "workload.arrivals=poisson: must be a mapping"),
    ({"arrivals": {"name": "closed_loop", "concurrency": 0}}, "concurrency=0"),
    ({"prompt_length": {"name": "constant", "value": 1.5}}, "prompt_length.value=1.5: must be a whole number"),
    ({"prompt_length": {"name": "constant", "value": True}}, "prompt_length.value=True: must be a whole number"),
    ({"prompt_length": {"name": "constant", "value": 10**12}}, "must be from 1 to 10000000"),
    ({"prompt_length": {"name": "uniform", "low": 9, "high": 3}}, "high=3: must be at least low=9"),
    ({"prompt_length": {"name": "lognormal", "mu": [1, 2], "sigma": [1]}}, "sigma=.*as long as mu"),
    ({"prompt_length": {"name": "empirical", "probabilities": [0, 0.5], "values": [1, 2]}}, "from 0 to 1"),
    ({"prompt_length": {"name": "empirical", "probabilities": [0, 1], "values": [9, 2]}}, "non-decreasing"),
    ({"prompts": {"name": "natural", "style": "sumarize"}}, r"style=sumarize: must be one of .*nearest: summarize"),
    (
        {"prompts": {"name": "shared_prefix", "share": 2, "num_groups": 1, "prefix_length": 1}},
        "share=2.0: must be from 0 to 1",
    ),
    ({"sessions": {"name": "multi_turn", "min_turns": 3, "max_turns": 2}}, "max_turns=2: must be from min_turns=3"),
    (
        {"sessions": {"name": "multi_turn", "min_turns": 1, "max_turns": 2, "history": "x"}},
        "history=x: must be one of generated, scripted",
    ),
    ({"sampling": {"top_p": 0}}, "workload.sampling.top_p=0.0"),
    (
        {"sampling": {"temprature": 0}},
        r"workload.sampling.temprature=0: not an option of sampling.*nearest: temperature",
    ),
    ({"num_requests": 0}, "workload.num_requests=0: must be from 1"),
    ({"num_request": 3}, r"workload.num_request=3: not an option of workload=plain.*nearest: num_requests"),
    ({"overlength": "cut"}, "workload.overlength=cut"),
    ({"length_scale": 0}, "workload.length_scale=0.0"),
    ({"priority_shares": [0.5, 0.6]}, r"workload.priority_shares=\[0.5, 0.6\]: must be shares .* add up to 1"),
    ({"priority_shares": [1.5, -0.5]}, r"workload.priority_shares=\[1.5, -0.5\]"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_options_are_one_line(plain, words, changes, message):
    with pytest.raises(WorkloadError, match=message) as caught:
        build(plain(**changes), words)
    assert "\n" not in str(caught.value)


def test_prompt_laws_are_registered():
    assert set(PROMPTS) == {"random", "natural", "shared_prefix"}
