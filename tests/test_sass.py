"""What is read from a kernel's machine code: lines, loops, loads and spills; how many programs of it
a card holds; and that the GPU report's table is what kernels compile to.

Run as a program, without TRITON_INTERPRET, this file compiles and prints JSON.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

# Triton must know before it is imported
if __name__ != "__main__" and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")

from helpers import run_compiling  # noqa: E402

from teachvllm.gpu_kernels.sass import (  # noqa: E402
    CARDS,
    LATENCY,
    MachineCode,
    bytes_in_flight,
    engine_kernels,
    occupancy,
    parse_sass,
    predicted_share,
)

ROOT = Path(__file__).resolve().parents[1]
T4, A100, RTX, H100 = CARDS

# two loops, the second with a pipeline that is filled before it
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;               /* 0x00000a0000017a02 */
                                                                        /* 0x000fc40000000f00 */
        /*0010*/                   LDG.E R2, [R4.64] ;                  /* 0x0000000404027981 */
        /*0020*/              @!P0 BRA 0x10 ;                           /* 0xfffffff000008947 */
        /*0030*/                   STL [R1+0x8], R0 ;                   /* 0x0000080001007387 */
        /*0040*/              @P1  LDGSTS.E.BYPASS.128 [R3], [R8.64] ;  /* 0x0000000008037fae */
        /*0050*/                   LDGSTS.E.BYPASS.128 [R3+0x800], [R8.64] ;
        /*0060*/                   LDGSTS.E [R5], [R6.64] ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R3], [R8.64] ;
        /*0080*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0090*/                   LDL.LU R0, [R1+0x8] ;
        /*00a0*/               @P2 BRA 0x70 ;
        /*00b0*/                   LDG.E.U16 R9, [R2.64] ;
        /*00c0*/                   LDL R0, [R1+0x8] ;
        /*00d0*/                   HFMA2.MMA R9, -RZ, RZ, 0, 0 ;
        /*00e0*/                   LDGDEPBAR ;
        /*00f0*/                   EXIT ;
        /*0100*/                   BRA 0x100;
"""


def code_of(listing: str = "", **more: Any) -> MachineCode:
    known = {
        "name": "",
        "capability": 80,
        "num_warps": 4,
        "registers": 64,
        "spilled": 0,
        "shared": 0,
    }
    return MachineCode(**{**known, **more}, instructions=parse_sass(listing))


def test_a_listing_is_read() -> None:
    code = code_of(LISTING)
    assert len(code.instructions) == 17  # and no line of an encoding
    branch = code.instructions[2]
    assert (branch.address, branch.condition, branch.kind) == (0x20, "@!P0", "BRA")
    assert code.loops == ((0x10, 0x20), (0x70, 0xA0)), "the branch to itself is none"
    assert code.main_loop == (0x70, 0xA0) and code.load_width == 16
    assert code.tensor_core == "HMMA" and code.count("HMMA", "LDL") == 3
    assert code.spills_in_loops == 1
    assert [one.loaded_bytes for one in code.instructions if one.loaded_bytes] == [
        4,
        16,
        16,
        4,
        16,
        2,
    ]
    # what is asked for between the loops, by 128 threads
    assert bytes_in_flight(code) == 128 * 36


def test_without_a_loop_all_loads_count() -> None:
    code = code_of(
        "/*0000*/ LDG.E.64 R2, [R4.64] ;\n/*0010*/ LDG.E.U8 R2, [R4.64] ;\n/*0020*/ EXIT ;"
    )
    assert code.loops == () and code.main_loop is None and code.tensor_core == ""
    assert code.load_width == 8 and bytes_in_flight(code) == 128 * 9
    assert code_of("/*0000*/ EXIT ;").load_width == 0


@pytest.mark.parametrize(
    "card, more, programs, limit",
    [
        (A100, {"registers": 32}, 16, "registers and warps"),  # both end at 16
        (A100, {"registers": 33}, 12, "registers"),  # 5 units of 256 a warp, 12 warps a quarter
        (A100, {"registers": 255, "num_warps": 8}, 1, "registers"),
        (A100, {"registers": 16, "num_warps": 1}, 32, "programs"),
        (A100, {"registers": 16}, 16, "warps"),
        (A100, {"shared": 81 * 1024}, 2, "shared memory"),
        (A100, {"shared": 82 * 1024}, 1, "shared memory"),  # a KiB is reserved
        (T4, {"shared": 32 * 1024}, 2, "shared memory"),  # and none here
        (T4, {"registers": 16}, 8, "warps"),
        (RTX, {"registers": 16}, 12, "warps"),
        (H100, {"registers": 16, "num_warps": 1}, 32, "programs"),
    ],
)
def test_programs_of_a_multiprocessor(
    card: Any, more: dict[str, int], programs: int, limit: str
) -> None:
    code = code_of(**more)
    found = occupancy(code, card)
    assert (found.programs, found.limit) == (programs, limit)
    assert found.warps == programs * code.num_warps / card.max_warps <= 1


def test_littles_law() -> None:
    "A share grows with what a program asks for, until it is all that the card can give."
    load = "/*0000*/ LDG.E.128 R2, [R4.64] ;\n"
    code = code_of(load, registers=255)
    one = predicted_share(code, H100)
    assert one == pytest.approx(132 * 2 * 128 * 16 / (3350e9 * LATENCY)) and 0 < one < 0.5
    assert predicted_share(code_of(2 * load, registers=255), H100) == pytest.approx(2 * one)
    assert predicted_share(code_of(100 * load, registers=255), H100) == 1


def test_the_table_is_what_kernels_compile_to() -> None:
    "Two kernels of two cards, in a process whose Triton compiles, against docs/machine-code.json."
    kept = json.loads((ROOT / "docs" / "machine-code.json").read_text())
    if kept["triton"] != triton.__version__:
        pytest.skip(f"the table was made by Triton {kept['triton']}")
    found = [
        json.loads(line)
        for line in run_compiling(__file__, PYTHONPATH=str(ROOT)).stdout.splitlines()
    ]
    assert len(found) == 2
    assert all(row in kept["kernels"] for row in found), "python tools/gpu_report.py --machine-code"


def test_the_table_has_each_kernel_of_each_card() -> None:
    rows = json.loads((ROOT / "docs" / "machine-code.json").read_text())["kernels"]
    names = {card.name: {r["kernel"] for r in rows if r["card"] == card.name} for card in CARDS}
    assert all(len(found) == 9 for found in names.values())
    assert names["A100"] == names["RTX 4090"] == names["H100"]
    assert names["A100"] ^ names["T4"] == {"prefill", "prefill, soft cap"}


if __name__ == "__main__":
    from tools.gpu_report import machine_row

    for card, name in ((T4, "norm"), (H100, "decode")):
        for label, code in engine_kernels(card, name).items():
            print(json.dumps(machine_row(card, label, code)))
