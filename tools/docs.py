"""Build the site into _docs/: with Quarto where it is on the PATH, else with smalldocs.

nbdev's own command would install Quarto with sudo, so this calls the functions behind it.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from nbdev.quarto import refresh_quarto_yml
from nbdev.serve import proc_nbs

ROOT = Path(__file__).resolve().parents[1]
NUMBERED = re.compile(r"(?<![/\w])(\.\./|solutions/)?\d\d[a-z]{0,2}_(\w+\.ipynb)")
OUTPUT_FILE = re.compile(r'\n *"output-file: .*",')


def drop_numbers(folder: Path) -> None:
    "Give the pages of processed notebooks the addresses that nbdev's links use: 12_scheduler becomes scheduler."
    for path in [*folder.glob("*.ipynb"), *folder.glob("solutions/*.ipynb"), folder / "_quarto.yml"]:
        text = OUTPUT_FILE.sub("", path.read_text(encoding="utf-8"))
        path.write_text(NUMBERED.sub(r"\1\2", text), encoding="utf-8")
        path.rename(path.with_name(NUMBERED.sub(r"\2", path.name)))


def main() -> None:
    refresh_quarto_yml()
    processed = proc_nbs(force=True)
    site, built = ROOT / "_docs", processed / "_docs"
    if quarto := shutil.which("quarto"):
        subprocess.run([quarto, "render", "--no-cache"], cwd=processed, check=True)
    else:
        drop_numbers(processed)  # Quarto does so itself: nbdev tells it by each page's output-file
        smalldocs = Path(sys.executable).with_name("smalldocs")
        if not smalldocs.exists():
            sys.exit("neither Quarto nor smalldocs is here; smalldocs needs Python 3.11 or newer")
        subprocess.run([smalldocs, "render", processed], check=True)
        subprocess.run([smalldocs, "check", processed], check=True)  # broken links
    shutil.rmtree(site, ignore_errors=True)
    shutil.move(built, site)
    print(f"open {site.relative_to(ROOT)}/index.html")


if __name__ == "__main__":  # proc_nbs starts processes that import this file
    main()
