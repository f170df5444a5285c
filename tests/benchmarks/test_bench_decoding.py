"""Sampler and n-gram proposer, at 32 sequences and the vocabulary of SmolLM2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_steps import model_shape

from impls.decoding.autoregressive import AutoregressiveDecoder
from impls.decoding.proposers.ngram import NgramProposer
from impls.request import Request, SamplingParams, Sequence

ROWS, VOCAB, CONTEXT = 32, 49152, 1024
KINDS = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(temperature=0.8),
    "top_k_top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_sampler(benchmark: Any, kind: str) -> None:
    sequences = [Sequence(Request(f"request-{i}", (1, 2, 3), KINDS[kind])) for i in range(ROWS)]
    logits = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    decoder = AutoregressiveDecoder(vocab_size=VOCAB)
    tokens = benchmark.pedantic(decoder.decode, (sequences, logits, {}), rounds=5, warmup_rounds=1)
    assert [len(own) for own in tokens] == [1] * ROWS
    assert tokens == decoder.decode(sequences, logits, {}), "a sample is a function of its request and position"
    ranks = [int((row > row[own[0]]).sum()) for row, own in zip(logits, tokens, strict=True)]
    if kind == "greedy":
        assert ranks == [0] * ROWS
    elif kind == "top_k_top_p":
        assert max(ranks) < 50
    else:
        assert max(ranks) >= 50
    benchmark.extra_info.update(tokens=ROWS)


class NoModel:
    def draft_forward(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("n-gram lookup runs no model")


def test_ngram_proposer(benchmark: Any) -> None:
    """A step costs what a token adds to the index, not the context that is indexed already."""
    period = 100  # every suffix occurred before: all drafts are found
    sequences = [Sequence(Request(f"request-{i}", tuple(t % period for t in range(CONTEXT)))) for i in range(ROWS)]
    wanted = {sequence.seq_id: 4 for sequence in sequences}
    proposer = NgramProposer(vocab_size=VOCAB, shape=model_shape(), num_draft_tokens=4)
    proposer.propose(sequences, wanted, NoModel())  # indexes the prompts

    def one_more_token() -> tuple[tuple[Any, ...], dict[str, Any]]:
        for sequence in sequences:
            sequence.token_ids.append(sequence.num_tokens % period)
        return (sequences, wanted, NoModel()), {}

    drafts = benchmark.pedantic(proposer.propose, setup=one_more_token, rounds=40)
    first = sequences[0].num_tokens
    assert all(drafts[s.seq_id].token_ids == [(first + i) % period for i in range(4)] for s in sequences)
    benchmark.extra_info.update(draft_tokens=sum(len(draft.token_ids) for draft in drafts.values()))
