"""The notebooks in the order of the book: the road, which is walked from its first number to its
last, then the side roads. And how long they take: the times at a chapter's head are sums of its
parts.

    python tools/chapters.py           write the times into the chapters' heads
    python tools/chapters.py --check   write nothing, and fail if one is another

It needs nothing but Python.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

NBS = Path(__file__).resolve().parents[1] / "nbs"
# each leaves the road at some chapter, and comes back to no other
SIDE_ROADS = (
    "models",
    "quantization",
    "lora",
    "structured_output",
    "speculative",
    "multimodal",
    "parallel",
    "cpu",
    "gpu",
    "package",
    "exercises",
)

WORDS_A_MINUTE = 200
LINES_A_MINUTE = 40  # of code: looked at, not learned
FOLDED = re.compile(r"<details>.*?</details>", re.S)
ADDRESS = re.compile(r"\]\([^)]*\)")
EXERCISE = re.compile(r"\*\*Exercise, \w+ \((\d+) min, \w+, (first|second) reading\)")
TIME = re.compile(r"(\*\*Time\*\*: )\d+ min to read[^.]*\.")


def chapters() -> list[Path]:
    "All chapters, without the first page and the worked answers."
    return sorted(NBS.glob("[0-9]*.ipynb")) + [
        path for folder in SIDE_ROADS for path in sorted((NBS / folder).glob("[0-9]*.ipynb"))
    ]


def notebooks() -> list[Path]:
    "The first page, and all chapters."
    return [NBS / "index.ipynb", *chapters()]


def solutions() -> list[Path]:
    "The worked answers: each has its chapter's name, in `nbs/solutions`."
    found = [NBS / "solutions" / path.relative_to(NBS) for path in chapters()]
    return [path for path in found if path.exists()]


def name_of(path: Path) -> str:
    "How a notebook is called: `14_scheduler`, `cpu/05_numba_attention`."
    for home in (NBS / "solutions", NBS):
        if path.is_relative_to(home):
            return path.relative_to(home).with_suffix("").as_posix()
    return path.stem


def number_of(path: Path) -> str:
    "Its number, as other chapters call it: `13`, `cpu/05`."
    folder, _, stem = name_of(path).rpartition("/")
    number = stem.partition("_")[0]
    return f"{folder}/{number}" if folder else number


def load(path: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def texts(path: Path, kind: str) -> list[str]:
    return ["".join(c["source"]) for c in load(path)["cells"] if c["cell_type"] == kind]


def reading_minutes(path: Path) -> int:
    "Its words and its lines of code, folded ones left out; in fives."
    prose = TIME.sub("", FOLDED.sub("", "\n".join(texts(path, "markdown"))))
    prose = ADDRESS.sub("]", prose)
    shown = [
        text for text in texts(path, "code") if "#| hide" not in text and "code-fold" not in text
    ]
    lines = [line for text in shown for line in text.split("\n") if line.strip()]
    minutes = len(prose.split()) / WORDS_A_MINUTE + len(lines) / LINES_A_MINUTE
    return max(5, 5 * round(minutes / 5))


def exercise_minutes(path: Path) -> tuple[int, int]:
    "What its exercises say: all of them, and those of the first reading."
    found = EXERCISE.findall("\n".join(texts(path, "markdown")))
    first = sum(int(minutes) for minutes, reading in found if reading == "first")
    return sum(int(minutes) for minutes, _ in found), first


def head_of(path: Path) -> str:
    "What the chapter's head says of its time."
    every, first = exercise_minutes(path)
    text = f"{reading_minutes(path)} min to read, {every} min for the exercises"
    return text + (f", {first} of them on a first reading." if 0 < first < every else ".")


def write_times(path: Path, check: bool) -> bool:
    "Put the times into the chapter's head; whether they were there."
    notebook = load(path)
    for cell in notebook["cells"]:
        old = "".join(cell["source"])
        new = TIME.sub(lambda found: found[1] + head_of(path), old)
        if cell["cell_type"] == "markdown" and new != old:
            cell["source"] = new.splitlines(keepends=True)
            if not check:
                text = json.dumps(notebook, ensure_ascii=False, indent=1, sort_keys=True)
                path.write_text(text + "\n", encoding="utf-8")
            return False
    return True


def main(check: bool) -> int:
    wrong = [path for path in chapters() if not write_times(path, check)]
    for path in wrong:
        print(f"{'differs' if check else 'wrote'}: {name_of(path)}: {head_of(path)}")
    return bool(wrong and check)


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
