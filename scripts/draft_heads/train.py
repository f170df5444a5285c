"""Trains the draft heads on what `generate` wrote, and keeps the best on held-out passages in one small file.

    python -m scripts.draft_heads.train --kind eagle --out eagle.safetensors --steps 900
    python -m scripts.draft_heads.train --kind medusa --out medusa.safetensors --unroll 4 --steps 900

The head's rows are the target's own, frozen and not stored. The loss: `objective`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from harness.arm import option
from impls.models.source import open_model
from impls.models.tensors import EMBEDDING, FINAL_NORM, HEAD
from impls.seams import ModelShape
from scripts.draft_heads import head_file
from scripts.draft_heads.batches import Batch, epochs, grouped
from scripts.draft_heads.generate import default_folder
from scripts.draft_heads.modules import EagleHead, MedusaHeads
from scripts.draft_heads.objective import Teacher, acceptance, loss_of, tokens_per_step
from scripts.draft_heads.shards import Generated, read_shard, shard_paths

WARM_UP = 0.04  # share of the steps
RECORDED = ("steps", "minutes", "unroll", "unroll_from", "rows", "learning_rate", "seed")


def token_counts(sequences: Iterable[Generated]) -> Counter[int]:
    """How often each token was generated."""
    counts: Counter[int] = Counter()
    for sequence in sequences:
        counts.update(sequence.tokens[sequence.num_prompt_tokens :].tolist())
    return counts


def most_frequent(counts: Counter[int], size: int) -> Tensor:
    """The draft vocabulary: int64 [size or fewer], ascending ids."""
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


def coverage(counts: Counter[int], token_ids: Tensor) -> float:
    """Which share of the text can be drafted."""
    return sum(counts[token] for token in token_ids.tolist()) / max(1, counts.total())


def train(
    module: EagleHead | MedusaHeads,
    sequences: Sequence[Generated],
    embedding: Tensor,
    teacher: Teacher,
    *,
    steps: int,
    unroll: int,
    rows: int,
    learning_rate: float,
    seed: int,
    evaluate_every: int,
    unroll_from: float = 0.0,
    minutes: float | None = None,
    out: Path | None = None,
    about: dict[str, object] | None = None,
) -> list[dict[str, float | list[float]]]:
    """The curve: training loss and held-out acceptance by step. ``out`` holds the best so far.

    ``unroll_from``: the share of the training in which only the first draft learns, which comes cheaper. ``minutes``:
    end after so long where that comes before ``steps``; the learning rate falls accordingly.
    """
    learning = [s for s in sequences if not s.held_out]
    held_out = [Batch(group, embedding) for group in grouped([s for s in sequences if s.held_out], 2 * rows)]
    decayed = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}],
        lr=learning_rate,
        betas=(0.9, 0.95),
    )
    curve: list[dict[str, float | list[float]]] = []
    best, total, counted, start = -1.0, 0.0, 0, time.monotonic()
    for step, batch in zip(range(1, steps + 1), epochs(learning, embedding, rows, seed), strict=False):
        elapsed = 0.0 if minutes is None else (time.monotonic() - start) / (60 * minutes)
        progress = max(step / steps, elapsed)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(progress / WARM_UP, 0.51 + 0.49 * math.cos(math.pi * progress))
        drafts = unroll if progress >= unroll_from else 1
        loss = loss_of(module(batch, drafts), batch, teacher, isinstance(module, EagleHead))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        total, counted = total + loss.item(), counted + 1
        if step % evaluate_every == 0 or progress >= 1:
            rates, seconds = acceptance(module, held_out, teacher, max(unroll, 3))
            point: dict[str, float | list[float]] = {"step": step, "loss": round(total / counted, 4)}
            point["held_out_acceptance"] = [round(rate, 4) for rate in rates]
            point["second_choice_where_it_fell"] = [round(rate, 4) for rate in seconds]
            curve.append(point)
            print(f"{time.monotonic() - start:.0f} s", json.dumps(curve[-1]), flush=True)
            total, counted = 0.0, 0
            if out is not None and tokens_per_step(rates) > best:
                best = tokens_per_step(rates)
                head_file.save(out, module, teacher.token_ids, {**(about or {}), "curve": curve})
        if progress >= 1:
            break
    return curve


def new_module(kind: str, shape: ModelShape, norm: Tensor, heads: int, seed: int) -> EagleHead | MedusaHeads:
    torch.manual_seed(seed)
    return EagleHead(shape, norm) if kind == "eagle" else MedusaHeads(shape.hidden_size, heads)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("eagle", "medusa"), default="eagle")
    parser.add_argument("--model", default="smollm2_135m", help="an option of the group model")
    parser.add_argument("--model-path", help="a GGUF file or Hugging Face directory, used instead of the option's own")
    parser.add_argument("--folder", type=Path, help="of the shards; default: below the user's cache")
    parser.add_argument("--out", type=Path, required=True, help="the file of weights")
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--minutes", type=float, help="end after so long, if that comes first")
    parser.add_argument("--unroll", type=int, default=3, help="drafts of a chain, or Medusa's heads")
    parser.add_argument("--unroll-from", type=float, default=0.0, help="share of it with the first draft only")
    parser.add_argument("--start", type=Path, help="a file of weights to go on from, with its draft vocabulary")
    parser.add_argument("--rows", type=int, default=700, help="drafting positions of a batch")
    parser.add_argument("--learning-rate", type=float, default=1.2e-3)
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens that can be drafted (not with --start)")
    parser.add_argument("--evaluate-every", type=int, default=75)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of torch; default: its own")
    chosen = parser.parse_args(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    source = open_model(option("model", chosen.model) | ({"path": chosen.model_path} if chosen.model_path else {}))
    sequences = [s for path in shard_paths(chosen.folder or default_folder(chosen.model)) for s in read_shard(path)]
    if not sequences:
        parser.error("no shards in the folder: run scripts.draft_heads.generate first")
    weights = source.weights()
    embedding = weights[EMBEDDING].bfloat16()
    counts = token_counts(s for s in sequences if not s.held_out)
    token_ids = head_file.token_ids(chosen.start) if chosen.start else most_frequent(counts, chosen.vocabulary)
    head = weights[EMBEDDING if source.shape.tie_embeddings else HEAD]
    teacher = Teacher(head, token_ids)
    module = new_module(chosen.kind, source.shape, weights[FINAL_NORM], chosen.unroll, chosen.seed)
    if chosen.start:
        try:
            head_file.restore(module, chosen.start)
        except ValueError as error:
            parser.error(str(error))
    generated = sum(len(s.tokens) - s.num_prompt_tokens for s in sequences)
    about = {
        "kind": chosen.kind,
        "model": source.fingerprint,
        "model_name": source.name,
        "sequences": len(sequences),
        "held_out_sequences": sum(s.held_out for s in sequences),
        "generated_tokens": generated,
        "draft_vocabulary": len(token_ids),
        "coverage": round(coverage(counts, token_ids), 4),
        "parameters": sum(p.numel() for p in module.parameters()),
        **{name: getattr(chosen, name) for name in RECORDED},
        "start": json.loads(head_file.read_about(chosen.start)) if chosen.start else None,
    }
    print(json.dumps(about), flush=True)
    train(
        module,
        sequences,
        embedding,
        teacher,
        steps=chosen.steps,
        unroll=chosen.unroll,
        rows=chosen.rows,
        learning_rate=chosen.learning_rate,
        seed=chosen.seed,
        evaluate_every=chosen.evaluate_every,
        unroll_from=chosen.unroll_from,
        minutes=chosen.minutes,
        out=chosen.out,
        about=about,
    )


if __name__ == "__main__":
    main()
