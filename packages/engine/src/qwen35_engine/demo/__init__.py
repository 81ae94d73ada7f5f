"""The demo checkpoint: Qwen3.5's architecture with under a million weights, trained to recall what it was told.

It lies beside this file in the Hugging Face layout and is loaded like any other folder; its ``README.md`` is its model
card. ``tools/demo_model`` in the repository made it.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["demo_folder"]


def demo_folder() -> Path:
    """The folder of the demo checkpoint in the Hugging Face layout."""
    return Path(__file__).parent / "checkpoint"
