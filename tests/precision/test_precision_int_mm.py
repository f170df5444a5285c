from __future__ import annotations

import pytest
import torch

from impls.precision.int_mm import CUDA_MIN_ROWS, padded_int_mm


def operands(rows: int, n: int = 24, k: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(rows)
    return tuple(torch.randint(-127, 128, (size, k), generator=draw, dtype=torch.int8) for size in (rows, n))


@pytest.mark.parametrize("rows", [1, 2, CUDA_MIN_ROWS - 1, CUDA_MIN_ROWS, CUDA_MIN_ROWS + 9])
def test_any_number_of_rows_is_multiplied(rows, monkeypatch):
    multiply = torch._int_mm

    def cublas(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        assert values.shape[0] > 16, "on CUDA it takes no fewer"
        return multiply(values, weight)

    monkeypatch.setattr(torch, "_int_mm", cublas)
    values, weight = operands(rows)
    assert torch.equal(padded_int_mm(values, weight), (values.long() @ weight.long().t()).int())


def test_one_graph_serves_rows_on_both_sides_of_the_smallest_tile():
    """The padding is a branch on the rows: Dynamo would make it a guard, and compile the other side anew."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda values, weight: padded_int_mm(values, weight) + 1, backend="aot_eager")
    few, weight = operands(2)
    torch._dynamo.mark_dynamic(few, 0)
    compiled(few, weight)
    torch.compiler.set_stance("fail_on_recompile")
    try:
        for rows in (3, CUDA_MIN_ROWS - 1, CUDA_MIN_ROWS, 100):
            values, weight = operands(rows)
            assert torch.equal(compiled(values, weight), padded_int_mm(values, weight) + 1)
    finally:
        torch.compiler.set_stance("default")
