"""The demo checkpoint is made once, whole, and is an ordinary checkpoint."""

from __future__ import annotations

import concurrent.futures
import hashlib
import logging
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from lanes import run
from qwen35_engine import Engine, EngineOptions, GenerationRequest, SamplingParams
from qwen35_engine.checkpoint.config import read_config
from qwen35_engine.demo import demo_folder


def test_it_is_made_once_and_the_same_everywhere(tmp_path: Path) -> None:
    one, two = demo_folder(tmp_path / "missing" / "a"), demo_folder(tmp_path / "b")
    assert one.name == two.name
    digests = [hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() for folder in (one, two)]
    assert digests[0] == digests[1]
    made = (one / "model.safetensors").stat().st_mtime_ns
    assert demo_folder(one.parent) == one
    assert (one / "model.safetensors").stat().st_mtime_ns == made
    assert [path.name for path in one.parent.iterdir()] == [one.name]


def test_two_first_users_at_once(tmp_path: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(lambda _: demo_folder(tmp_path), range(4)))
    assert len(folders) == 1
    assert list(tmp_path.iterdir()) == list(folders)


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert demo_folder().parent == tmp_path


def test_transformers_reads_it_and_agrees(caplog: pytest.LogCaptureFixture) -> None:
    folder = demo_folder()
    caplog.set_level(logging.WARNING)
    oracle = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert read_config(folder).vocab_size == len(tokenizer)
    prompt = tokenizer.encode("Ana keeps the red suitcase in Oslo." * 8)
    with torch.inference_mode():
        expected = oracle.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, attention_mask=torch.ones(1, len(prompt))
        )
    with Engine.from_folder(folder, EngineOptions(threads=1)) as engine:
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


def test_it_ends_turns_with_qwens_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")}
    assert read_config(demo_folder()).eos_token_ids == ends
    for token in ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
