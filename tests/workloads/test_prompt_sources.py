"""Prompts have exactly the length asked for, differ from their first token on, and share only what is asked for."""

import os
import subprocess
import sys

import pytest

import workloads.corpus
from workloads import WorkloadError, build_stream

STYLES = ["random", "prose", "chat", "summarize", "code"]


def natural(style, chat_template=False):
    if style == "random":
        return {"name": "random"}
    return {"name": style, "law": "natural", "style": style, "chat_template": chat_template}


@pytest.fixture(scope="module")
def make(words, plain):
    def get(seed=0, tokenizer=words, max_model_len=10**6, **changes):
        return build_stream(plain(**changes), seed=seed, tokenizer=tokenizer, max_model_len=max_model_len)

    return get


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("chat_template", [False, True])
def test_exact_length_at_every_length(make, words, style, chat_template):
    stream = make(num_requests=1, prompts=natural(style, chat_template))
    for index, length in enumerate([*range(1, 80), 127, 500, 1999, 2000]):
        prompt = stream._prompts.opening(index, length)
        assert len(prompt) == length
        assert all(type(token) is int and 0 <= token < words.vocab_size for token in prompt)
        assert len(stream._prompts.follow_up(index, length)) == length
        assert len(stream._prompts.reply(index, length)) == length
        if not chat_template:
            assert not set(prompt) & words.special_token_ids


@pytest.mark.parametrize("style", STYLES)
def test_prompts_differ_from_their_first_token_on(make, style):
    stream = make(num_requests=300, prompts=natural(style))
    prompts = [request.prompt_token_ids for request in stream.initial()]
    assert len({prompt[0] for prompt in prompts}) == 300
    warm = [request.prompt_token_ids for request in stream.warmup_requests(100)]
    assert len({prompt[0] for prompt in warm}) == 100
    assert not {prompt[0] for prompt in warm} & {prompt[0] for prompt in prompts}
    assert all(request.planned_cached_tokens == 0 for request in stream.initial())


def test_more_prompts_than_first_tokens_are_still_distinct(make):
    stream = make(num_requests=4000, prompts=natural("prose"), prompt_length={"name": "constant", "value": 12})
    pool = stream.provenance["text"]["distinct_first_tokens"]
    prompts = [request.prompt_token_ids for request in stream.initial()]
    assert pool < 4000
    assert prompts[0][0] == prompts[pool][0] and prompts[0][1:] != prompts[pool][1:]
    assert len(set(prompts)) == 4000
    passages = len(workloads.corpus.prose_passages())  # where the second round begins
    assert prompts[0][1:] != prompts[passages][1:]


def test_natural_text_is_framed_by_its_task(make, words):
    stream = make(num_requests=1, prompts=natural("summarize"))
    prompt = stream._prompts.opening(0, 200)
    head, tail = words.encode("Summarise the following text.")[1:], words.encode("Summary of the text above:")[1:]
    assert list(prompt[1 : 1 + len(head)]) == head
    assert list(prompt[-len(tail) :]) == tail


def test_chat_template_wraps_the_whole_turn(make, words):
    prompts = natural("chat", chat_template=True)
    stream = make(num_requests=1, prompts=prompts)
    opening = stream._prompts.opening(0, 200)
    rendered = words.apply_chat_template([{"role": "user", "content": "text"}])
    assert list(opening[1:3]) == rendered[:2]  # after its own first token: <open> user
    assert list(opening[-3:]) == rendered[-3:]  # <close> <open> assistant
    follow_up = stream._prompts.follow_up(0, 200)
    assert list(follow_up[:3]) == [1, 0, *words.encode("user")[1:]]  # closes the assistant's turn first
    assert list(follow_up[-3:]) == rendered[-3:]


def test_same_seed_same_requests_other_seed_others(make):
    for prompts in (
        natural("random"),
        natural("code"),
        {"name": "shared_prefix", "share": 0.5, "num_groups": 2, "prefix_length": 9},
    ):
        one, again, other = (make(seed=s, prompts=prompts).initial() for s in (1, 1, 2))
        assert one == again
        assert all(a.prompt_token_ids != b.prompt_token_ids for a, b in zip(one, other, strict=True))
        assert one != make(seed=1, num_requests=41, prompts=prompts).initial()
        assert one == make(seed=1, num_requests=90, prompts=prompts).initial()[:40]  # the first n of a longer stream


def test_changing_one_law_leaves_the_others_alone(make):
    one, other = make().initial(), make(output_length={"name": "constant", "value": 3}).initial()
    assert [r.prompt_token_ids for r in one] == [r.prompt_token_ids for r in other]
    assert [r.arrival_s for r in one] == [r.arrival_s for r in other]


