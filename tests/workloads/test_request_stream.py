"""Who arrives when: open loop, closed loop, sessions, and what a prompt that is too long becomes."""

import heapq
from itertools import pairwise

import pytest

from workloads import build_stream


@pytest.fixture(scope="module")
def make(words, plain):
    def get(seed=0, max_model_len=10**6, **changes):
        return build_stream(plain(**changes), seed=seed, tokenizer=words, max_model_len=max_model_len)

    return get


def run(stream, service_s=0.7, reply=(5, 6, 7)):
    """Serves every request in ``service_s`` from its arrival; returns (request, finish)s and the most in flight."""
    pending = [(r.arrival_s + service_s, i, r) for i, r in enumerate(stream.initial())]
    heapq.heapify(pending)
    done, order = [], len(pending)
    while pending:
        finished, _, request = heapq.heappop(pending)
        done.append((request, finished))
        for follow in stream.on_finish(request, finished, reply):
            heapq.heappush(pending, (follow.arrival_s + service_s, order, follow))
            order += 1
    events = sorted([(r.arrival_s, 1) for r, _ in done] + [(f, -1) for _, f in done])
    in_flight = most = 0
    for _, change in events:
        in_flight += change
        most = max(most, in_flight)
    return done, most


def test_open_loop_is_all_known_at_the_start(make):
    stream = make()
    requests = stream.initial()
    arrivals = [request.arrival_s for request in requests]
    assert len(requests) == stream.num_requests == 40
    assert arrivals == sorted(arrivals) and stream.last_arrival_s == arrivals[-1]
    assert stream.on_finish(requests[0], 99.0, [1]) == []
    assert stream.window_rule == "timed"
    assert len({request.request_id for request in requests}) == 40
    assert len({request.sampling.seed for request in requests}) == 40


def test_window_rule_and_warmup(make):
    assert make(arrivals={"name": "burst"}).window_rule == "burst"
    assert make(arrivals={"name": "closed_loop", "concurrency": 2}).window_rule == "timed"
    assert make(warmup_s=3).warmup_s == 3.0


@pytest.mark.parametrize("concurrency", [1, 3, 40, 100])
def test_closed_loop_holds_its_concurrency(make, concurrency):
    stream = make(arrivals={"name": "closed_loop", "concurrency": concurrency})
    done, most = run(stream)
    assert len(done) == 40 and most == min(concurrency, 40)
    finishes = sorted(finish for _, finish in done)
    assert all(r.arrival_s == 0.0 or r.arrival_s in finishes for r, _ in done)
    assert stream.last_arrival_s == max(r.arrival_s for r, _ in done)
    assert stream.provenance["idc_1s"] is None


def test_initial_starts_afresh(make):
    stream = make(arrivals={"name": "closed_loop", "concurrency": 3})
    first, _ = run(stream)
    again, _ = run(stream)
    assert first == again


SESSIONS = {"name": "multi_turn", "min_turns": 2, "max_turns": 4, "think_s": 1.5}


def test_sessions_follow_the_previous_finish(make):
    stream = make(sessions=SESSIONS, num_requests=60)
    done, _ = run(stream)
    assert len(done) == 60
    by_session: dict[str, list] = {}
    for request, finish in done:
        by_session.setdefault(request.session_id, []).append((request, finish))
    assert all(2 <= len(turns) <= 4 for name, turns in by_session.items() if name != f"session-{len(by_session) - 1}")
    assert len({len(turns) for turns in by_session.values()}) > 1
    thinks = []
    for turns in by_session.values():
        for (before, finish), (after, _) in pairwise(turns):
            history = len(before.prompt_token_ids) + before.sampling.max_tokens  # scripted: of the length asked for
            assert after.prompt_token_ids[: len(before.prompt_token_ids)] == before.prompt_token_ids
            index = int(after.request_id.split("-")[1])
            assert len(after.prompt_token_ids) == history + stream.plan.prompt_tokens[index]
            assert after.planned_cached_tokens == len(before.prompt_token_ids)
            thinks.append(after.arrival_s - finish)
    assert min(thinks) > 0 and sum(thinks) / len(thinks) == pytest.approx(1.5, rel=0.5)


def test_scripted_history_does_not_depend_on_the_answer(make):
    prompts = [
        {r.request_id: r.prompt_token_ids for r, _ in run(make(sessions=SESSIONS), service_s=s, reply=reply)[0]}
        for s, reply in ((0.1, (1,)), (5.0, (8, 9)))
    ]
    assert prompts[0] == prompts[1]
    assert make(sessions=SESSIONS).provenance["identical_across_arms"] is True


