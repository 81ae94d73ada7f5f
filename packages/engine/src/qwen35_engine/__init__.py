"""A Qwen3.5 engine that resumes prompts from cached state.

>>> from qwen35_engine import Engine, EngineOptions, GenerationRequest, NewTokens, SamplingParams
>>> from qwen35_engine.demo import demo_folder
>>> greedy = SamplingParams(temperature=0)
>>> def answer(engine, tokens):
...     stream = engine.submit(GenerationRequest(tokens=tokens, sampling=greedy, max_tokens=4))
...     events = list(stream)
...     ids = [i for event in events if isinstance(event, NewTokens) for i in event.ids]
...     return ids, events[-1].usage.cached_tokens
>>> options = EngineOptions(calibrate=False)  # else the first engine of a kind times a few chunks
>>> with Engine.from_folder(demo_folder(), options) as engine:
...     first, cached = answer(engine, range(100, 300))
...     print(cached)
...     second, cached = answer(engine, [*range(100, 300), *first, 7, 8, 9])
...     print(cached)
0
203
"""

from prefix_index import Stats as IndexStats
from prefix_index import TapHints

from .cache import CacheStats
from .engine import Engine, EngineStats
from .errors import (
    CheckpointError,
    ContextLengthExceeded,
    EngineClosed,
    EngineError,
    ExecutionError,
    OptionError,
    QueueFull,
    QueueTimeout,
    RequestError,
)
from .host import HostStats
from .ledger import Ledger, LedgerEntry
from .metrics import (
    FinishReason,
    Funnel,
    MissReason,
    Outcome,
    RequestListener,
    RequestReport,
    Reuse,
    Timing,
    Totals,
    Usage,
)
from .options import EffectiveOptions, EngineOptions
from .request import (
    MAX_LOGPROBS,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    NewTokens,
    SamplingParams,
    Started,
    TokenLogprobs,
    TokenStream,
)
from .request_log import RequestLog
from .sampling import Sampler, SamplingRow

__all__ = [
    "MAX_LOGPROBS",
    "CacheStats",
    "CheckpointError",
    "ContextLengthExceeded",
    "EffectiveOptions",
    "Engine",
    "EngineClosed",
    "EngineError",
    "EngineOptions",
    "EngineStats",
    "Event",
    "ExecutionError",
    "Failed",
    "FinishReason",
    "Finished",
    "Funnel",
    "GenerationRequest",
    "HostStats",
    "IndexStats",
    "Ledger",
    "LedgerEntry",
    "MissReason",
    "NewTokens",
    "OptionError",
    "Outcome",
    "QueueFull",
    "QueueTimeout",
    "RequestError",
    "RequestListener",
    "RequestLog",
    "RequestReport",
    "Reuse",
    "Sampler",
    "SamplingParams",
    "SamplingRow",
    "Started",
    "TapHints",
    "Timing",
    "TokenLogprobs",
    "TokenStream",
    "Totals",
    "Usage",
]