def test_independent_of_the_hash_seed():
    code = """
import hashlib
from workloads import build_stream
config = {
    "name": "x", "num_requests": 9, "arrivals": {"name": "gamma", "rate": 1, "cv": 2},
    "prompt_length": {"name": "uniform", "low": 1, "high": 50}, "output_length": {"name": "constant", "value": 4},
    "prompts": {"name": "shared_prefix", "share": 0.5, "num_groups": 2, "prefix_length": 9},
}
requests = build_stream(config, seed=5, tokenizer=None, max_model_len=99, vocab_size=999).initial()
print(hashlib.sha256(repr(requests).encode()).hexdigest())
"""
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": s},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for s in ("1", "2")
    }
    assert len(digests) == 1


def test_shared_prefixes_share_by_group_and_plan_says_how_much(make):
    prompts = {"name": "shared_prefix", "share": 0.6, "num_groups": 3, "prefix_length": 30}
    stream = make(num_requests=400, prompts=prompts)
    requests = stream.initial()
    seen: list[tuple[int, ...]] = []
    for request in requests:
        prompt = request.prompt_token_ids
        common = max((sum(1 for _ in _common(prompt, earlier)) for earlier in seen), default=0)
        assert request.planned_cached_tokens == min(common, len(prompt) - 1)
        seen.append(prompt)
    sharing = sum(request.planned_cached_tokens > 0 for request in requests)
    assert 0.5 < sharing / 400 < 0.68
    assert max(request.planned_cached_tokens for request in requests) == 30
    assert len({p[:5] for p, r in zip(seen, requests, strict=True) if r.planned_cached_tokens > 5}) == 3


def _common(a, b):
    for x, y in zip(a, b, strict=False):
        if x != y:
            return
        yield x


def test_zero_share_shares_nothing(make):
    prompts = {"name": "shared_prefix", "share": 0.0, "num_groups": 1, "prefix_length": 30}
    requests = make(num_requests=200, prompts=prompts).initial()
    assert len({r.prompt_token_ids[0] for r in requests}) == 200
    assert not any(r.planned_cached_tokens for r in requests)


def test_without_a_tokenizer_only_random_tokens(plain):
    with pytest.raises(WorkloadError, match=r"style=chat: natural text needs a tokenizer.*prompts=random"):
        build_stream(plain(prompts=natural("chat")), seed=0, tokenizer=None, max_model_len=99, vocab_size=500)
    with pytest.raises(WorkloadError, match="vocab_size=None"):
        build_stream(plain(), seed=0, tokenizer=None, max_model_len=99)
    requests = build_stream(plain(), seed=0, tokenizer=None, max_model_len=99, vocab_size=50).initial()
    assert {t for r in requests for t in r.prompt_token_ids} <= set(range(50))


def test_prose_without_pydoc_data_comes_from_docstrings(make, monkeypatch):
    whole = workloads.corpus.prose_passages()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # import fails
    docstrings = workloads.corpus.prose_passages()
    assert sum(map(len, docstrings)) > 100_000 and docstrings[0] != whole[0]
    assert len(make(num_requests=1, prompts=natural("prose"))._prompts.opening(0, 300)) == 300


def test_a_python_without_sources_is_one_line(make, monkeypatch, tmp_path):
    monkeypatch.setattr(workloads.corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(WorkloadError, match="carries no code"):
        make(prompts=natural("code"))


def test_broken_chat_template_is_one_line(make, words):
    class Refuses(type(words)):
        def apply_chat_template(self, messages):
            raise RuntimeError("no template")

    with pytest.raises(WorkloadError, match="chat_template=True: must be false for this model: no template"):
        make(tokenizer=Refuses(), prompts=natural("chat", chat_template=True))


def test_real_tokenizer(real_model, plain):
    for style in ("prose", "chat", "code"):
        config = plain(
            num_requests=8,
            prompts=natural(style, style == "chat"),
            prompt_length={"name": "uniform", "low": 60, "high": 300},
        )
        stream = build_stream(config, seed=0, tokenizer=real_model.tokenizer, max_model_len=8192)
        requests = stream.initial()
        assert [len(r.prompt_token_ids) for r in requests] == stream.plan.prompt_tokens.tolist()
        assert len({r.prompt_token_ids[0] for r in requests}) == 8
        text = real_model.tokenizer.decode(list(requests[0].prompt_token_ids[1:]))
        if style == "chat":
            assert text.startswith("<|im_start|>system") and text.endswith("<|im_end|>\n<|im_start|>assistant\n")
            follow_up = real_model.tokenizer.decode(list(stream._prompts.follow_up(0, 100)))
            assert follow_up.startswith("<|im_end|>\n<|im_start|>user\nI am reading")
