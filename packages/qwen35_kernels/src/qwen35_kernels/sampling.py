"""Choosing the next token: temperature, top-k, top-p, min-p, and noise that belongs to the request.

Every row is decided by itself: from its logits, its own parameters, its seed and its step. The noise is a
hash of (seed, step) and needs no generator state, so that neither the batch nor a restart changes what is drawn.
"""

import torch
from torch import Tensor

from qwen35_kernels.contracts import FLOAT_DTYPES, check_device, check_dtype, check_rank, check_shape, refuse

__all__ = ["log_probabilities", "sample"]


def log_probabilities(*, logits: Tensor) -> Tensor:
    """Log-softmax of logits [..., vocab] over the last axis, float32, a new tensor.

    Raises:
        KernelInputError: another dtype, or no dimension.
    """
    check_dtype("log_probabilities", "logits", logits, FLOAT_DTYPES)
    if logits.dim() < 1:
        refuse("log_probabilities", "logits must have at least one dimension", tuple(logits.shape))
    return torch.log_softmax(logits.float(), dim=-1)


def _as_signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _as_signed(0x9E3779B97F4A7C15)
_MIX_1 = _as_signed(0xBF58476D1CE4E5B9)
_MIX_2 = _as_signed(0x94D049BB133111EB)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of the 64 bits held in an int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood, 2014): a bijection of 64 bits."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform_noise(seeds: Tensor, steps: Tensor) -> Tensor:
    """One float64 in [0, 1) for each (seed, step), 53 bits of a hash of the two."""
    bits = _mix(_mix(seeds + _GOLDEN) + steps * _GOLDEN)
    return _shift_right(bits, 11).double() * 2.0**-53


def sample(
    *,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    steps: Tensor,
) -> Tensor:
    """One token for each of B rows, int64 [B].

    logits [B, vocab] in fp32 or bf16 (-inf forbids a token); temperature [B], finite (0: the largest logit, the
    lowest index among equals); top_k int64 [B] (0: off); top_p [B] in (0, 1]; min_p [B] in [0, 1]; seeds,
    steps int64 [B]. With p = softmax(logits / temperature), a token stays when all of these hold, equals
    counting as equal:

    - fewer than top_k tokens have a larger p;
    - the tokens with a larger p, among those top_k kept and renormalised, sum to less than top_p;
    - p >= min_p * max(p).

    The token drawn is the first, in vocabulary order, whose running sum of kept p exceeds uniform(seed, step)
    times their total; sums are float64. A row without a p (NaN, +inf, or -inf alone) gets the token of temperature 0.
    Nothing is written.

    Raises:
        KernelInputError: a shape, dtype or device that does not fit, or (on a CPU) a parameter out of range.
    """
    op = "sample"
    check_rank(op, "logits", logits, 2)
    check_dtype(op, "logits", logits, FLOAT_DTYPES)
    rows, vocab = logits.shape
    if vocab < 1:
        refuse(op, "logits must have at least one column", vocab)
    for name, x in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        check_shape(op, name, x, (rows,))
        check_dtype(op, name, x, (torch.float32, torch.float64))
        check_device(op, name, x, logits.device)
    for name, x in (("top_k", top_k), ("seeds", seeds), ("steps", steps)):
        check_shape(op, name, x, (rows,))
        check_dtype(op, name, x, (torch.int64,))
        check_device(op, name, x, logits.device)
    for name, x, good, constraint in (
        ("temperature", temperature, (temperature >= 0) & (temperature < torch.inf), "must be finite and at least 0"),
        ("top_k", top_k, top_k >= 0, "must be at least 0"),
        ("top_p", top_p, (top_p > 0) & (top_p <= 1), "must lie in (0, 1]"),
        ("min_p", min_p, (min_p >= 0) & (min_p <= 1), "must lie in [0, 1]"),
    ):
        if x.device.type == "cpu" and not bool(good.all()):
            refuse(op, f"{name} {constraint}", x[~good][0].item())
    tokens = logits.argmax(dim=-1)
    hot = torch.nonzero(temperature > 0).flatten()
    if len(hot) == 0:
        return tokens
    noise = uniform_noise(seeds[hot], steps[hot])
    weights = logits[hot].double()
    weights = weights.sub_(weights.amax(1, keepdim=True)).div_(temperature[hot].double().unsqueeze(1)).exp_()
    weights = _filtered(weights, top_k[hot], top_p[hot].double(), min_p[hot].double())
    running = weights.cumsum(1)
    total = running[:, -1:]
    # The product may round up to the total itself, which no running sum exceeds.
    target = torch.minimum(noise.unsqueeze(1) * total, total.nextafter(torch.zeros_like(total)))
    drawn = torch.searchsorted(running, target, right=True)
    tokens[hot] = torch.where(total > 0, drawn, tokens[hot].unsqueeze(1)).squeeze(1)
    return tokens


