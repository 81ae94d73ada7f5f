"""Which stream a device gets."""

import pytest
import torch

from slab_pool import CpuCopyStream, CudaCopyStream, open_copy_stream


def test_a_cpu_gets_a_thread():
    with open_copy_stream("cpu", max_in_flight_bytes=5) as stream:
        assert isinstance(stream, CpuCopyStream)
        assert stream.max_in_flight_bytes == 5


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match=r"open_copy_stream: device must be of type cpu or cuda, got .*meta"):
        open_copy_stream(torch.device("meta"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_a_cuda_device_gets_its_own_stream():
    with open_copy_stream("cuda") as stream:
        assert isinstance(stream, CudaCopyStream)
