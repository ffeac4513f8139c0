"""Run notebooks as nbdev does, each in a process of its own, and save them with their outputs,
cleaned.

    python tools/notebooks.py                       all of nbs/
    python tools/notebooks.py 13 cpu 60_llm         only those whose names begin so
    python tools/notebooks.py --check               save nothing
    python tools/notebooks.py --flags "gpu slow"    also cells that begin with `#| gpu` or `#| slow`

Cells marked `#| eval: false`, or with one of the flags in settings.ini's tst_flags, do not run and
keep the outputs that they have. A notebook of which a cell raises is not saved.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from chapters import name_of, notebooks
from execnb.nbio import write_nb
from execnb.shell import CaptureShell
from nbdev.clean import clean_nb
from nbdev.config import get_config
from nbdev.process import NBProcessor

ROOT = Path(__file__).resolve().parents[1]


def run(path: Path, flags: list[str], save: bool) -> bool:
    "Run one notebook in this process; whether every cell did."
    config = get_config()
    skip_flags = set(config.tst_flags.split()) - set(flags)
    nb = NBProcessor(path, rm_directives=False).nb

    def skip(cell) -> bool:
        directives = cell.directives_ if cell.cell_type == "code" else {}
        if (
            cell.cell_type != "code"
            or directives.get("eval:") == ["false"]
            or skip_flags & directives.keys()
        ):
            return True
        cell.outputs = []
        return False

    os.chdir(path.parent)
    sys.path[0] = str(ROOT)  # was tools/
    shell = CaptureShell(path, mpl_format="png")  # not "retina", which doubles every figure
    try:
        shell.run_all(nb, exc_stop=True, preproc=skip)
    except BaseException:
        if shell.exc is None:
            raise
        print(shell.prettytb(path.name), file=sys.stderr)
        return False
    if save:
        clean_nb(
            nb,
            allowed_metadata_keys=config.allowed_metadata_keys.split(),
            allowed_cell_metadata_keys=config.allowed_cell_metadata_keys.split(),
        )
        write_nb(nb, path)
    return True


def run_in_child(path: Path, args: argparse.Namespace) -> bool:
    "Run one notebook in a new process, say how long it took, and return whether it worked."
    command = [
        sys.executable,
        __file__,
        "--child",
        name_of(path),
        "--flags",
        args.flags,
        *(["--check"] * args.check),
    ]
    start = time.perf_counter()
    why = ""
    print(f"{name_of(path):<32}", end="", flush=True)
    with tempfile.TemporaryDirectory() as ipython:
        # saved outputs hold no progress bars
        quiet = {"TQDM_DISABLE": "1", "TEACHVLLM_LOGGING_LEVEL": "WARNING"}
        env = {**os.environ, **quiet, "PYTHONHASHSEED": "0", "IPYTHONDIR": ipython}
        try:
            code = subprocess.run(
                command, env=env, stdin=subprocess.DEVNULL, timeout=args.timeout
            ).returncode
        except subprocess.TimeoutExpired:
            code = 1
            why = f"  FAILED: still running after {args.timeout:.0f} s"
    print(f"{time.perf_counter() - start:7.1f} s{why or '  FAILED' * bool(code)}", flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="which notebooks, by how their names begin (default: all)"
    )
    parser.add_argument("--check", action="store_true", help="save nothing")
    parser.add_argument(
        "--flags", default="", help="flags, with spaces between, whose cells run as well"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one notebook")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return not run(
            ROOT / "nbs" / f"{args.child}.ipynb", args.flags.split(), save=not args.check
        )
    paths = notebooks()
    for name in args.names:
        if not any(name_of(path).startswith(name) for path in paths):
            parser.error(f"no notebook in nbs/ begins with {name!r}")
    chosen = [
        p for p in paths if not args.names or any(name_of(p).startswith(n) for n in args.names)
    ]
    failed = [name_of(path) for path in chosen if not run_in_child(path, args)]
    print(
        f"{len(chosen) - len(failed)} of {len(chosen)} notebooks ran"
        + (": not " + ", ".join(failed)) * bool(failed)
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