# How many of a row's largest weights are put in order, where that decides: sorting a whole vocabulary takes far longer.
# Fixed sizes, so that the rest of a batch decides no bit of a row.
_SIZES = (256, 4096, 65536)


def _filtered(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Zero the weights [B, vocab] (largest 1) that a row's filters drop.

    Each filter is a threshold on the weight itself, found in the row's largest weights in order: which of two equal
    weights a sort puts first cannot matter.
    """
    vocab = weights.shape[1]
    floor = min_p.clone()
    limit = torch.where(top_k > 0, top_k.clamp_max(vocab), vocab)
    rows = torch.nonzero((limit < vocab) | (top_p < 1)).flatten()
    # No weight is above 1, so a nucleus has at least as many tokens as its weights' sum.
    least = torch.where(limit < vocab, limit, top_p * weights.sum(1))[rows]
    few = least < _SIZES[0]
    many = rows[~few]
    rows = torch.cat((rows[few], many))
    needed = torch.cat((least[few], _needed(weights[many], limit[many], top_p[many])))
    for size in (*(size for size in _SIZES if size < vocab // 2), vocab):
        now = needed <= size
        if not bool(now.any()):
            continue
        tried = rows[now]
        thresholds, certain = _thresholds(weights[tried], limit[tried], top_p[tried], size)
        floor[tried] = torch.where(certain, torch.maximum(floor[tried], thresholds), floor[tried])
        undecided = tried[~certain]
        rows = torch.cat((rows[~now], undecided))
        needed = torch.cat((needed[~now], _needed(weights[undecided], limit[undecided], top_p[undecided])))
    return weights.masked_fill(weights < floor.unsqueeze(1), 0.0)


_OCTAVES = 2048


def _needed(weights: Tensor, limit: Tensor, top_p: Tensor) -> Tensor:
    """How many of each row's largest weights decide its thresholds, rounded up to whole powers of two of a weight."""
    rows, vocab = weights.shape
    if rows == 0:
        return torch.empty(0, dtype=weights.dtype, device=weights.device)
    # A double's exponent is in its upper bits, below the sign.
    octaves = (weights.view(torch.int64) >> 52) & (_OCTAVES - 1)
    octaves += torch.arange(rows, device=weights.device).unsqueeze(1) * _OCTAVES
    size = rows * _OCTAVES
    counts = torch.bincount(octaves.flatten(), minlength=size).view(rows, -1).flip(1).cumsum(1)
    sums = torch.bincount(octaves.flatten(), weights.flatten(), minlength=size).view(rows, -1).flip(1).cumsum(1)
    reached = torch.where(
        (limit < vocab).unsqueeze(1), counts >= limit.unsqueeze(1), sums > top_p.unsqueeze(1) * sums[:, -1:]
    )
    first = reached.to(torch.uint8).argmax(1, keepdim=True)
    return torch.where(reached.any(1), counts.gather(1, first).squeeze(1) + 1, vocab).clamp_max(vocab).double()


def _thresholds(weights: Tensor, limit: Tensor, top_p: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The smallest weight [B] that top-k and top-p leave each row, and whether its `size` largest weights decide it.

    Where they do, it is the one that the whole row in order gives, bit for bit.
    """
    vocab, whole = weights.shape[1], size == weights.shape[1]
    ordered = weights.sort(dim=1, descending=True).values if whole else weights.topk(size, dim=1).values
    smallest = ordered[:, -1].clone()
    last = ordered.gather(1, (limit - 1).clamp_max(size - 1).unsqueeze(1))
    ordered = ordered.masked_fill_(ordered < last, 0.0)
    running = ordered.cumsum(1)
    larger = running - ordered
    # Whether every weight that is left out is 0, or dropped by top-k: zeros at the end change no sum.
    limited = limit < vocab
    complete = (smallest == 0) | (limited & (limit < size) & (smallest < last.squeeze(1))) | whole
    total = running[:, -1] if whole else torch.where(complete, running[:, -1], weights.sum(1))
    target = (top_p * total).unsqueeze(1)
    inside = larger < target
    # The smallest weight still inside the nucleus; the largest always is, unless it is NaN.
    nucleus = ordered.gather(1, inside.sum(1, keepdim=True).clamp_min_(1) - 1)
    threshold = torch.where(top_p < 1, nucleus.squeeze(1), last.squeeze(1))
    if whole:
        return threshold, complete
    # Two sums of one row in different orders differ by less than this: a comparison that is not closer is that of
    # the whole row in order.
    doubt = (vocab + 8) * torch.finfo(weights.dtype).eps * total.unsqueeze(1)
    clear = ((larger - target).abs() > doubt).all(1) & (running[:, -1:] - target > doubt).squeeze(1)
    return threshold, complete | (~limited & clear)