def test_generated_history_quotes_the_answer_and_says_so(make):
    stream = make(sessions={**SESSIONS, "history": "generated"})
    first = stream.initial()[0]
    follow = stream.on_finish(first, 2.0, (11, 12, 13))[0]
    assert follow.prompt_token_ids[: len(first.prompt_token_ids) + 3] == (*first.prompt_token_ids, 11, 12, 13)
    assert follow.planned_cached_tokens == len(first.prompt_token_ids) + 2
    assert stream.provenance["identical_across_arms"] is False
    rejected = stream.initial()[1]
    assert stream.on_finish(rejected, 2.0, ())[0].planned_cached_tokens == len(rejected.prompt_token_ids)


def test_closed_loop_over_sessions_keeps_so_many_conversations(make):
    stream = make(
        sessions={**SESSIONS, "think_s": 0.0}, arrivals={"name": "closed_loop", "concurrency": 2}, num_requests=50
    )
    done, most = run(stream)
    assert len(done) == 50 and most == 2


def test_overlength_reject_leaves_the_request_to_the_engine(make):
    stream = make(max_model_len=30)
    assert [len(r.prompt_token_ids) for r in stream.initial()] == stream.plan.prompt_tokens.tolist()
    assert stream.provenance["num_overlength"] > 0 and stream.provenance["num_clipped"] == 0


def test_overlength_clip_shortens_the_prompt(make):
    stream = make(max_model_len=30, overlength="clip")
    whole = make(max_model_len=30).initial()
    clipped = 0
    for request, before in zip(stream.initial(), whole, strict=True):
        wanted = min(len(before.prompt_token_ids), 30 - request.sampling.max_tokens)
        assert len(request.prompt_token_ids) == wanted
        clipped += wanted < len(before.prompt_token_ids)
    assert stream.provenance["num_clipped"] == clipped > 0
    assert all(len(r.prompt_token_ids) + r.sampling.max_tokens <= 30 for r in stream.warmup_requests(40))


def test_clip_cannot_help_an_output_longer_than_the_model(make):
    stream = make(max_model_len=10, overlength="clip", output_length={"name": "constant", "value": 10})
    assert [len(r.prompt_token_ids) for r in stream.initial()] == stream.plan.prompt_tokens.tolist()
    assert stream.provenance["num_overlength"] == 40 and stream.provenance["num_clipped"] == 0


def test_clip_holds_in_later_turns(make):
    done, _ = run(make(sessions=SESSIONS, max_model_len=80, overlength="clip"))
    assert len(done) == 40
    assert max(len(r.prompt_token_ids) + r.sampling.max_tokens for r, _ in done) == 80


def test_a_clipped_turn_forgets_its_oldest_words_and_not_its_question(make):
    whole = {r.request_id: r.prompt_token_ids for r, _ in run(make(sessions=SESSIONS))[0]}
    stream = make(sessions=SESSIONS, max_model_len=80, overlength="clip")
    first_turns = {f"request-{index}" for index in stream.plan.sessions.first.tolist()}
    cut = 0
    for request, _ in run(stream)[0]:
        prompt, asked = request.prompt_token_ids, stream.plan.prompt_tokens[int(request.request_id.split("-")[1])]
        if request.request_id in first_turns or len(prompt) == len(whole[request.request_id]):
            continue
        cut += 1
        kept = min(int(asked), len(prompt))
        assert prompt[-kept:] == whole[request.request_id][-kept:] if kept == asked else len(prompt) <= asked
        assert request.planned_cached_tokens <= 1  # what is left begins elsewhere than any earlier prompt
    assert cut > 3


def test_warmup_requests_take_the_lengths_asked_for(make):
    stream = make()
    default = stream.warmup_requests(50)
    assert [len(r.prompt_token_ids) for r in default][:40] == stream.plan.prompt_tokens.tolist()
    exact = stream.warmup_requests(2, prompt_tokens=17, max_tokens=3)
    assert [(len(r.prompt_token_ids), r.sampling.max_tokens, r.arrival_s) for r in exact] == [(17, 3, 0.0)] * 2
    assert not {r.request_id for r in default} & {r.request_id for r in stream.initial()}


def test_sampling_reaches_every_request(make):
    stream = make(sampling={"temperature": 0.7, "top_k": 5, "top_p": 0.9, "ignore_eos": True, "n": 2})
    params = stream.initial()[0].sampling
    assert (params.temperature, params.top_k, params.top_p, params.ignore_eos, params.n) == (0.7, 5, 0.9, True, 2)


def test_a_million_requests_are_planned_in_seconds(make):
    stream = make(
        num_requests=1_000_000,
        arrivals={"name": "gamma", "rate": 100.0, "cv": 2.0},
        output_length={"name": "capped_exponential", "mean": 128.0, "cap": 512},
    )
    assert len(stream.plan.arrivals_s) == len(stream.plan.output_tokens) == 1_000_000
    assert len(stream.warmup_requests(1)) == 1  # and a prompt only costs when its request is made
