"""A step as large as the limits allow, which leaves no trace: for the warm-up."""

from __future__ import annotations

import torch

from impls.seams import StepBatch, StepLimits


def largest_step(limits: StepLimits, num_blocks: int, block_size: int, device: torch.device) -> StepBatch:
    """Whole prompts of ``max_model_len`` tokens, the last one shorter, at most ``max_num_seqs`` and what the cache's
    ``num_blocks`` hold; a row of logits each.

    Their keys and values go nowhere (slot -1); what is attended to is block 0 again and again, whatever lies there.
    """
    longest = min(limits.max_model_len, num_blocks * block_size)
    total = min(limits.max_num_batched_tokens, limits.max_num_seqs * longest, num_blocks * block_size)
    lens = [min(longest, total - start) for start in range(0, total, longest)]
    starts = torch.tensor([0, *lens]).cumsum(0)
    return StepBatch(
        input_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.cat([torch.arange(length, device=device) for length in lens]),
        slot_mapping=torch.full((total,), -1, dtype=torch.int64, device=device),
        query_start=starts.to(device, torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
        block_table=torch.zeros(len(lens), -(-lens[0] // block_size), dtype=torch.int32, device=device),
        logits_indices=(starts[1:] - 1).to(device),
        query_lens=lens,
        kv_lens=list(lens),
        block_size=block_size,
    )
