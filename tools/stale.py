"""Saved outputs whose words are no longer those that a run prints.

    NOTEBOOK_OUTPUTS=/tmp/run .venv/bin/python -m pytest tests/test_notebooks.py
    python tools/stale.py /tmp/run [13 cpu 60_llm]

Numbers are left out of the comparison, for they differ between machines and between runs; so are
warnings, and outputs of other kinds than text. What is left is read by a person: a machine with
other instructions, or a short run, prints other words too. The exit status is 0 whatever is found.
"""

import argparse
import difflib
import re
from pathlib import Path
from typing import Any

from chapters import load, name_of, notebooks

NUMBER = re.compile(r"0x[0-9a-f]+|[-+−]?\d[\d,.]*(?:e[-+]?\d+)?")


def words(cell: dict[str, Any]) -> list[str]:
    "The lines of a cell's text, each number as #, without what pads columns."
    printed, shown = "", ""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if output.get("name") == "stdout":
            printed += "".join(output["text"])
        elif data and not {"image/png", "text/html"} & data.keys():
            shown += "".join(data.get("text/plain", "")) + "\n"
    lines = (NUMBER.sub("#", line) for line in (printed + "\n" + shown).splitlines())
    tidy = (" ".join(line.replace(" at #", "").split()) for line in lines)
    return [line for line in tidy if line and not line.startswith("<Figure")]


def compare(saved: Path, run: Path) -> list[tuple[int, list[str]]]:
    "The cells whose words differ, by their place, with the lines that went and came."
    before = {cell["id"]: cell for cell in load(saved)["cells"] if cell["cell_type"] == "code"}
    cells = [cell for cell in load(run)["cells"] if cell["cell_type"] == "code"]
    found = []
    for place, cell in enumerate(cells):
        if "eval: false" in "".join(cell["source"]) or cell["id"] not in before:
            continue
        pair = words(before[cell["id"]]), words(cell)
        if pair[0] != pair[1]:
            lines = difflib.unified_diff(*pair, n=0, lineterm="")
            found.append((place, [line for line in lines if line[:2] not in ("--", "++", "@@")]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the folder that NOTEBOOK_OUTPUTS named")
    parser.add_argument("names", nargs="*", help="how the notebooks' names begin (default: all)")
    parser.add_argument("--lines", type=int, default=6, help="lines shown of a cell")
    args = parser.parse_args()
    for path in notebooks():
        name = name_of(path)
        run = args.run / f"{name}.ipynb"
        if not run.exists() or not any(map(name.startswith, args.names or [""])):
            continue
        for place, lines in compare(path, run):
            print(f"{name}, code cell {place}")
            for line in lines[: args.lines]:
                print(f"    {line[:150]}")


if __name__ == "__main__":
    main()
