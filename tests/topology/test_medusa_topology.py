"""Medusa's heads beyond a hand-over: the decode worker drafts from what it has computed itself."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from topology_runs import config_of, requests_of, run, target_of

from impls.models.source import open_model

REQUESTS = requests_of(6)


def test_a_decode_worker_drafts_and_every_token_is_that_of_one_engine(tmp_path: Path) -> None:
    source = open_model(config_of()["model"])
    hidden, path = source.shape.hidden_size, tmp_path / "head.safetensors"
    recipe = {"kind": "medusa", "model": source.fingerprint, "model_name": "t"}
    tensors = {"weight": torch.zeros(3, hidden, hidden), "bias": torch.zeros(3, hidden)}
    tensors["token_ids"] = torch.arange(source.shape.vocab_size, dtype=torch.int32)
    save_file(tensors, path, {"recipe": json.dumps(recipe)})
    alone = run(target_of(config_of()), REQUESTS)
    drafting = ("decoding=speculative", "proposer=medusa", f"proposer.head={path}")
    target = target_of(config_of("topology=disaggregated", *drafting))
    try:
        found = run(target, REQUESTS)
    finally:
        target.close()
    assert found.tokens == alone.tokens
    drafts = {name: sum(s.draft_tokens for s in found.steps if s.worker == name) for name in ("prefill0", "decode0")}
    assert drafts["prefill0"] == 0 and drafts["decode0"] > 50
