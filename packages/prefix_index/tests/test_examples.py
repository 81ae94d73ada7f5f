"""The example runs, and its check would notice a wrong state."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


CODE = """
import transformers_reuse as example
example.main()
warm = example.Reuse(example.tiny_model(), num_pages=40, num_slots=6)
cold = example.Reuse(warm.model, num_pages=40, num_slots=6)
prompt = list(range(100))
warm.generate(prompt, 5)
for cache in warm.slots.values():
    for layer in cache.layers:
        for state in getattr(layer, "recurrent_states", {}).values():
            state.zero_()
_, reused = warm.generate(prompt, 5)
cold.generate(prompt, 5)
print(reused, float((warm.last_logits.log_softmax(-1) - cold.last_logits.log_softmax(-1)).abs().max()))
"""


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_the_transformers_example_reuses_exactly_and_would_notice_a_zeroed_state() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], cwd=EXAMPLES, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    shares = [line.split(": ")[1].split(" prompt")[0] for line in lines]
    assert shares == ["0 of 130", "149 of 175", "100 of 140", "100 of 130"]
    reused, distance = last.split()
    assert reused == "99"
    assert float(distance) > 1e-3
