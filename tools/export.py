"""Export the notebooks into the package, with nbdev.

    python tools/export.py            write what changed into teachvllm/
    python tools/export.py --check    write nothing, and fail if something would change

`nbdev_export` itself would do to write. This also notices modules that no notebook exports any
more, and can check without writing: it exports into a temporary copy, and compares. Beside the
modules, the package has a few files that are no code, which modules read by
`files("teachvllm").joinpath("name")`. They are nobody's export: here they must only be there, and
be read.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def modules(package: Path) -> dict[str, str]:
    "The text of every module of a package, by its path inside it."
    return {
        str(p.relative_to(package)): p.read_text(encoding="utf-8")
        for p in sorted(package.rglob("*.py"))
    }


def exported() -> dict[str, str]:
    "The modules that the notebooks export, starting from no package at all."
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp).resolve() / ROOT.name
        copy.mkdir()
        shutil.copy(ROOT / "settings.ini", copy)
        shutil.copytree(ROOT / "nbs", copy / "nbs", ignore=shutil.ignore_patterns(".*", "_*"))
        subprocess.run([Path(sys.executable).with_name("nbdev_export")], cwd=copy, check=True)
        return modules(copy / "teachvllm")


def notebook(text: str) -> str:
    "The notebook that a module's text says it comes from."
    found = re.search(r"File to edit: \S*?(nbs/\S+\.ipynb)", text)
    return found[1] if found else "settings.ini and all notebooks"


def is_data(path: Path) -> bool:
    return path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts


def data_files(modules: dict[str, str]) -> set[str]:
    "The files that the modules read from the package, by their path inside it."
    reads = re.compile(r"""files\(\s*"teachvllm\.?([\w.]*)"\s*\)\.joinpath\(\s*"([^"]+)\"""")
    found = [match.groups() for text in modules.values() for match in reads.finditer(text)]
    return {str(Path(*folder.split("."), name)) for folder, name in found}


def main(check: bool) -> int:
    package = ROOT / "teachvllm"
    new = exported()
    old = modules(package)
    changed = [name for name in new if new[name] != old.get(name)]
    orphans = [name for name in old if name not in new]
    for name in changed:
        print(f"{'differs' if check else 'wrote'}: teachvllm/{name} (from {notebook(new[name])})")
        if not check:
            (package / name).parent.mkdir(parents=True, exist_ok=True)
            (package / name).write_text(new[name], encoding="utf-8")
    for name in orphans:
        print(f"no notebook exports teachvllm/{name} any more: delete it")
    if check and changed:
        print("the package is not what the notebooks export: run `make export`")
    read = data_files(new)
    there = {str(p.relative_to(package)) for p in package.rglob("*") if is_data(p)}
    for name in sorted(read - there):
        print(f"a module reads teachvllm/{name}: it is not there, and no notebook exports it")
    for name in sorted(there - read):
        print(f"no module reads teachvllm/{name}: delete it")
    return bool(orphans or (check and changed) or read != there)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, and fail if something would change"
    )
    sys.exit(main(parser.parse_args().check))
