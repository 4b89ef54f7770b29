"""Products of fp32 matrices on a CPU: fast where that does not round their inputs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from crosstrain.engine.precision import choose_products, mkl_products

SHAPES = [(1, 384, 1536), (2, 7, 5), (8, 384, 1152), (100, 1536, 384), (257, 1031, 513), (1024, 64, 3000)]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def error(rows: torch.Tensor, columns: torch.Tensor) -> float:
    """The largest difference from the product in fp64, relative to the largest possible value."""
    exact = rows.double() @ columns.double()
    possible = rows.double().abs() @ columns.double().abs()
    return float(((rows @ columns).double() - exact).abs().max() / possible.max())


@pytest.mark.parametrize(("rows", "inner", "columns"), SHAPES)
def test_products_have_the_precision_of_fp32(rows: int, inner: int, columns: int) -> None:
    choose_products()
    rng = torch.Generator().manual_seed(rows)
    left, right = torch.randn(rows, inner, generator=rng), torch.randn(inner, columns, generator=rng)
    turned = right.T.contiguous().T, left.T.contiguous().T
    # Rounding inputs to bf16 gives errors of 1e-3; sums of `inner` numbers in fp32 have a few units in 2^-24.
    for a, b in ((left, right), (left, turned[0]), (turned[1], right), (right.T, turned[1].T)):
        assert error(a, b) < 5e-7
    batch = error(left.expand(3, -1, -1).contiguous(), right.expand(3, -1, -1).contiguous())
    assert batch < 5e-7


def test_a_cpu_that_rounds_keeps_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = torch.eye
    monkeypatch.setattr(torch, "eye", lambda size: identity(size) * (1 + 2**-9))  # as if 1 had been rounded
    choose_products()
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_choice_returns_after_an_error() -> None:
    torch.set_float32_matmul_precision("medium")

    def fail() -> None:
        with mkl_products():
            assert torch.get_float32_matmul_precision() == "highest"
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert torch.get_float32_matmul_precision() == "medium"
