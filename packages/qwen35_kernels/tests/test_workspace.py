import torch

from qwen35_kernels import Workspace


def take(workspace: Workspace, name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return workspace.take(name, shape, dtype=dtype, device=torch.device("cpu"))


def test_one_name_is_one_buffer_that_only_grows() -> None:
    workspace = Workspace()
    large = take(workspace, "a", 4, 5)
    small = take(workspace, "a", 2, 3)
    assert small.shape == (2, 3)
    assert small.data_ptr() == large.data_ptr()
    assert workspace.num_bytes == 80
    assert take(workspace, "a", 6, 5).numel() == 30
    assert workspace.num_bytes == 120


def test_names_and_dtypes_do_not_share_memory() -> None:
    workspace = Workspace()
    a, b, c = take(workspace, "a", 4), take(workspace, "b", 4), take(workspace, "a", 4, dtype=torch.int32)
    assert len({x.data_ptr() for x in (a, b, c)}) == 3
