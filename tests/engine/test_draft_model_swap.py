"""A draft model writes ahead of the target: what swapping does not keep of that, it must write again."""

from __future__ import annotations

import pytest
import torch
from engine_testing import arm_config, build, request, run

from harness.arm import option
from harness.drive import VirtualClock
from impls.decoding.proposers.draft_model import DraftModelProposer
from impls.models.source import open_model
from impls.request import Request, SamplingParams, Sequence

BLOCK_SIZE = 4
DRAFTING = ("c", "d")  # those that join last, who are the first to yield


@pytest.fixture(scope="module")
def tiny():
    return open_model(option("model", "tiny"))


@pytest.mark.parametrize("budget_tokens", [1024, 88], ids=["ample", "swapping"])
def test_a_draft_model_that_is_the_target_is_never_wrong(tiny, budget_tokens):
    """Those that draft have prompts of whole blocks, and steps of a block each (three drafts and a bonus). "d" has just
    been given the last block for its drafts when "a", which comes first, wants one: it has computed whole blocks, and
    the draft model has written to the one behind them."""
    config = arm_config(
        budget_tokens=budget_tokens,
        source=tiny,
        max_model_len=64,
        model="tiny",
        kv_cache=("paged", {"block_size": BLOCK_SIZE}),
        batching=("continuous", {"max_num_seqs": 4, "preemption": "swap"}),
        decoding="speculative",
        proposer=("draft_model", {"precision": "fp32", "num_draft_tokens": 3}),
    )
    engine = build(config, tiny, VirtualClock())
    engine.decoder.draft_lengths = lambda most: {seq_id: k if seq_id in DRAFTING else 0 for seq_id, k in most.items()}
    storage, swap_in, truncate = engine.draft_executor.storage, engine.swap.swap_in, engine.proposer.truncate
    generator = torch.Generator().manual_seed(4)
    behind_the_blocks: list[str] = []  # who was swapped out while the draft model had seen more than its blocks hold

    def spoiled(seq_id, blocks):
        """What a block holds before it is written is of no use to anybody."""
        mine = list(engine.kv.block_table(seq_id))
        for layer in range(storage.num_layers):
            v = storage.v(layer)
            v[mine] = 1e3 * torch.randn(v[mine].shape, generator=generator)
        return swap_in(seq_id, blocks)

    def watched(seq_id, num_tokens):
        if engine.proposer.num_seen(engine._sequences[seq_id]) > -(-num_tokens // BLOCK_SIZE) * BLOCK_SIZE:
            behind_the_blocks.append(seq_id)
        truncate(seq_id, num_tokens)

    engine.swap.swap_in, engine.proposer.truncate = spoiled, watched
    lengths = {"a": 17, "b": 4, "c": 20, "d": 8}
    prompts = {name: torch.randint(3, 500, (length,), generator=generator).tolist() for name, length in lengths.items()}
    outputs, results = run(engine, [request(name, prompt, 29) for name, prompt in prompts.items()])
    assert {len(tokens) for tokens in outputs.values()} == {29}
    drafted = [counts for r in results if r.stats for counts in r.stats.drafted.values()]
    assert sum(count for count, _ in drafted) > 20
    assert [(count, accepted) for count, accepted in drafted if accepted != count] == []
    assert (len(behind_the_blocks) > 0) == (budget_tokens == 88)


def test_what_lies_past_the_computed_positions_is_seen_no_more():
    proposer = DraftModelProposer(vocab_size=8, shape=None, num_draft_tokens=3)
    sequence = Sequence(Request("a", (1, 2, 3), SamplingParams()))

    class Always5:
        def draft_forward(self, tokens, starts, *, model, num_layers=None):
            return {seq_id: torch.eye(8)[5] for seq_id in tokens}

    proposer.propose([sequence], {"a": 3}, Always5())
    sequence.token_ids += [5, 5, 5, 1]
    assert proposer.num_seen(sequence) == 5  # the last draft is not fed
    proposer.truncate("a", 2)
    assert proposer.num_seen(sequence) == 2
    proposer.truncate("a", 6)  # what it never saw, it has not seen now
    assert proposer.num_seen(sequence) == 2
    proposer.truncate("b", 6)
    assert proposer.num_seen(Sequence(Request("b", (1, 2, 3), SamplingParams()))) == 0
