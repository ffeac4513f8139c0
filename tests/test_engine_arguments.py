"""docs/engine-arguments.md is what the code says, and the code does what the page says."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from teachvllm.arg_utils import NOT_YET, EngineArgs
from teachvllm.config import NotSupportedYet

FIELDS = {field.name for field in dataclasses.fields(EngineArgs)}
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "engine_arguments", ROOT / "tools" / "engine_arguments.py"
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sections(tool: ModuleType) -> dict[str, list[list[str]]]:
    "The rows of the committed page's tables, by heading."
    parts = re.split(r"^## (.+)$", tool.PAGE.read_text(encoding="utf-8"), flags=re.M)[1:]
    rows = [
        [re.split(r" (?<!\\)\| ", line[2:-2]) for line in body.splitlines() if line[:3] == "| `"]
        for body in parts[1::2]
    ]
    return dict(zip(parts[::2], rows, strict=True))


def test_the_page_is_what_the_tool_writes(tool: ModuleType) -> None:
    assert tool.PAGE.read_text(encoding="utf-8") == tool.page(), (
        "run: python tools/engine_arguments.py"
    )


def test_each_argument_of_vllm_is_on_the_page_once(tool: ModuleType, sections: dict) -> None:
    listed = [row[0].strip("`") for rows in sections.values() for row in rows]
    assert len(listed) == len(set(listed))
    assert (
        set(listed)
        == {*FIELDS, *NOT_YET}
        == {name for names in tool.VLLM.values() for name in names}
    )
    assert {version: len(names) for version, names in tool.VLLM.items()} == {
        "0.6.6": 2,
        "0.8.5": 105,
        "0.33.0": 260,
        "0.33.0, vllm serve": 1,
    }
    for row in (row for rows in sections.values() for row in rows):
        assert {v for v, names in tool.VLLM.items() if row[0].strip("`") in names} == set(
            re.findall(r"0\.\d.*?(?=, 0|$)", row[1])
        )


def test_the_code_does_what_the_page_says(tool: ModuleType, sections: dict) -> None:
    for name, _, default, _ in sections["Supported"]:
        assert repr(getattr(EngineArgs(), name.strip("`"))) == default.strip("`")
    for name, *_ in sections["Accepted, with nothing to do"]:
        for value in (True, False, None):
            EngineArgs(**{name.strip("`"): value})
    for name, _, accepted, reason in sections["Refused"]:
        for value in [None, *tool.accepted_values(name.strip("`"))]:
            assert value is None or repr(value) in accepted
            EngineArgs(**{name.strip("`"): value})
        with pytest.raises(NotSupportedYet) as caught:
            EngineArgs(**{name.strip("`"): "something else"})
        assert name in f"`{caught.value}`".replace("=", "`") and reason in str(caught.value)
