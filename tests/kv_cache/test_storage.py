"""Where keys and values land: by slot, never anywhere else."""

from __future__ import annotations

import pytest
import torch

from impls.kv_cache.storage import KVStorage

CPU = torch.device("cpu")


def storage(num_blocks: int = 4, block_size: int = 2, dtype: torch.dtype = torch.float32) -> KVStorage:
    held = KVStorage(2, num_blocks, block_size, 3, 4, dtype, CPU)
    for layer in range(2):
        held.k(layer).fill_(float("nan"))
        held.v(layer).fill_(float("nan"))
    return held


def rows(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rows_land_in_their_slots_and_nowhere_else() -> None:
    held, k, v = storage(), rows(3, 1), rows(3, 2)
    held.write(1, k, v, torch.tensor([5, 0, 6]))
    for tensor, written in ((held.k(1), k), (held.v(1), v)):
        assert tensor.shape == (4, 2, 3, 4)
        assert torch.equal(tensor[2, 1], written[0])
        assert torch.equal(tensor[0, 0], written[1])
        assert torch.equal(tensor[3, 0], written[2])
        assert int(tensor.isnan().sum()) == (8 - 3) * 12
    assert held.k(0).isnan().all() and held.v(0).isnan().all()


@pytest.mark.parametrize("slots", [[-1], [-1, 2, -1, -1], [7, -1], [-1] * 8])
def test_bug_8_slot_minus_one_stores_nothing(slots: list[int]) -> None:
    """vllm#43810: -1 as an index overwrites the last slot."""
    held, k = storage(), rows(len(slots), 3)
    held.write(0, k, k, torch.tensor(slots))
    flat = held.k(0).flatten(0, 1)
    written = [slot for slot in slots if slot >= 0]
    assert int((~flat.isnan().flatten(1).any(1)).sum()) == len(written)
    for row, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(flat[slot], k[row])


def test_bug_9_offsets_beyond_32_bits() -> None:
    """vllm#47671, vllm#50427: block x stride overflows int32. More than 2**31 elements, of which a page is touched."""
    block_size, head_dim = 16, 128
    num_blocks = 2**31 // (block_size * head_dim) + 2
    try:
        held = KVStorage(1, num_blocks, block_size, 1, head_dim, torch.uint8, CPU)
    except RuntimeError as error:
        pytest.skip(f"4 GiB of address space are not to be had: {error}")
    assert held.k(0).numel() > 2**31
    k = torch.arange(1, 2 * head_dim + 1, dtype=torch.int64).remainder(251).to(torch.uint8).view(2, 1, head_dim)
    slots = torch.tensor([num_blocks * block_size - 1, 1], dtype=torch.int64)
    held.write(0, k, k + 1, slots)
    assert torch.equal(held.k(0)[-1, -1], k[0]) and torch.equal(held.v(0)[-1, -1], k[0] + 1)
    assert torch.equal(held.k(0)[0, 1], k[1])


def test_bug_9_a_32_bit_slot_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        storage().write(0, rows(1), rows(1), torch.tensor([1], dtype=torch.int32))


def test_rows_are_converted_to_the_kept_dtype() -> None:
    held, k = storage(dtype=torch.bfloat16), rows(2, 4)
    held.write(0, k, k, torch.tensor([0, 1]))
    assert torch.equal(held.k(0)[0], k.to(torch.bfloat16))


def test_a_slot_outside_the_cache_is_an_error() -> None:
    with pytest.raises(IndexError):
        storage().write(0, rows(1), rows(1), torch.tensor([9]))


def test_blocks_move_between_storages_whole() -> None:
    source, target = storage(), storage(num_blocks=6)
    k, v = rows(4, 5), rows(4, 6)
    for layer in range(2):
        source.write(layer, k + layer, v + layer, torch.tensor([2, 3, 6, 7]))  # blocks 1 and 3
    data = source.export([3, 1])
    assert data.shape == (2, 2, 2, 2, 3, 4)
    source.k(0).zero_()  # a copy: what was exported does not change
    target.import_([0, 5], data)
    for layer in range(2):
        assert torch.equal(target.k(layer)[5], k[:2] + layer) and torch.equal(target.k(layer)[0], k[2:] + layer)
        assert torch.equal(target.v(layer)[5], v[:2] + layer) and torch.equal(target.v(layer)[0], v[2:] + layer)
        assert target.k(layer)[1:5].isnan().all()


def test_what_does_not_fit_is_refused() -> None:
    held = storage()
    with pytest.raises(IndexError, match=r"not all within 0\.\.3"):
        held.export([-1])
    data = held.export([0, 1])
    with pytest.raises(ValueError, match="does not fit 1 blocks"):
        held.import_([2], data)
    with pytest.raises(ValueError, match="does not fit 2 blocks"):
        held.import_([2, 3], data.to(torch.bfloat16))


def test_bytes_are_those_of_the_budget_and_one_row_a_tensor() -> None:
    held = KVStorage(2, 4, 2, 3, 4, torch.bfloat16, CPU)
    assert held.num_bytes() == 2 * 2 * (4 * 2 + 1) * 3 * 4 * 2
