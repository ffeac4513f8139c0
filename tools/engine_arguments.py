"""Write docs/engine-arguments.md: what teachvllm does with each of vLLM's engine arguments.

    python tools/engine_arguments.py            write the page
    python tools/engine_arguments.py --check    write nothing, and fail if the page would change

All of it comes from `teachvllm.arg_utils`: the fields of `EngineArgs`, and `NOT_YET`.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from teachvllm.arg_utils import NOT_YET, EngineArgs

PAGE = Path(__file__).resolve().parents[1] / "docs" / "engine-arguments.md"

# Arguments that vLLM 0.8.5 does not have: later ones, as far as programs use them, and two older ones
LATER = {"async_scheduling", "attention_backend", "convert", "kv_cache_memory_bytes", "logprobs_mode", "runner"}
LATER |= {"cudagraph_capture_sizes", "max_cudagraph_capture_size", "optimization_level", "scheduler_reserve_full_isl"}
LATER |= {"spec_method", "spec_model", "spec_tokens", "structured_outputs_config", "watermark"}
OLDER = {"num_speculative_tokens", "speculative_model"}

INTRO = """# Engine arguments

`LLM(model, **arguments)` and `EngineArgs(**arguments)` take vLLM's names. This page says what becomes of each argument of
vLLM 0.8.5, and of others that programs use: {served} are supported, {idle} are accepted and have nothing to do,
{refused} are refused unless they ask for what is done anyway{unknown}.

A refusal is a `NotSupportedYet` that names the argument. A name that is not on this page is an `UnknownArgument` that
suggests the nearest one. None, and an empty list or dict, ask for nothing and are always accepted.

The page is written by `python tools/engine_arguments.py` from the tables of `teachvllm/arg_utils.py`
([chapter 01b](../nbs/01b_arg_utils.ipynb)), and a test compares the two.
"""


def code(value: Any) -> str:
    return f"`{value!r}`"


def version(name: str) -> str:
    return "0.33" if name in LATER else "0.6.6" if name in OLDER else "0.8.5"


def accepted_values(name: str) -> tuple:
    "The values of an argument of `NOT_YET` that are accepted beside None."
    values = NOT_YET[name][0]
    return tuple(v for v in (values if isinstance(values, tuple) else (values,)) if v is not None)


def is_idle(name: str) -> bool:
    "Whether all values that an argument can have are accepted: it is a switch, and both of its positions are."
    return {True, False} <= {v for v in accepted_values(name) if isinstance(v, bool)}


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def page() -> str:
    "The text of docs/engine-arguments.md."
    served = {field.name: field for field in dataclasses.fields(EngineArgs)}
    idle = [name for name in sorted(NOT_YET) if is_idle(name)]
    refused = [name for name in sorted(NOT_YET) if name not in idle]
    unknown = sorted(LATER - served.keys() - NOT_YET.keys())
    counts = {"served": len(served), "idle": len(idle), "refused": len(refused)}
    counts["unknown"] = f", and {len(unknown)} of the later ones are not known yet" if unknown else ""
    supported = [
        [f"`{name}`", version(name), code(f.default), f.metadata["help"]] for name, f in sorted(served.items())
    ]
    parts = [
        INTRO.format(**counts),
        "## Supported\n",
        table(["argument", "vLLM", "default", "what it is"], supported),
        "\n## Accepted, with nothing to do\n",
        "Both positions of these switches are accepted.\n",
        table(["argument", "vLLM", "why"], [[f"`{name}`", version(name), NOT_YET[name][1]] for name in idle]),
        "\n## Refused\n",
        "The values in the third column are accepted, because they ask for what is done anyway.\n",
        table(
            ["argument", "vLLM", "accepted", "why not another value"],
            [
                [f"`{n}`", version(n), ", ".join(map(code, accepted_values(n))) or "`None`", NOT_YET[n][1]]
                for n in refused
            ],
        ),
    ]
    if unknown:
        parts += ["\n## Not known yet\n", "Later arguments of vLLM's that raise `UnknownArgument` so far:\n"]
        parts += [", ".join(f"`{name}`" for name in unknown) + "."]
    return "\n".join(parts) + "\n"


def main() -> int:
    text = page()
    if sys.argv[1:] == ["--check"]:
        same = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is up to date" if same else f"{PAGE.name} is not what tools/engine_arguments.py writes")
        return not same
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
