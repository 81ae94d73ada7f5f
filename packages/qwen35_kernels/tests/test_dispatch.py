import pytest
import torch

from qwen35_kernels import KernelInputError, dispatch


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """The choice is read once a process: forget it before and after."""
    dispatch._choice.cache_clear()
    yield monkeypatch
    dispatch._choice.cache_clear()


def test_a_cpu_tensor_runs_in_torch_unless_told_otherwise(fresh: pytest.MonkeyPatch) -> None:
    fresh.delenv("QWEN35_KERNELS_BACKEND", raising=False)
    assert dispatch.triton_for(torch.zeros(1, device="cpu")) is None


def test_torch_can_be_forced(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("QWEN35_KERNELS_BACKEND", "torch")
    assert dispatch.triton_for(torch.empty(1, device="meta")) is None


def test_an_unknown_backend_is_refused(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("QWEN35_KERNELS_BACKEND", "cuda")
    message = "QWEN35_KERNELS_BACKEND must be auto, torch or triton, got 'cuda'"
    with pytest.raises(KernelInputError, match=message):
        dispatch.triton_for(torch.zeros(1, device="cpu"))


def test_kernels_without_triton_are_refused_by_name(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("QWEN35_KERNELS_BACKEND", "triton")
    fresh.setattr(dispatch, "_installed", lambda: False)
    with pytest.raises(KernelInputError, match="triton must be installed"):
        dispatch.triton_for(torch.zeros(1, device="cpu"))
