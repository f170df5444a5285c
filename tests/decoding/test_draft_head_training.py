"""What trains a draft head: text that the engine generates with its hidden states, and an unrolled draft that is the
one that drafting makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from harness.arm import option
from harness.drive import RealClock
from impls.build import build_engine
from impls.models.calibration import attention_within
from impls.models.draft_heads import find_head
from impls.models.eagle_head import EagleHead
from impls.models.source import open_model
from impls.models.tensors import EMBEDDING, FINAL_NORM, HEAD
from impls.precision.fp32 import Fp32
from scripts.draft_heads import head_file
from scripts.draft_heads import train as training
from scripts.draft_heads.batches import Batch, grouped
from scripts.draft_heads.generate import arm_of, fill
from scripts.draft_heads.objective import Teacher, acceptance
from scripts.draft_heads.shards import Generated, read_shard, shard_paths
from scripts.draft_heads.texts import stdlib_passages

MODEL = option("model", "tiny") | {"max_model_len": 512}
SOURCE = open_model(MODEL)
WEIGHTS = SOURCE.weights()


def generate(folder: Path, tokens: int) -> int:
    engine = build_engine(arm_of(MODEL, 8, "6000tokens"), SOURCE, RealClock())
    return fill(folder, SOURCE, engine, tokens=tokens, seed=0, minutes=1, shard=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    generate(folder, 1600)
    return folder


def sequences(folder: Path) -> list[Generated]:
    return [s for path in shard_paths(folder) for s in read_shard(path)]


def test_states_are_those_of_the_whole_sequence_and_an_interrupted_run_goes_on(folder: Path) -> None:
    first = sequences(folder)
    made = sum(len(s.tokens) - s.num_prompt_tokens for s in first)
    assert generate(folder, made + 200) >= made + 200
    both = sequences(folder)
    assert [s.index for s in both[: len(first)]] == [s.index for s in first] and len(both) > len(first)
    assert len({s.index for s in both}) == len(both)
    model = build_engine(arm_of(MODEL, 1, "600tokens"), SOURCE, RealClock()).executor.model
    for s in both[::5]:
        ids = s.tokens[:-1].tolist()
        with torch.inference_mode():
            hidden = model.forward(torch.tensor(ids), torch.arange(len(ids)), attention_within([ids]))
        torch.testing.assert_close(s.hidden.float(), hidden.float(), atol=0.05, rtol=0.05)
    with pytest.raises(ValueError, match="use another folder"):
        training_seed_changed = build_engine(arm_of(MODEL, 8, "6000tokens"), SOURCE, RealClock())
        fill(folder, SOURCE, training_seed_changed, tokens=9999, seed=1, minutes=1, shard=8)


def test_the_unrolled_draft_is_the_one_that_drafting_makes(folder: Path) -> None:
    """Step j at row s: the head over the target's states up to s - j - 1 and its own predictions after them."""
    module = training.new_module("eagle", SOURCE.shape, WEIGHTS[FINAL_NORM], 3, seed=0)
    two = sequences(folder)[:2]
    with torch.no_grad():
        batch = Batch(two, WEIGHTS[EMBEDDING])
        outputs = module(batch, 3)
    tensors = {name: each.detach() for name, each in module.tensors().items()}
    tensors |= {"token_ids": torch.arange(4), "lm_head.weight": WEIGHTS[HEAD][:4]}
    cpu = torch.device("cpu")
    head = EagleHead(tensors, SOURCE.shape, lambda ids: WEIGHTS[EMBEDDING][ids], Fp32(cpu), cpu)

    def last(tokens: Tensor, states: Tensor) -> Tensor:
        before = torch.cat((torch.zeros(1, states.shape[1]), states))
        return head.forward(tokens.long(), before, torch.arange(len(tokens)), attend)[-1]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = (each.repeat_interleave(groups, 1).transpose(0, 1) for each in (k, v))
        return torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)

    offset = int((batch.age == 0).nonzero()[1])
    sequence, start = two[1], two[1].num_prompt_tokens
    for age in (2, 5, 11):
        states = sequence.hidden[: start + age - 2].float()  # the target's, up to the position before the chain's first
        for step in range(3):
            row = start + age - 2 + step
            drafted = last(sequence.tokens[: row + 1], states[:row])
            torch.testing.assert_close(outputs[step][offset + age - 2 + step], drafted, atol=1e-4, rtol=1e-4)
            states = torch.cat((states, drafted[None]))


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_training_lowers_the_loss_and_keeps_a_file_that_loads(kind: str, folder: Path, tmp_path: Path) -> None:
    found = sequences(folder)
    counts = training.token_counts(found)
    token_ids = training.most_frequent(counts, 128)
    assert len(token_ids) == 128 and token_ids.tolist() == sorted(token_ids.tolist())
    assert 0 < training.coverage(counts, token_ids) < 1 == training.coverage(counts, torch.arange(4096))
    kept = set(token_ids.tolist())
    assert min(counts[token] for token in kept) >= max(counts[token] for token in counts if token not in kept)
    teacher = Teacher(WEIGHTS[HEAD], token_ids)
    module = training.new_module(kind, SOURCE.shape, WEIGHTS[FINAL_NORM], 2, seed=0)
    out = tmp_path / "head.safetensors"
    about = {"kind": kind, "model": SOURCE.fingerprint}
    curve = training.train(
        module, found, WEIGHTS[EMBEDDING], teacher, steps=30, unroll=2, rows=200, learning_rate=3e-3, seed=0,
        evaluate_every=10, out=out, about=about,
    )  # fmt: skip
    losses = [point["loss"] for point in curve]
    assert losses[-1] < losses[0] - 0.1
    tensors = find_head(kind, str(out), SOURCE.fingerprint).tensors()
    assert torch.equal(tensors["token_ids"], token_ids)
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["recipe"])["curve"]


