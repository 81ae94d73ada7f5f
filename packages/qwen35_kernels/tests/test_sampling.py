import math

import pytest
import torch
from torch import Tensor

from kernel_testing import assert_close, assert_same_bits, generator
from qwen35_kernels import KernelInputError, log_probabilities, reference, sample
from qwen35_kernels.sampling import _filtered, uniform_noise


def parameters(rows: int, **changes: object) -> dict[str, Tensor]:
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "steps": 0}
    out = {}
    for name, value in {**plain, **changes}.items():
        dtype = torch.int64 if name in ("top_k", "seeds", "steps") else torch.float32
        tensor = torch.as_tensor(value, dtype=dtype)
        out[name] = tensor.expand(rows).contiguous() if tensor.dim() == 0 else tensor
    return out


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1000},
    {"top_p": 0.1},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_draws_the_token_of_the_definition(settings: dict) -> None:
    rows = 200
    logits = torch.randn(rows, 50, generator=generator(60)) * 2
    logits[:, 7] = float("-inf")
    seeds = torch.arange(rows) * 7919 - 300
    steps = torch.arange(rows) % 5
    given = parameters(rows, seeds=seeds, steps=steps, **settings)
    noise = uniform_noise(seeds, steps).tolist()
    tokens = sample(logits=logits, **given)
    assert tokens.dtype == torch.int64
    expected = [
        reference.sample_row(
            logits[i].tolist(),
            float(given["temperature"][i]),
            int(given["top_k"][i]),
            float(given["top_p"][i]),
            float(given["min_p"][i]),
            noise[i],
        )
        for i in range(rows)
    ]
    assert tokens.tolist() == expected


