"""Writes the table of options in the server's README from the settings; ``--check`` only says whether it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from qwen35_serve.settings import OPTIONS, Option

README = Path(__file__).parents[1] / "packages" / "serve" / "README.md"
BEGIN = "<!-- options: written by tools/options_table.py -->\n"
END = "<!-- end of options -->\n"


def main(arguments: list[str]) -> int:
    """Returns 1 if the table is to be checked and is not current."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    current = f"{before}{BEGIN}{table()}{END}{after}"
    if "--check" in arguments:
        return int(text != current)
    README.write_text(current, encoding="utf-8")
    return 0


def table() -> str:
    rows = [
        f"| `{flags(option)}` | {option.values} | {option.default or ''} | {option.description} |" for option in OPTIONS
    ]
    return "\n".join(["| flag | values | default | |", "|---|---|---|---|", *rows, ""])


def flags(option: Option) -> str:
    return f"{option.flag}`, `{option.off_flag}" if option.is_switch else option.flag


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
