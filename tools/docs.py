"""Build the site into _docs/: with Quarto where it is on the PATH, else with smalldocs.

nbdev's own command would install Quarto with sudo, so this calls the functions behind it.
"""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from chapters import SIDE_ROADS
from fastcore import docments
from nbdev.config import get_config
from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs
from readme import README_ONLY

ROOT = Path(__file__).resolve().parents[1]
NUMBERED = re.compile(r"(?<![/\w.])((?:\.\./|[a-z_]+/)*)\d\d_(\w+\.ipynb)")
COLAB_BADGE = "![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)"
WEB_FONTS = re.compile(
    r"""@import\s*(?:url\()?(["']?)https?://fonts\.googleapis\.com[^"')]*\1\)?;?"""
)
# so many parts of a table's line, cut at each |, hold no names of vLLM's
OURS = {"02_startup": 3, "95_to_vllm": 2}
OUTPUT_FILE = re.compile(r'\n *"output-file: .*",')


def own_links(text: str, home: str, stem: str) -> str:
    """Links that nbdev made of names in backticks, to pages of this site; those that it could not
    know to be wrong are undone.
    """
    theirs = re.compile(r"\[(`[^`\]]+`)\]\(" + re.escape(home) + r"[^)]*\)")
    lines = []
    for line in text.split("\n"):
        if line.startswith("**Where this lives in vLLM.**"):  # names of vLLM's
            line = theirs.sub(r"\1", line)
        if line.startswith("|") and stem in OURS:
            cells = line.split("|")
            line = "|".join(
                cells[: OURS[stem]] + [theirs.sub(r"\1", cell) for cell in cells[OURS[stem] :]]
            )
        lines.append(line)
    elsewhere = (
        re.escape(home) + "(?!" + stem.partition("_")[2] + r"\.html)"
    )  # `merge`, say, is a word in many chapters
    text = re.sub(r"\[(`[a-z]+`)\]\(" + elsewhere + r"[^)]*\)", r"\1", "\n".join(lines))
    # what is private has no heading
    text = re.sub(re.escape(home) + r"(\w+\.html)#_\w*", home + r"\1", text)
    # nor has a method
    return re.sub(re.escape(home) + r"(\w+\.html#\w+)\.[\w.]+", home + r"\1", text)


def for_the_site(folder: Path) -> None:
    """Number the titles, leave out what is for README.md alone, and keep readers here: Colab's link
    needs no picture.
    """
    home = get_config().doc_host + get_config().doc_baseurl + "/"
    for path in folder.rglob("*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        number = path.stem.partition("_")[0]
        home_here = "../" * (len(path.relative_to(folder).parts) - 1)
        side_road = path.parent.name + "/" if path.parent.name in SIDE_ROADS else ""
        notebook["cells"] = [
            cell
            for cell in notebook["cells"]
            if not "".join(cell["source"]).startswith(README_ONLY)
        ]
        for cell in notebook["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "raw" and number[0].isdigit():
                text = re.sub(
                    r"^title: (['\"]?)", rf"title: \g<1>{side_road}{number} · ", text, flags=re.M
                )
            if cell["cell_type"] == "markdown":
                text = own_links(text.replace(COLAB_BADGE, "Open in Colab"), home, path.stem)
            text = text.replace("](" + home, "](" + home_here)
            cell["source"] = text.splitlines(keepends=True)
        path.write_text(json.dumps(notebook, ensure_ascii=False, indent=1), encoding="utf-8")


def drop_numbers(folder: Path) -> None:
    """Give the pages of processed notebooks the addresses that nbdev's links use: 14_scheduler
    becomes scheduler.
    """
    for path in [
        *folder.rglob("*.ipynb"),
        folder / "_quarto.yml",
    ]:
        text = OUTPUT_FILE.sub("", path.read_text(encoding="utf-8"))
        path.write_text(NUMBERED.sub(r"\1\2", text), encoding="utf-8")
        path.rename(path.with_name(NUMBERED.sub(r"\2", path.name)))


def need_no_other_host(site: Path) -> None:
    "Themes ask Google for fonts: the reader's own will do, at once and unseen."
    for path in site.rglob("*.css"):
        css = path.read_text(encoding="utf-8")
        if (own := WEB_FONTS.sub("", css)) != css:
            path.write_text(own, encoding="utf-8")


def show_arguments_of_kernels() -> None:
    "A Triton kernel is an object: tell the documentation what its function takes."
    try:
        from triton.runtime.interpreter import InterpretedFunction
        from triton.runtime.jit import JITFunction
    except ImportError:  # no Triton here, and no kernels
        return
    for kind in (JITFunction, InterpretedFunction):
        kind.__signature__ = property(lambda kernel: inspect.signature(kernel.fn))


def show_names_of_later_classes() -> None:
    "An annotation may name a class that a later cell defines: it is shown as it is written."
    evaluated = docments.signature

    def signature(symbol: Any, **options: Any) -> inspect.Signature:
        try:
            return evaluated(symbol, **options)
        except NameError:
            return inspect.signature(symbol)

    docments.signature = signature


def main() -> None:
    refresh_quarto_yml()
    show_arguments_of_kernels()
    show_names_of_later_classes()
    # a process of its own for each would import torch each time
    processed = proc_nbs(force=True, n_workers=0)
    for_the_site(processed)
    site = ROOT / "_docs"
    built = processed / "_docs"
    if quarto := shutil.which("quarto"):
        subprocess.run([quarto, "render", "--no-cache"], cwd=processed, check=True)
    else:
        drop_numbers(processed)  # Quarto does so itself: nbdev tells it by each page's output-file
        smalldocs = Path(sys.executable).with_name("smalldocs")
        if not smalldocs.exists():
            sys.exit("neither Quarto nor smalldocs is here; smalldocs needs Python 3.11 or newer")
        subprocess.run([smalldocs, "render", processed], check=True)
        subprocess.run([smalldocs, "check", processed], check=True)  # broken links
    need_no_other_host(built)
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(built, site)
    print(f"open {site.relative_to(ROOT)}/index.html", flush=True)


if __name__ == "__main__":
    main()
    # IPython has a shell for each notebook, and each would collect garbage at exit: that takes two
    # minutes
    os._exit(0)
