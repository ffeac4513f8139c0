"""Write README.md, and its pictures in docs/readme/, from nbs/index.ipynb and its saved outputs.
Nothing runs.

`python tools/readme.py --check` writes nothing, and fails if something would change.
"""

import argparse
import base64
import os
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
# how such a cell begins; of code: `#| readme: false` or `true`
SITE_ONLY = "<!-- site -->\n"
README_ONLY = "<!-- readme -->\n"
PICTURES = "docs/readme"  # belongs to this script alone: what it does not write there, it removes


def from_root(text: str) -> str:
    "Links and pictures that are right in nbs/, made right for the repository's root."

    def link(found: re.Match) -> str:
        target, mark, anchor = found[2].partition("#")
        if not (ROOT / "nbs" / target).exists():
            return found[0]
        return found[1] + Path(os.path.normpath(Path("nbs") / target)).as_posix() + mark + anchor

    return re.sub(r'(\]\(|src="|href=")([^)"\s#:]+(?:#[^)"\s]*)?)', link, text)


def directives(source: str) -> tuple[dict[str, str], str]:
    "A cell's `#|` lines, as names and values, and the rest of it."
    mark = re.compile(r"^#\s*\|\s*([\w-]+):?[ \t]*(.*)\n?", re.MULTILINE)
    return dict(mark.findall(source)), mark.sub("", source).strip("\n")


def show(output: nbformat.NotebookNode, alt: str, pictures: dict[str, bytes]) -> str:
    "One output as Markdown; a picture goes into `pictures`."
    data = output.get("data", {})
    if "image/png" in data:
        name = f"{PICTURES}/figure-{len(pictures) + 1}.png"
        pictures[name] = base64.b64decode(data["image/png"])
        width = output.metadata.get("image/png", {}).get("width")
        return f'<img src="{name}" alt="{alt}"' + (f' width="{width}"' if width else "") + ">"
    if "text/markdown" in data:
        return from_root(data["text/markdown"])
    text = data.get("text/plain") if output.output_type != "stream" else output.text
    return f"```text\n{text.rstrip()}\n```" if text and text.strip() else ""


def build() -> dict[str, bytes]:
    "README.md and its pictures, by their paths."
    parts = []
    pictures = {}
    for cell in nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4).cells:
        if cell.cell_type == "markdown" and not cell.source.startswith(SITE_ONLY):
            parts.append(from_root(cell.source.removeprefix(README_ONLY)))
        if cell.cell_type != "code":
            continue
        marks, code = directives(cell.source)
        shown = marks.get("readme", marks.get("include", "true")) == "true"
        if "hide" in marks or not shown:
            continue
        if code and marks.get("echo", marks.get("include")) != "false":
            parts.append(f"```python\n{code}\n```")
        if marks.get("output") != "false":
            alt = marks.get("fig-alt", "figure").strip("\"'")
            parts += filter(None, (show(output, alt, pictures) for output in cell.outputs))
    note = "<!-- Written by `make readme` from nbs/index.ipynb: edit that. -->"
    return {"README.md": "\n\n".join([*parts, note, ""]).rstrip("\n").encode() + b"\n", **pictures}


def main(check: bool) -> int:
    new = build()
    there = [ROOT / "README.md", *(ROOT / PICTURES).glob("*")]
    old = {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in there if path.exists()}
    changed = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    for name in changed:
        print(
            f"{'differs from nbs/index.ipynb' if check else 'wrote' if name in new else 'removed'}: "
            f"{name}"
        )
        if check:
            continue
        if name not in new:
            (ROOT / name).unlink()
            continue
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_bytes(new[name])
    if check and changed:
        print("run `make readme`")
    return bool(check and changed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and fail if something would change"
    )
    sys.exit(main(parser.parse_args().check))
