"""The notebooks in the order of the book: the road, which is walked from its first number to its
last, then the side roads. It needs nothing but Python.
"""

from pathlib import Path

NBS = Path(__file__).resolve().parents[1] / "nbs"
# each leaves the road at some chapter, and comes back to no other
SIDE_ROADS = ("models", "parallel", "cpu", "gpu", "package", "exercises")


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
    "How a notebook is called: `13_scheduler`, `cpu/05_numba_attention`."
    folder = NBS / "solutions"
    home = folder if path.is_relative_to(folder) else NBS
    return path.relative_to(home).with_suffix("").as_posix()


def number_of(path: Path) -> str:
    "Its number, as other chapters call it: `13`, `cpu/05`."
    folder, _, stem = name_of(path).rpartition("/")
    number = stem.partition("_")[0]
    return f"{folder}/{number}" if folder else number
