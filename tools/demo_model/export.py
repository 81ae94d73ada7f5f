"""Turn a training state into the checkpoint that the package ships.

python tools/demo_model/export.py --state FOLDER/state.pt [--to FOLDER]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rendering import CHECKPOINT
from safetensors.torch import save_file
from train import CONFIG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--to", type=Path, default=CHECKPOINT)
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    state = torch.load(args.state)
    weights = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state["network"].items()}
    save_file(weights, args.to / "model.safetensors", metadata={"format": "pt"})
    (args.to / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    print(f"{args.to}: step {state['step']}, {(args.to / 'model.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    main()