def test_acceptance_counts_a_draft_only_behind_drafts_that_stood() -> None:
    hidden = torch.zeros(7, 4, dtype=torch.bfloat16)
    sequence = Generated(0, True, 0.0, 2, torch.tensor([9, 9, 0, 1, 0, 1, 0, 1], dtype=torch.int32), hidden)
    batch = next(iter([Batch(group, torch.zeros(10, 4)) for group in grouped([sequence], 10)]))
    teacher = Teacher(torch.eye(4)[:2].repeat(5, 1)[:10], torch.tensor([0, 1]))

    class Fixed:
        """Step 0 is right in rows 0, 1, 3; step 1 in all."""

        def __call__(self, batch: Batch, steps: int) -> list[Tensor]:
            right = torch.nn.functional.one_hot(batch.labels, 4).float()
            first = right.clone()
            first[[2, 4]] = first[[2, 4]][:, [1, 0, 2, 3]]
            return [first, right]

    rates, seconds = acceptance(Fixed(), [batch], teacher, 2)  # type: ignore[arg-type]
    assert rates == pytest.approx([3 / 5, 1.0])
    assert seconds == [1.0, 0.0]  # of the two that fell, which drafted the other of two tokens; none fell after them


def test_passages_are_natural_distinct_and_some_are_held_out() -> None:
    passages = stdlib_passages()
    held_out = sum(p.held_out for p in passages)
    assert len({p.text for p in passages}) == len(passages) > 1000
    assert 0.03 < held_out / len(passages) < 0.1
    assert {p.kind for p in passages} == {"prose", "code"}


def test_going_on_from_a_file_takes_its_draft_vocabulary_and_needs_its_size(tmp_path: Path) -> None:
    module = training.new_module("medusa", SOURCE.shape, WEIGHTS[FINAL_NORM], 2, seed=0)
    with torch.no_grad():
        module.tensors()["weight"].fill_(0.25)
    out, token_ids = tmp_path / "head.safetensors", torch.arange(7)
    head_file.save(out, module, token_ids, {"kind": "medusa"})
    again = training.new_module("medusa", SOURCE.shape, WEIGHTS[FINAL_NORM], 2, seed=1)
    head_file.restore(again, out)
    assert torch.equal(again.tensors()["weight"], module.tensors()["weight"])
    assert torch.equal(head_file.token_ids(out), token_ids)
    with pytest.raises(ValueError, match="another kind or --unroll"):
        head_file.restore(training.new_module("medusa", SOURCE.shape, WEIGHTS[FINAL_NORM], 3, seed=0), out)
    with pytest.raises(ValueError, match="another kind or --unroll"):
        head_file.restore(training.new_module("eagle", SOURCE.shape, WEIGHTS[FINAL_NORM], 3, seed=0), out)


def test_other_text_trains_the_tokens_that_the_head_has(folder: Path, tmp_path: Path) -> None:
    """By the command itself: the shards' own most frequent tokens are others than those of --start."""
    out, module = tmp_path / "start.safetensors", training.new_module("eagle", SOURCE.shape, WEIGHTS[FINAL_NORM], 3, 0)
    counts = training.token_counts(sequences(folder))
    rare = torch.tensor(sorted(token for token, _ in counts.most_common()[-64:]))
    head_file.save(out, module, rare, {"kind": "eagle"})
    on = tmp_path / "on.safetensors"
    brief = ["--steps", "2", "--evaluate-every", "1", "--rows", "100", "--vocabulary", "64"]
    training.main(["--model", "tiny", "--folder", str(folder), "--start", str(out), "--out", str(on), *brief])
    assert torch.equal(head_file.token_ids(on), rare)
    recipe = json.loads(head_file.read_about(on))
    assert recipe["start"] == {"kind": "eagle"} and recipe["coverage"] < training.coverage(
        counts, training.most_frequent(counts, 64)
    )
