"""Workers that verify drafts are told what steps cost them, each its own."""

from __future__ import annotations

import pytest
from topology_runs import config_of, target_of

from harness.warm_up import warm_up_workers
from impls.build import max_model_len
from impls.decoding.draft_length import AdaptiveDraftLength
from impls.engine import Engine
from impls.models.source import open_model
from workloads import build_stream

ADAPTIVE = ("decoding=speculative", "proposer=ngram", "proposer.num_draft_tokens=2", "decoding.draft_length=adaptive")


@pytest.mark.parametrize("topology", ["replicas", "disaggregated"])
def test_draft_lengths_that_adapt_know_what_every_workers_steps_cost(topology: str) -> None:
    config = config_of(f"topology={topology}", "batching.max_num_seqs=2", *ADAPTIVE)
    source = open_model(config["model"])
    length = max_model_len(config, source)
    stream = build_stream(
        config["workload"], seed=1, tokenizer=None, max_model_len=length, vocab_size=source.shape.vocab_size
    )
    target = target_of(config)
    try:
        assert not any(target.call(_knows_costs))
        costs = warm_up_workers(target, stream).decode_costs
        assert all(target.call(_knows_costs))
        assert not target.has_work and not any(target.call(_has_work))
    finally:
        target.close()
    assert costs is not None and {cost["rows"] for cost in costs} == {1, 2, 3, 4, 6}


def _knows_costs(engine: Engine) -> bool:
    lengths = getattr(engine.decoder, "_adaptive", None)
    assert isinstance(lengths, AdaptiveDraftLength)
    return lengths._step_s is not None and lengths._draft_s is not None


def _has_work(engine: Engine) -> bool:
    return engine.has_work
