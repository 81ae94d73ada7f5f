"""The demo checkpoint ships with the package, is an ordinary checkpoint, and is small."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from lanes import run
from qwen35_engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from qwen35_engine.checkpoint.config import read_config
from qwen35_engine.demo import demo_folder

FACTS = "<|im_start|>user\nAna has locker 42. Ben has locker 17.<|im_end|>\n<|im_start|>assistant\nNoted.<|im_end|>\n"
OPENER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_it_is_small_and_in_bf16() -> None:
    files = [path for path in demo_folder().iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 12_000_000
    assert read_config(demo_folder()).dtype == torch.bfloat16


def test_transformers_reads_it_and_agrees(caplog: pytest.LogCaptureFixture) -> None:
    folder = demo_folder()
    caplog.set_level(logging.WARNING)
    oracle = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert read_config(folder).vocab_size >= len(tokenizer)
    prompt = tokenizer.encode(f"{FACTS * 4}<|im_start|>user\nWhich locker has Ana?{OPENER}")
    with torch.inference_mode():
        expected = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, attention_mask=torch.ones(1, len(prompt))
        )
    with Engine.from_folder(folder, EngineOptions(threads=1, calibrate=False)) as engine:
        ids, _ = run(
            engine,
            GenerationRequest(
                tokens=prompt,
                sampling=SamplingParams(temperature=0),
                max_tokens=12,
                stop_token_ids=engine.config.eos_token_ids,
            ),
        )
    assert ids == expected[0, len(prompt) :].tolist()
    assert tokenizer.decode(ids) == "Ana has locker 42.<|im_end|>"


def test_it_ends_turns_with_qwens_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert read_config(demo_folder()).eos_token_ids == ends
    for token in ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
