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


def test_what_was_taken_in_inference_mode_can_be_written_outside() -> None:
    workspace = Workspace()
    with torch.inference_mode():
        inside = take(workspace, "a", 4)
    outside = take(workspace, "a", 4).fill_(3.0)
    assert take(workspace, "a", 2, 2).mul_(2.0).sum() == 24.0
    assert outside.data_ptr() == inside.data_ptr()
