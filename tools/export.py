"""Export the notebooks into the package, with nbdev.

    python tools/export.py            write what changed into teachvllm/
    python tools/export.py --check    write nothing, and fail if something would change

`nbdev_export` itself would do to write. This also notices files that no notebook exports, or none
any more, and can check without writing: it exports into a temporary copy, and compares. The package
is modules and nothing else: what is data, or a web page, is in a cell as well.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def contents(package: Path) -> dict[str, bytes]:
    "Every file of a package, by its path inside it; but what Python caches."
    files = [
        path
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    ]
    return {p.relative_to(package).as_posix(): p.read_bytes() for p in files}


def exported() -> dict[str, bytes]:
    "The files that the notebooks export, starting from no package at all."
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp).resolve() / ROOT.name
        copy.mkdir()
        shutil.copy(ROOT / "settings.ini", copy)
        shutil.copytree(ROOT / "nbs", copy / "nbs", ignore=shutil.ignore_patterns(".*", "_*"))
        subprocess.run([Path(sys.executable).with_name("nbdev_export")], cwd=copy, check=True)
        return contents(copy / "teachvllm")


def notebook(text: str) -> str:
    "The notebook that a module's text says it comes from."
    found = re.search(r"File to edit: \S*?(nbs/\S+\.ipynb)", text)
    return found[1] if found else "settings.ini and all notebooks"


def main(check: bool) -> int:
    package = ROOT / "teachvllm"
    new = exported()
    old = contents(package)
    changed = [name for name in new if new[name] != old.get(name)]
    orphans = [name for name in old if name not in new]
    for name in changed:
        source = notebook(new[name].decode())
        print(f"{'differs' if check else 'wrote'}: teachvllm/{name} (from {source})")
        if not check:
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_bytes(new[name])
    for name in orphans:
        print(f"no notebook exports teachvllm/{name} (any more): delete it")
    if check and changed:
        print("the package is not what the notebooks export: run `make export`")
    return bool(orphans or (check and changed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and fail if something would change"
    )
    sys.exit(main(parser.parse_args().check))
