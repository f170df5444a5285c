"""Recorded traffic: every field, both formats, and one line for what cannot be replayed."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from workloads import WorkloadError, build_stream

TRACES = Path(__file__).parents[3] / "shared" / "traces"
AZURE = TRACES / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE = TRACES / "mooncake_conversation_trace.jsonl.gz"
needs_azure = pytest.mark.skipif(not AZURE.exists(), reason="needs ../shared/traces/AzureLLMInferenceTrace_conv.csv")
needs_mooncake = pytest.mark.skipif(
    not MOONCAKE.exists(), reason="needs ../shared/traces/mooncake_conversation_trace.jsonl.gz"
)


@pytest.fixture(scope="module")
def replay(words):
    def get(path, seed=0, tokenizer=words, max_model_len=10**6, **options):
        config = {"name": "trace", "path": str(path), **options}
        return build_stream(config, seed=seed, tokenizer=tokenizer, max_model_len=max_model_len, vocab_size=5000)

    return get


def jsonl(tmp_path, *rows, name="trace.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_every_field(tmp_path, replay, words):
    path = jsonl(
        tmp_path,
        {
            "timestamp": 1500,
            "prompt": "hello there world",
            "max_tokens": 5,
            "seed": 9,
            "temperature": 0.5,
            "ignore_eos": False,
        },
        {"timestamp": 1000, "prompt_token_ids": [9, 8, 7], "output_length": 6, "session_id": "s"},
        "",
        {"timestamp": 4000, "input_length": 33, "output_length": 7, "temperature": None},
    )
    stream = replay(path, time_scale=0.5, sampling={"ignore_eos": True})
    ids, text, length = stream.initial()
    assert [r.arrival_s for r in (ids, text, length)] == [0.0, 0.25, 1.5]
    assert (ids.prompt_token_ids, ids.sampling.max_tokens, ids.session_id) == ((9, 8, 7), 6, "s")
    assert text.prompt_token_ids == tuple(words.encode("hello there world"))
    assert (text.sampling.seed, text.sampling.temperature, text.sampling.ignore_eos) == (9, 0.5, False)
    assert len(length.prompt_token_ids) == 33 and length.sampling.temperature == 0.0 and length.sampling.ignore_eos
    assert stream.window_rule == "replay" and stream.num_requests == 3
    assert stream.on_finish(ids, 1.0, [1]) == []


def test_arrival_s_is_in_seconds_and_no_times_is_a_burst(tmp_path, replay):
    rows = [{"arrival_s": t, "input_length": 4, "max_tokens": 1} for t in (2.5, 3.0)]
    assert [r.arrival_s for r in replay(jsonl(tmp_path, *rows)).initial()] == [0.0, 0.5]
    timeless = replay(jsonl(tmp_path, {"input_length": 4, "max_tokens": 1}, {"input_length": 4, "max_tokens": 1}))
    assert timeless.window_rule == "burst" and [r.arrival_s for r in timeless.initial()] == [0.0, 0.0]


def test_hash_ids_are_blocks_of_512(tmp_path, replay):
    path = jsonl(
        tmp_path,
        {"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 2]},
        {"timestamp": 1, "input_length": 1030, "output_length": 1, "hash_ids": [0, 1, 7]},
        {"timestamp": 2, "input_length": 600, "output_length": 1, "hash_ids": [5, 1]},
        {"timestamp": 3, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]},
        {"timestamp": 4, "output_length": 1, "hash_ids": [5]},
    )
    stream = replay(path)
    a, b, c, d, e = (request.prompt_token_ids for request in stream.initial())
    assert [len(p) for p in (a, b, c, d, e)] == [1100, 1030, 600, 1024, 512]
    assert a[:1024] == b[:1024] == d and a[1024:1030] != b[1024:]
    assert c[512:] == a[512:600] and c[0] != a[0]  # the same block behind another prefix: same tokens, no hit
    assert [r.planned_cached_tokens for r in stream.initial()] == [0, 1024, 0, 1023, 511]
    assert a == replay(path).initial()[0].prompt_token_ids != replay(path, seed=1).initial()[0].prompt_token_ids
    warm = {r.prompt_token_ids[0] for r in stream.warmup_requests(5)}
    assert not warm & {a[0], c[0]}


def test_given_prompts_plan_their_common_prefix(tmp_path, replay):
    rows = [
        {"prompt_token_ids": ids, "max_tokens": 1} for ids in ([3, 4, 5, 6], [3, 4, 9], [3, 4, 9, 1, 1], [3, 4, 5, 6])
    ]
    assert [r.planned_cached_tokens for r in replay(jsonl(tmp_path, *rows)).initial()] == [0, 2, 3, 3]


def test_limit_skip_head_and_gzip(tmp_path, replay):
    text = "\n".join(json.dumps({"timestamp": 1000 * i, "input_length": 10 + i, "output_length": 1}) for i in range(10))
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(text.encode()))
    requests = replay(path, skip_head=3, limit=4).initial()
    assert [len(r.prompt_token_ids) for r in requests] == [13, 14, 15, 16]
    assert [r.arrival_s for r in requests] == [0.0, 1.0, 2.0, 3.0]


def test_clip_and_reject(tmp_path, replay):
    path = jsonl(tmp_path, {"input_length": 100, "max_tokens": 20}, {"prompt_token_ids": [3] * 90, "max_tokens": 20})
    clip = replay(path, max_model_len=64, overlength="clip")
    assert [len(r.prompt_token_ids) for r in clip.initial()] == [44, 44]
    assert (clip.provenance["num_clipped"], clip.provenance["num_overlength"]) == (2, 0)
    assert clip.provenance["clipped_to"] == 64 and replay(path, overlength="clip").provenance["clipped_to"] is None
    keep = replay(path, max_model_len=64)
    assert [len(r.prompt_token_ids) for r in keep.initial()] == [100, 90]
    assert (keep.provenance["num_clipped"], keep.provenance["num_overlength"]) == (0, 2)
    assert keep.provenance["clipped_to"] is None


def test_the_record_tells_a_file_by_what_is_in_it(tmp_path, replay):
    first = replay(jsonl(tmp_path, {"input_length": 5, "max_tokens": 1})).provenance
    again = replay(jsonl(tmp_path, {"input_length": 5, "max_tokens": 1}, name="copy.jsonl")).provenance
    other = replay(jsonl(tmp_path, {"input_length": 5, "max_tokens": 2})).provenance
    assert first["file"] == other["file"] and first["file_sha256"] == again["file_sha256"] != other["file_sha256"]


def test_rows_of_a_length_may_share_prefixes(tmp_path, replay):
    path = jsonl(tmp_path, *({"input_length": 50, "max_tokens": 1} for _ in range(3)))
    prompts = {"name": "shared_prefix", "share": 1.0, "num_groups": 1, "prefix_length": 20}
    requests = replay(path, prompts=prompts).initial()
    assert len({r.prompt_token_ids[:20] for r in requests}) == 1
    assert [r.planned_cached_tokens for r in requests] == [0, 20, 20]


@needs_azure
def test_azure_csv_head(replay):
    stream = replay(AZURE, limit=300, time_scale=2.0, max_model_len=2048, overlength="clip")
    requests = stream.initial()
    assert len(requests) == 300
    assert requests[1].arrival_s == pytest.approx(2 * 4.314579, abs=1e-6)  # 18:15:46.6805900 -> 18:15:50.9951690
    assert (len(requests[0].prompt_token_ids), requests[0].sampling.max_tokens) == (374, 44)
    assert all(len(r.prompt_token_ids) + r.sampling.max_tokens <= 2048 for r in requests)
    assert stream.provenance["num_clipped"] > 0 and stream.provenance["num_overlength"] == 0


@needs_azure
def test_azure_csv_whole_file_its_last_line_included(replay):
    plan = replay(AZURE).plan
    assert len(plan.prompt_tokens) == 19_366
    assert (plan.prompt_tokens[-1], plan.output_tokens[-1]) == (197, 183)
    assert plan.arrivals_s[-1] == pytest.approx(3501.722, abs=1e-3)


@needs_mooncake
def test_mooncake_dequantised_is_poisson_like(replay):
    def cv(stream):
        gaps = np.diff(stream.plan.arrivals_s)
        return gaps.std() / gaps.mean()

    raw = replay(MOONCAKE)
    assert cv(raw) == pytest.approx(3.03, abs=0.02)
    spread = replay(MOONCAKE, dequantise_s=3.0)
    assert cv(spread) == pytest.approx(1.01, abs=0.03)
    assert (np.diff(spread.plan.arrivals_s) >= 0).all()
    assert sorted(spread.plan.prompt_tokens.tolist()) == sorted(raw.plan.prompt_tokens.tolist())
    # Known ceiling of an unlimited cache: 37.4 % of the tokens.
    shared = sum(min(spread._prompts.shared(i), int(n)) for i, n in enumerate(spread.plan.prompt_tokens))
    assert shared / spread.plan.prompt_tokens.sum() == pytest.approx(0.374, abs=0.003)


GOOD = {"timestamp": 0, "input_length": 5, "output_length": 1}
BAD_ROWS = {
    "not json": ("{nope", "must be one JSON object"),
    "a list": ([1, 2], "must be one JSON object"),
    "unknown field": ({**GOOD, "input_lenght": 5}, r"input_lenght: not a field.*nearest: input_length"),
    "two prompts": ({**GOOD, "prompt": "x"}, "prompt and input_length: must be one of them"),
    "two times": ({**GOOD, "arrival_s": 1}, "timestamp and arrival_s"),
    "no prompt": ({"timestamp": 0, "output_length": 1}, "must have one of prompt"),
    "no output": ({"timestamp": 0, "input_length": 5}, "must have output_length or max_tokens"),
    "no time": ({"input_length": 5, "output_length": 1}, r"has no timestamp, but line 1 has one"),
    "zero length": ({**GOOD, "input_length": 0}, "input_length=0: must be a whole number from 1"),
    "hostile length": (
        {**GOOD, "input_length": 10**30},
        "input_length=1000000.*must be a whole number from 1 to 10000000",
    ),
    "hostile output": ({**GOOD, "output_length": 10**9}, "output_length=1000000000"),
    "float length": ({**GOOD, "input_length": 5.5}, "input_length=5.5"),
    "bool length": ({**GOOD, "input_length": True}, "input_length=True"),
    "infinite time": ('{"timestamp": 1e999, "input_length": 5, "output_length": 1}', "timestamp=inf: must be a number"),
    "text time": ({**GOOD, "timestamp": "noon"}, "timestamp=noon: must be a number"),
    "blocks": ({**GOOD, "hash_ids": [1, 2]}, "hash_ids has 2 blocks: must have 1"),
    "negative id": ({"prompt_token_ids": [-1], "max_tokens": 1, "timestamp": 0}, "prompt_token_ids="),
    "id past the vocabulary": ({"prompt_token_ids": [5000], "max_tokens": 1, "timestamp": 0}, "below vocab_size=5000"),
    "temperature": ({**GOOD, "temperature": -1}, "temperature=-1"),
    "seed": ({**GOOD, "seed": "x"}, "seed=x"),
    "ignore_eos": ({**GOOD, "ignore_eos": "yes"}, "ignore_eos=yes: must be of type bool"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_rows_are_named_by_line(tmp_path, replay, case):
    row, message = BAD_ROWS[case]
    with pytest.raises(WorkloadError, match=message) as caught:
        replay(jsonl(tmp_path, GOOD, "", row))
    assert "line 3" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("yesterday,1,2", "TIMESTAMP=yesterday"),
        ("2023-11-16 18:15:46.68,1", "must have the 3 columns"),
        ("2023-11-16 18:15:46.68,1,x", "GeneratedTokens=x"),
        ("2023-11-16 18:15:46.68,99999999999999999999999,1", "ContextTokens="),
        ("2023-11-16 18:15:46.6x,1,1", "TIMESTAMP="),
        ("2023-11-16 18:15:46.-5,1,1", "TIMESTAMP="),
        (".-5,1,1", "TIMESTAMP="),
        ("2023-11-16 18:15:46.,1,1", "TIMESTAMP="),
        ("2023-11-16 18:15:46.1_0,1,1", "TIMESTAMP="),
        ("2023-11-16 18:15:46.\u0663,1,1", "TIMESTAMP="),
        ("20231116,1,1", "TIMESTAMP="),
        ("2023-02-30 18:15:46.5,1,1", "TIMESTAMP="),
        ("2023-11-16 18:15:46.5,\u0663,1", "ContextTokens="),
        ("2023-11-16 18:15:46.5,-1,1", "ContextTokens=-1"),
        ("2023-11-16 18:15:46.5,1,0", "GeneratedTokens=0"),
    ],
)
def test_bad_azure_rows(tmp_path, replay, line, message):
    path = tmp_path / "a.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n" + line)
    with pytest.raises(WorkloadError, match=rf"line 3: {message}"):
        replay(path)


def test_bad_files(tmp_path, replay):
    cases = [
        (tmp_path / "none.jsonl", b"", False, "No such file"),
        (tmp_path / "empty.jsonl", b"\n\n", True, "has none"),
        (tmp_path / "bytes.jsonl", b"\xff\xfe\x00", True, "must be a readable JSONL"),
        (
            tmp_path / "cut.jsonl.gz",
            gzip.compress(b'{"input_length": 3, "max_tokens": 1}\n' * 99)[:40],
            True,
            "must be a readable JSONL",
        ),
    ]
    for path, content, write, message in cases:
        if write:
            path.write_bytes(content)
        with pytest.raises(WorkloadError, match=message) as caught:
            replay(path)
        assert "\n" not in str(caught.value)
    with pytest.raises(WorkloadError, match="prompt is text, must be prompt_token_ids"):
        replay(jsonl(tmp_path, {"prompt": "hi", "max_tokens": 1}), tokenizer=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"arrivals": {"name": "replay", "rate": 4.0}}, r"workload.arrivals.rate=4.0: must be left out.*time_scale"),
        ({"arrivals": {"name": "poisson", "rate": 4.0}}, r"workload/arrivals=poisson: must be left out"),
        ({"num_requests": 5}, r"workload.num_requests=5: not an option of workload=trace"),
        ({"limit": 0}, "workload.limit=0: must be at least 1"),
        ({"skip_head": 9}, "has none"),
        ({"time_scale": 0}, "workload.time_scale=0.0: must be from 1e-06"),
        ({"time_scale": 1e300}, r"workload.time_scale=1e\+300: must be from 1e-06 to 1e\+06"),
        ({"overlength": "clipp"}, r"workload.overlength=clipp: must be one of clip, reject \(nearest: clip\)"),
        ({"dequantise_s": -1}, "workload.dequantise_s=-1.0"),
        ({"path": None}, "workload.path=null: must be a JSONL or Azure CSV file"),
    ],
)
def test_bad_options(tmp_path, replay, options, message):
    path = options.pop("path", jsonl(tmp_path, GOOD)) if "path" in options else jsonl(tmp_path, GOOD)
    with pytest.raises(WorkloadError, match=message):
        build_stream(
            {"name": "trace", "path": path and str(path), **options},
            seed=0,
            tokenizer=None,
            max_model_len=99,
            vocab_size=99,
        )


def test_dequantise_spreads_ties_inside_the_tick_by_seed(tmp_path, replay):
    path = jsonl(tmp_path, *({"timestamp": 3000 * (i // 100), "input_length": 4, "max_tokens": 1} for i in range(300)))
    arrivals = replay(path, dequantise_s=3.0, time_scale=0.5).plan.arrivals_s
    assert len(set(arrivals.tolist())) == 300
    assert arrivals[:100].min() < 0.1 and arrivals[:100].max() > 1.4
    assert np.histogram(arrivals, bins=[0, 1.5, 3.0, 4.5])[0].tolist() == [100, 100, 100]
    assert arrivals.tolist() == replay(path, dequantise_s=3.0, time_scale=0.5).plan.arrivals_s.tolist()
    assert arrivals.tolist() != replay(path, dequantise_s=3.0, time_scale=0.5, seed=1).plan.arrivals_s.tolist()


def test_dequantise_needs_times(tmp_path, replay):
    with pytest.raises(WorkloadError, match=r"dequantise_s=1\.0: must be null"):
        replay(jsonl(tmp_path, {"input_length": 4, "max_tokens": 1}), dequantise_s=1.0)
