"""Recordings: what the engine reports of its blocks survives JSON and msgpack, and the player tells
it in words.
"""

import json
from dataclasses import replace
from pathlib import Path

import msgspec

from teachvllm.block_player import block_events, block_player, swapped_tables
from teachvllm.trace import StepTrace, Trace


def step(number: int, tables: dict[str, list[int]], **fields) -> StepTrace:
    numbers = {
        "start": 0.0,
        "schedule_seconds": 0.1,
        "execute_seconds": 0.2,
        "process_seconds": 0.1,
        "num_free_blocks": 0,
    }
    lists = {
        name: fields.pop(name, [])
        for name in ("waiting", "running", "swapped", "preempted", "finished")
    }
    computed = {name: 4 * len(table) for name, table in tables.items()}
    return StepTrace(
        step=number,
        num_scheduled_tokens={},
        num_computed_tokens=computed,
        block_tables=tables,
        **numbers,
        **lists,
        **fields,
    )


def a_trace() -> Trace:
    """A request is forked, one of the two copies a shared block; both are swapped out and in;
    another takes what was cached.
    """
    steps = [
        step(
            0,
            {"a": [0, 1]},
            block_events=[("allocate", 0, "a"), ("allocate", 1, "a"), ("cache", 0, "a")],
        ),
        step(
            1,
            {"a": [0, 2], "a.1": [0, 1]},
            copied_blocks=[(1, 2)],
            block_events=[
                ("share", 0, "a.1"),
                ("share", 1, "a.1"),
                ("allocate", 2, "a"),
                ("free", 1, "a"),
                ("copy", 2, "a"),
            ],
        ),
        step(
            2,
            {},
            swapped=["a", "a.1"],
            preempted=["a", "a.1"],
            swapped_out_blocks=[(0, 5), (2, 6), (1, 7)],
            block_events=[
                ("free", 2, "a"),
                ("free", 0, "a"),
                ("free", 1, "a.1"),
                ("free", 0, "a.1"),
                ("swap_out", 0, "a.1"),
                ("swap_out", 2, "a.1"),
                ("swap_out", 1, "a.1"),
            ],
        ),
        step(
            3,
            {"a": [3, 4], "a.1": [3, 0]},
            swapped_in_blocks=[(5, 3), (6, 4), (7, 0)],
            finished=["a"],
            block_events=[
                ("allocate", 3, "a"),
                ("allocate", 4, "a"),
                ("evict", 0, ""),
                ("allocate", 0, "a.1"),
                ("share", 3, "a.1"),
                ("swap_in", 3, "a.1"),
                ("swap_in", 4, "a.1"),
                ("swap_in", 0, "a.1"),
            ],
            token_ids={"a": [1, 2, 3]},
        ),
        step(4, {"a.1": [3, 0]}, block_events=[("free", 4, "a"), ("free", 3, "a")]),
    ]
    return Trace(8, 4, 64, num_prompt_tokens={"a": 7, "a.1": 7}, steps=steps)


def test_a_recording_survives_json_and_msgpack(tmp_path: Path) -> None:
    trace = a_trace()
    assert Trace.load(trace.save(tmp_path / "trace.json")) == trace
    for step_trace in trace.steps:
        assert (
            msgspec.msgpack.Decoder(StepTrace).decode(msgspec.msgpack.encode(step_trace))
            == step_trace
        )


def with_an_image() -> Trace:
    "The same, as if two of its first tokens and one more were an image's."
    trace = a_trace()
    places = [("cat", [(1, 2), (5, 1)])]
    first = replace(trace.steps[0], num_scheduled_tokens={"a": 7}, mm_places={"a": places})
    steps = [replace(first, encoder_inputs=["cat"], freed_mm_hashes=["dog"]), *trace.steps[1:]]
    return replace(trace, mm_places={"a": places, "a.1": places}, steps=steps)


def test_a_recording_with_an_image_survives_too(tmp_path: Path) -> None:
    trace = with_an_image()
    assert Trace.load(trace.save(tmp_path / "trace.json")) == trace
    sent = msgspec.msgpack.encode(trace.steps[0])
    assert msgspec.msgpack.Decoder(StepTrace).decode(sent) == trace.steps[0]


def test_a_recording_from_before_there_were_images_is_read(tmp_path: Path) -> None:
    path = a_trace().save(tmp_path / "trace.json")
    data = json.loads(path.read_text())
    for part in (data, *data["steps"]):
        for name in ("mm_places", "encoder_inputs", "freed_mm_hashes"):
            part.pop(name, None)
    path.write_text(json.dumps(data))
    assert Trace.load(path) == a_trace()


def test_the_player_shows_images() -> None:
    page = block_player(with_an_image())
    # slots 1 and 2 of the first block, slot 1 of the second and of its copy: 13 units a slot
    for x, width in ((14.0, 26.0), (14.0, 13.0)):
        assert f"<rect x='{x}' y='15' width='{width}' height='34' class='image'/>" in page
    assert "<b>encode</b> image cat of a is encoded" in page and ">image</span>" in page
    assert "<b>forget</b> the embeddings of image dog" in page
    without = block_player(a_trace())
    assert "class='image'" not in without and "image</span>" not in without


def test_the_player_tells_what_the_core_reported() -> None:
    trace = a_trace()
    assert [str(event) for event in block_events(trace)] == [
        "step 0: allocate: a takes blocks 0–1",
        "step 0: cache: a has filled block 0: from now on other prompts can find it",
        "step 1: share: a.1 shares blocks 0–1 with a",
        "step 1: copy: a writes into block 1, which others hold too: it gets a copy, block 2",
        "step 2: swap_out: a is swapped out: blocks 0, 2, 1 go to the CPU's 5–7",
        "step 3: evict: what was cached in block 0 is lost",
        "step 3: swap_in: a is swapped in: the CPU's 5–7 come to blocks 3–4, 0",
        "step 4: free: a has finished and gives back blocks 4, 3; block 3 others still hold",
    ]
    assert (
        swapped_tables(trace)[2] == {"a": [5, 6], "a.1": [5, 7]} and swapped_tables(trace)[3] == {}
    )
    page = block_player(trace)
    assert (
        page.count("<section class='frame'") == 5 and "copy</b>" in page and "swap out</b>" in page
    )
