"""Write docs/engine-arguments.md: what teachvllm does with each of vLLM's engine arguments.

    python tools/engine_arguments.py            write the page
    python tools/engine_arguments.py --check    write nothing, and fail if the page would change

What becomes of an argument comes from `teachvllm.arg_utils`: the fields of `EngineArgs`, and
`NOT_YET`. Which arguments vLLM has, with its defaults, is in tests/vllm_engine_arguments.json, by
version: all fields of `EngineArgs` and `AsyncEngineArgs`.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from teachvllm.arg_utils import NOT_YET, EngineArgs

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "engine-arguments.md"

VLLM: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "tests" / "vllm_engine_arguments.json").read_text()
)
OLD = "0.8.5"
NEW = "0.33.0"

INTRO = """# Engine arguments

`LLM(model, **arguments)` and `EngineArgs(**arguments)` take vLLM's names. This page says what becomes of each of them. It covers
two whole lists: all {old} fields of `EngineArgs` and `AsyncEngineArgs` in vLLM 0.8.5, and all {new} in vLLM 0.33.0, as they
stand in the source of these releases: 0.8.5 is the one whose names this book takes, where old posts and V0's options are at home,
and 0.33.0 has the names that came since. Beside them it has {others}.

Of these {all} arguments, {served} are supported, {idle} are accepted and have nothing to do, and {refused} are refused unless
they ask for what is done anyway.

A refusal is a `NotSupportedYet` that names the argument. A name that is not on this page is an `UnknownArgument` that
suggests the nearest one. None, and an empty list or dict, ask for nothing and are always accepted.

The page is written by `python tools/engine_arguments.py` from `EngineArgs` and `NOT_YET`
([chapter 19](../nbs/19_arg_utils.ipynb)), and a test compares the two. vLLM's lists, with its defaults, are in
`tests/vllm_engine_arguments.json`.
"""


def code(value: Any) -> str:
    return f"`{value!r}`"


def version(name: str) -> str:
    "The versions of vLLM that have an argument."
    return ", ".join(version for version, names in VLLM.items() if name in names)


def accepted_values(name: str) -> tuple:
    "The values of an argument of `NOT_YET` that are accepted beside None."
    return NOT_YET[name][0]


def is_idle(name: str) -> bool:
    """Whether all values that an argument can have are accepted: it is a switch, and both of its
    positions are.
    """
    return {True, False} <= {v for v in accepted_values(name) if isinstance(v, bool)}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def page() -> str:
    "The text of docs/engine-arguments.md."
    served = {field.name: field for field in dataclasses.fields(EngineArgs)}
    idle = [name for name in sorted(NOT_YET) if is_idle(name)]
    refused = [name for name in sorted(NOT_YET) if name not in idle]
    others = [
        f"`{name}` ({version(name)})"
        for name in sorted({*served, *NOT_YET} - VLLM[OLD].keys() - VLLM[NEW].keys())
    ]
    counts = {
        "served": len(served),
        "idle": len(idle),
        "refused": len(refused),
        "all": len(served) + len(NOT_YET),
    }
    counts |= {"old": len(VLLM[OLD]), "new": len(VLLM[NEW]), "others": ", ".join(others)}
    supported = [
        [f"`{name}`", version(name), code(f.default), f.metadata["help"]]
        for name, f in sorted(served.items())
    ]
    parts = [
        INTRO.format(**counts),
        "## Supported\n",
        table(["argument", "vLLM", "default", "what it is"], supported),
        "\n## Accepted, with nothing to do\n",
        "Both positions of these switches are accepted.\n",
        table(
            ["argument", "vLLM", "why"],
            [[f"`{name}`", version(name), NOT_YET[name][1]] for name in idle],
        ),
        "\n## Refused\n",
        "The values in the third column are accepted, because they ask for what is done anyway.\n",
        table(
            ["argument", "vLLM", "accepted", "why not another value"],
            [
                [
                    f"`{n}`",
                    version(n),
                    ", ".join(map(code, accepted_values(n))) or "`None`",
                    NOT_YET[n][1],
                ]
                for n in refused
            ],
        ),
    ]
    return "\n".join(parts) + "\n"


def main() -> int:
    text = page()
    if sys.argv[1:] == ["--check"]:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(
            f"{PAGE.name} is up to date"
            if same
            else f"{PAGE.name} is not what tools/engine_arguments.py writes"
        )
        return not same
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
