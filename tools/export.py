"""Export the notebooks into the package, as nbdev_export does, but every module anew.

    python tools/export.py            write what changed into teachvllm/
    python tools/export.py --check    write nothing, and fail if something would change

nbdev_export appends the cells of `#| export some.module` to that module each time it runs, so a notebook that exports a
family of modules would grow it without end. Here all modules start from an empty folder, and are then compared.
"""

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from nbdev.config import add_init, get_config
from nbdev.doclinks import _build_modidx
from nbdev.export import nb_export
from nbdev.maker import ModuleMaker

ROOT = Path(__file__).resolve().parents[1]


def new_module(dest: Path, name: str, nb_path: Path, is_new: bool, solo_nb: bool) -> ModuleMaker:
    "A maker that starts the module `name`, which no other notebook may have written already."
    maker = ModuleMaker(dest, name, nb_path, is_new=True, solo_nb=solo_nb)
    if maker.fname.exists():
        raise SystemExit(f"{nb_path.name} exports {name}, which an earlier notebook exports too")
    return maker


def export(root: Path) -> Path:
    "Export `root/nbs`, in a project with no package yet, and return the package's folder."
    os.chdir(root)  # nbdev looks for settings.ini from here upwards
    get_config.cache_clear()
    package = get_config().lib_path
    for nb in sorted(root.glob("nbs/*.ipynb")):
        nb_export(nb, lib_path=package, mod_maker=new_module)
    add_init(package)
    _build_modidx()
    return package


def modules(package: Path) -> dict[str, str]:
    "The text of every module of a package, by its path inside it."
    return {str(p.relative_to(package)): p.read_text(encoding="utf-8") for p in sorted(package.rglob("*.py"))}


def notebook(text: str) -> str:
    "The notebook that a module's text says it comes from."
    found = re.search(r"File to edit: \S*?(nbs/\S+\.ipynb)", text)
    return found[1] if found else "settings.ini and all notebooks"


def main(check: bool) -> int:
    package = ROOT / "teachvllm"
    with tempfile.TemporaryDirectory() as tmp:
        shutil.copy(ROOT / "settings.ini", tmp)
        shutil.copytree(ROOT / "nbs", Path(tmp) / "nbs", ignore=shutil.ignore_patterns(".*", "_*"))
        new, old = modules(export(Path(tmp).resolve())), modules(package)
        os.chdir(ROOT)
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
    return bool(orphans or (check and changed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if something would change")
    sys.exit(main(parser.parse_args().check))
