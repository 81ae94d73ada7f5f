"""slab_pool: one pool of Host memory in equal slabs, and copies that can be waited for.

A pool hands out slabs, a copy stream moves records between them and a device's arena, a ticket says how far it
has come:

>>> import torch
>>> import slab_pool
>>> pool = slab_pool.SlabPool(budget_bytes=64 * 4096, slab_bytes=4096, pinned=False)
>>> arena = torch.arange(8, dtype=torch.uint8).repeat_interleave(4096).view(8, 4096)  # 8 records
>>> slabs = pool.acquire(3)
>>> runs = pool.plan_runs([2, 3, 4], slabs, record_bytes=4096)
>>> len(runs)  # consecutive records, consecutive slabs: one copy
1
>>> copies = slab_pool.open_copy_stream("cpu")
>>> batch = slab_pool.CopyBatch.of(
...     slab_pool.Direction.DEVICE_TO_HOST,
...     [("records", slab_pool.record_copies(pool, arena, runs, 0, 4096))],
... )
>>> ticket = copies.submit(batch, after=copies.compute_stream())
>>> ticket.result().num_bytes
12288
>>> [int(pool.tensor(slab)[0]) for slab in slabs]
[2, 3, 4]
>>> pool.release(slabs)
>>> copies.close()
>>> pool.close()
"""

from slab_pool.batches import BatchPart, Copy, CopyBatch, Direction, image_copies, record_copies
from slab_pool.cpu import CpuCopyStream
from slab_pool.cuda import CudaCopyStream
from slab_pool.errors import (
    HostMemoryError,
    ImageCancelled,
    ImageDamaged,
    ImageError,
    ImageUnsuitable,
    PoolClosed,
    PoolExhausted,
    SlabPoolError,
    StaleSlab,
    WouldBlock,
)
from slab_pool.image_file import ImageFile, ImageTransfer, save_image, temporary_path
from slab_pool.opening import open_copy_stream
from slab_pool.pool import PoolStatistics, SlabPool
from slab_pool.records import SlabLayout, Span, pack_slab, record_spans
from slab_pool.runs import Run, Runs, plan_runs
from slab_pool.streams import CALLING_THREAD, CallingThread, CopyStatistics, CopyStream, DirectionStatistics
from slab_pool.tickets import CopyFailed, CopyResult, PartEvent, Ticket
from slab_pool.transports import Transport, Trial

__all__ = [
    "CALLING_THREAD",
    "BatchPart",
    "CallingThread",
    "Copy",
    "CopyBatch",
    "CopyFailed",
    "CopyResult",
    "CopyStatistics",
    "CopyStream",
    "CpuCopyStream",
    "CudaCopyStream",
    "Direction",
    "DirectionStatistics",
    "HostMemoryError",
    "ImageCancelled",
    "ImageDamaged",
    "ImageError",
    "ImageFile",
    "ImageTransfer",
    "ImageUnsuitable",
    "PartEvent",
    "PoolClosed",
    "PoolExhausted",
    "PoolStatistics",
    "Run",
    "Runs",
    "SlabLayout",
    "SlabPool",
    "SlabPoolError",
    "Span",
    "StaleSlab",
    "Ticket",
    "Transport",
    "Trial",
    "WouldBlock",
    "image_copies",
    "open_copy_stream",
    "pack_slab",
    "plan_runs",
    "record_copies",
    "record_spans",
    "save_image",
    "temporary_path",
]