def test_equal_logits_stay_together() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0, -1.0]])
    for settings in ({"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}):
        drawn = {int(sample(logits=logits, **parameters(1, seeds=seed, **settings))) for seed in range(200)}
        assert drawn == {1, 2, 3}
    assert int(sample(logits=logits, **parameters(1, temperature=0.0))) == 1


def filtered_by_sorting(weights: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The filters over each row's whole vocabulary in order."""
    vocab = weights.shape[1]
    limit = torch.where(top_k > 0, top_k.clamp_max(vocab), vocab)
    ordered = weights.sort(dim=1, descending=True).values
    last = ordered.gather(1, (limit - 1).unsqueeze(1))
    ordered = ordered.masked_fill(ordered < last, 0.0)
    running = ordered.cumsum(1)
    inside = running - ordered < top_p.unsqueeze(1) * running[:, -1:]
    nucleus = ordered.gather(1, inside.sum(1, keepdim=True).clamp_min_(1) - 1)
    floor = torch.maximum(min_p.unsqueeze(1), torch.where(top_p.unsqueeze(1) < 1, nucleus, last))
    return weights.masked_fill(weights < floor, 0.0)


VOCAB = 20_000
ROWS = {
    "peaked": lambda rng: torch.randn(VOCAB, generator=rng) * 6,
    "flat": lambda rng: torch.randn(VOCAB, generator=rng) * 0.1,
    "uniform": lambda rng: torch.zeros(VOCAB),
    "ties": lambda rng: (torch.randn(VOCAB, generator=rng) * 3).round(),
    "few": lambda rng: torch.full((VOCAB,), -math.inf).index_fill_(0, torch.randperm(VOCAB, generator=rng)[:300], 1.0),
    "underflow": lambda rng: torch.randn(VOCAB, generator=rng) * 2000,
    "one": lambda rng: torch.zeros(VOCAB).index_fill_(0, torch.tensor([77]), 1000.0),
    "nan": lambda rng: torch.randn(VOCAB, generator=rng).index_fill_(0, torch.tensor([5]), math.nan),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_largest_weights_decide_as_the_whole_vocabulary_does(name: str) -> None:
    """Wherever the nucleus ends and however many weights are equal there: before the first guess, behind it, at it."""
    rng = generator(64)
    settings = [
        (top_k, top_p, min_p)
        for top_k in (0, 1, 40, 255, 256, 257, 4095, 4096, 4097, VOCAB - 1, VOCAB)
        for top_p in (1e-300, 0.01, 256 / VOCAB, 0.5, 4096 / VOCAB, 0.9, 0.95, 1 - 2**-53, 1.0)
        for min_p in (0.0, 0.3)
    ]
    logits = ROWS[name](rng).expand(len(settings), -1)
    weights = (logits - logits.amax(1, keepdim=True)).double().exp()
    top_k, top_p, min_p = zip(*settings, strict=True)
    given = torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p, dtype=torch.float64)
    assert_same_bits(_filtered(weights, *given), filtered_by_sorting(weights, *given))


@pytest.mark.parametrize("spread", [0.5, 2.0, 6.0])
def test_random_rows_keep_what_the_whole_vocabulary_in_order_keeps(spread: float) -> None:
    rng = generator(65)
    weights = torch.randn(64, VOCAB, generator=rng, dtype=torch.float64).mul_(spread)
    weights = weights.sub_(weights.amax(1, keepdim=True)).exp_()
    top_k = torch.randint(0, 400, (64,), generator=rng) * torch.randint(0, 2, (64,), generator=rng)
    top_p = torch.rand(64, generator=rng, dtype=torch.float64).clamp_min_(1e-3)
    top_p[::7] = 1.0
    min_p = torch.zeros(64, dtype=torch.float64)
    assert_same_bits(_filtered(weights, top_k, top_p, min_p), filtered_by_sorting(weights, top_k, top_p, min_p))


def test_a_row_does_not_depend_on_the_batch() -> None:
    rows = 9
    logits = torch.randn(rows, 1003, generator=generator(61)) * 3
    given = parameters(
        rows,
        temperature=[0.0, 1.0, 0.5, 2.0, 1.0, 1.0, 0.9, 0.0, 1.3],
        top_k=[0, 3, 0, 50, 0, 1, 2000, 5, 0],
        top_p=[1.0, 1.0, 0.9, 0.5, 0.99, 1.0, 1.0, 0.2, 1.0],
        min_p=[0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0],
        seeds=[1, 2, 3, 4, 5, 6, 7, 8, -9],
        steps=[0, 10, 20, 3, 3, 3, 1, 2, 2**40],
    )
    whole = sample(logits=logits, **given)
    for picked in ([0], [4], [8], [8, 3, 2], [1, 1, 1, 6]):
        part = sample(logits=logits[picked], **{name: x[picked] for name, x in given.items()})
        assert part.tolist() == whole[picked].tolist()


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_without_probabilities_gets_a_token_and_leaves_the_others_alone(bad: float, settings: dict) -> None:
    logits = torch.randn(3, 20, generator=generator(63))
    seeds = torch.arange(3)
    alone = sample(logits=logits, **parameters(3, seeds=seeds, **settings))
    logits[1, slice(None) if bad < 0 else 4] = bad
    tokens = sample(logits=logits, **parameters(3, seeds=seeds, **settings))
    assert tokens[1] == (0 if bad < 0 else 4)
    assert tokens[::2].tolist() == alone[::2].tolist()


def test_frequencies_follow_the_probabilities() -> None:
    rows = 20_000
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    given = parameters(rows, seeds=torch.arange(rows), steps=3)
    counts = torch.bincount(sample(logits=logits.expand(rows, 4), **given), minlength=4)
    expected = torch.softmax(logits, 0) * rows
    # Pearson's statistic with 3 degrees of freedom is above 21.1 once in ten thousand seeds; the seeds are
    # fixed.
    assert float(((counts - expected) ** 2 / expected).sum()) < 21.1


def test_noise_is_uniform_over_seeds_and_over_steps() -> None:
    number = torch.arange(1 << 14)
    fixed = torch.full_like(number, 12345)
    for noise in (uniform_noise(number, fixed), uniform_noise(fixed, number)):
        assert float(noise.min()) >= 0.0
        assert float(noise.max()) < 1.0
        counts = torch.histc(noise, 64, 0.0, 1.0)
        assert float(((counts - 256) ** 2 / 256).sum()) < 122.0
        assert abs(float((noise[1:] - 0.5).mul(noise[:-1] - 0.5).mean())) < 0.005
    assert len(set(uniform_noise(number, number).tolist())) == len(number)


def test_noise_hash_matches_plain_integers() -> None:
    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, step in ((0, 0), (1, 0), (0, 1), (-1, 5), (2**63 - 1, 2**40), (-(2**63), 2)):
        hashed = mix((mix((seed + golden) % 2**64) + step * golden) % 2**64)
        noise = float(uniform_noise(torch.tensor([seed]), torch.tensor([step])))
        assert noise == (hashed >> 11) / 2**53


def test_log_probabilities_match_the_oracle() -> None:
    logits = torch.randn(4, 997, generator=generator(62)) * 10
    assert_close(log_probabilities(logits=logits), reference.log_probabilities(logits), atol=5e-6, rtol=2e-6)
    whole = log_probabilities(logits=logits)
    assert_same_bits(log_probabilities(logits=logits[2:3]), whole[2:3])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -0.5}, r"temperature must be finite and at least 0, got -0.5"),
        ({"temperature": math.nan}, r"temperature must be finite and at least 0, got nan"),
        ({"temperature": math.inf}, r"temperature must be finite and at least 0, got inf"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], got 1.5"),
        ({"min_p": 1.5}, r"min_p must lie in \[0, 1\], got 1.5"),
        ({"seeds": [1, 2]}, r"seeds must have shape \(1,\), got \(2,\)"),
    ],
)
def test_bad_parameters_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(KernelInputError, match="sample: " + message):
        sample(logits=torch.zeros(1, 4), **parameters(1, **changes))
