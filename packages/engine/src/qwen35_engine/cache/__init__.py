"""The binding between tokens and pages: the only code that sees both; ``prefix_cache`` says what the parts do."""

from .prefix_cache import CacheStats, PrefixCache
from .quotes import AdmissionQuote

__all__ = ["AdmissionQuote", "CacheStats", "PrefixCache"]
