"""The engine against transformers' bare model, on a checkpoint that both load from one folder.

Ours always goes through the public API, cache and sampling included. The other side is ``model(...)`` on its plain
torch path and nothing else, except where both draw the first token. The two take turns in one process.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.timing import Spent, Times, spent, take_turns
from qwen35_engine import Engine, EngineOptions, Failed, Finished, GenerationRequest, NewTokens, SamplingParams

__all__ = ["ModelBench", "ModelSizes"]

_VOCAB = 512
_MAX_POSITION = 8192
_CONFIG: dict[str, Any] = {
    "vocab_size": _VOCAB,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": _MAX_POSITION,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Lengths in tokens, and how often the two sides take turns.

    Attributes:
        prompt: of the prefill.
        context: before the first decode step.
        steps: decode steps a turn.
        history: computed before a warm turn.
        new: that a warm turn adds.
    """

    prompt: int = 4096
    context: int = 512
    steps: int = 64
    history: int = 4000
    new: int = 128
    prefill_turns: int
    decode_turns: int
    warm_turns: int


class _Stopwatch:
    """Adds up what is spent in some methods of one object."""

    def __init__(self, target: Any, *methods: str) -> None:
        self.total = Spent(0.0, 0.0)
        for name in methods:
            setattr(target, name, self._timed(getattr(target, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = Spent.now()
            try:
                return call(*args, **kwargs)
            finally:
                took = Spent.now() - begin
                self.total = Spent(self.total.wall + took.wall, self.total.cpu + took.cpu)

        return timed


class _Token(NamedTuple):
    """When a token came, and what the model had taken by then, by the worker's clocks."""

    at: Spent
    model: Spent


class _Answer:
    """One greedy request: when its tokens came, noted on the worker's thread, and which they are once it has ended."""

    def __init__(self, engine: Engine, prompt: Sequence[int], count: int, model: _Stopwatch | None = None) -> None:
        self.came: list[_Token] = []
        self.tokens: list[int] = []
        self.cached_tokens = 0
        self._admitted: Spent | None = None
        self._model = model
        self._error: Exception | None = None
        self._ended = threading.Event()
        submitted = threading.Event()

        def note() -> None:
            now = Spent.now()
            submitted.wait()
            self._take(now)

        self._begin = time.perf_counter()
        self._stream = engine.submit(
            GenerationRequest(tokens=prompt, max_tokens=count, sampling=SamplingParams(temperature=0)), notify=note
        )
        submitted.set()

    def _take(self, now: Spent) -> None:
        self._admitted = self._admitted or now
        for event in self._stream.take():
            if isinstance(event, NewTokens):
                self.tokens += event.ids
                self.came.append(_Token(now, Spent(0.0, 0.0) if self._model is None else self._model.total))
            elif isinstance(event, Finished):
                self.cached_tokens = event.usage.cached_tokens
                self._ended.set()
            elif isinstance(event, Failed):
                self._error = event.error
                self._ended.set()

    def wait(self) -> _Answer:
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self

    @property
    def to_first_token(self) -> Spent:
        """From submit on the clock; of the worker's processor, from the admission on."""
        assert self._admitted is not None
        first = self.came[0].at
        return Spent(first.wall - self._begin, first.cpu - self._admitted.cpu)


class ModelBench:
    """Both sides over one set of weights. ``times`` keeps what was measured, by name.

    Raises:
        RuntimeError: transformers cannot be imported.
    """

    def __init__(self, folder: Path, sizes: ModelSizes, *, threads: int) -> None:
        try:
            from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
        except ImportError as error:
            raise RuntimeError(f"the bench compares with transformers, which cannot be imported: {error}") from error
        self.sizes = sizes
        self.times: dict[str, Times] = {}
        self._threads = threads
        self._folder = folder
        self._random = random.Random(0)
        torch.manual_seed(0)
        self._reference = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_CONFIG)).eval()
        self._reference.save_pretrained(folder)

    # ---- what is measured -----------------------------------------------------------------------------------------

    def prefill_ratio(self) -> float:
        """A whole prompt in one chunk: the bare model's time over ours, from submit to the first token."""

        def ours() -> list[Spent]:
            return [_Answer(engine, self._prompt(length), 1).wait().to_first_token]

        def reference() -> list[Spent]:
            prompt = [self._prompt(length)]
            return [spent(lambda: self._forward(prompt))]

        length = self.sizes.prompt
        with self._engine(prefill_chunk=length) as engine:
            return self._compare("prefill", ours, reference, self.sizes.prefill_turns)

    def decode_ratio(self, lanes: int) -> float:
        """One token of each of ``lanes`` sequences: the bare model's time over ours, worker and sampling included."""

        def ours() -> list[Spent]:
            # A turn computes one prompt, and a token of each lane before it.
            answers = [_Answer(engine, self._prompt(context), steps + lanes, model) for _ in range(lanes)]
            for answer in answers:
                answer.wait()
            # Every lane decodes: from the last one's first token to the first one's end.
            begin = max(answer.came[0].at.wall for answer in answers)
            end = min(answer.came[-1].at.wall for answer in answers)
            came = [token for token in answers[0].came if begin <= token.at.wall <= end]
            rounds = list(itertools.pairwise(came))
            outside.append([(after.at - before.at) - (after.model - before.model) for before, after in rounds])
            return [after.at - before.at for before, after in rounds]

        def reference() -> list[Spent]:
            cache = self._forward([self._prompt(context) for _ in range(lanes)]).cache
            return [spent(lambda: self._forward([[1]] * lanes, cache)) for _ in range(steps)]

        context, steps = self.sizes.context, self.sizes.steps
        outside: list[list[Spent]] = []
        with self._engine(lanes=lanes) as engine:
            model = _Stopwatch(engine.parts.model, "prefill", "decode", "logits")
            ratio = self._compare(f"decode {lanes}", ours, reference, self.sizes.decode_turns)
        self.times[f"decode {lanes} outside the model"] = Times(itertools.chain.from_iterable(outside[1:]))
        return ratio

    def warm_ttft_ratio(self) -> float:
        """A turn that adds tokens to a cached history: our time to the first token over that of the bare forward pass
        with the history's cache in place; both draw the token.

        Raises:
            RuntimeError: the engine did not resume where the history ends.
        """

        def ours() -> list[Spent]:
            new = self._prompt(self.sizes.new - 1)
            answer = _Answer(engine, [*prompt, *answered, *new], 1).wait()
            if answer.cached_tokens != history:
                raise RuntimeError(f"a warm turn must reuse {history} tokens, got {answer.cached_tokens}")
            return [answer.to_first_token]

        def reference() -> list[Spent]:
            new, own = [self._prompt(self.sizes.new)], copy.deepcopy(cache)
            return [spent(lambda: int(self._forward(new, own).logits[0, -1].argmax()))]

        history = self.sizes.history
        # The last token of an answer is drawn and not computed, so the state at its end is that of `history` tokens.
        prompt = self._prompt(history - 8)
        with self._engine() as engine:
            answered = _Answer(engine, prompt, 9).wait().tokens
            cache = self._forward([[*prompt, *answered[:-1]]]).cache
            return 1 / self._compare("warm turn", ours, reference, self.sizes.warm_turns)

    def step_overhead_us(self, lanes: int) -> float:
        """Of the worker's time per decode step, what ``decode_ratio`` saw outside the model."""
        return self.times[f"decode {lanes} outside the model"].median * 1e6

    # ---- how ------------------------------------------------------------------------------------------------------

    def _compare(
        self, name: str, ours: Callable[[], list[Spent]], reference: Callable[[], list[Spent]], turns: int
    ) -> float:
        """The reference's median over ours. One turn of each does not count; then each goes first in turn."""
        ours(), reference()
        own_times, reference_times = Times(), Times()
        self.times |= {name: own_times, f"{name} reference": reference_times}
        for times, measure in take_turns([(own_times, ours), (reference_times, reference)], turns):
            times.add(*measure())
        return reference_times.median / own_times.median

    def _engine(self, *, lanes: int = 1, prefill_chunk: int = 1024) -> Engine:
        options = EngineOptions(
            device="cpu",
            dtype="float32",
            calibrate=False,
            threads=self._threads,
            max_context=_MAX_POSITION,
            max_concurrency=lanes,
            prefill_chunk=prefill_chunk,
            kv_capacity=4 * _MAX_POSITION,
            host_cache_mib=128,
        )
        return Engine.from_folder(self._folder, options)

    def _prompt(self, length: int) -> list[int]:
        """New random tokens, which no earlier turn has left in the cache."""
        return [self._random.randrange(_VOCAB) for _ in range(length)]

    @torch.inference_mode()
    def _forward(self, tokens: Sequence[Sequence[int]], cache: Any = None) -> Any:
        return self._reference(torch.tensor(tokens), cache=cache, use_cache=True, logits_to_keep=1)
