"""The scan for uniform registers that are read before they were written."""

from kernels.uniform_registers import unset_uniform_registers


def sass(*instructions: str) -> str:
    lines = [
        f"        /*{16 * i:04x}*/   {text} ;   /* 0x0 */" for i, text in enumerate(instructions)
    ]
    return "\n".join(lines)


def test_a_descriptor_whose_base_was_dropped_is_found() -> None:
    lost = "UIADD3 UR58, UP3, UR58, 0x40, URZ"
    code = sass("S2UR UR4, SR_CgaCtaId", lost, "UMOV UR38, UR58")
    assert unset_uniform_registers(code) == [lost]


def test_what_is_written_first_is_fine() -> None:
    code = sass(
        "ULDC.64 UR6, c[0x0][0x208]",
        "@!UP0 UMOV UR8, 0x400",
        "LDG.E.128 R24, desc[UR6][R28.64]",
        "UIADD3 UR9, UP1, UR8, 0x2, URZ",
        "R2UR UR10, R3",
        "UMOV UR11, UR9",
        "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8].tnspB, R24, gsb0",
    )
    assert unset_uniform_registers(code) == []


def test_beside_an_operand_in_registers_the_second_descriptor_is_read() -> None:
    product = "HGMMA.64x32x16.F32.BF16 R40, R24, gdesc[UR4].tnspB, R40"
    assert unset_uniform_registers(sass("UMOV UR6, 0x1", "UMOV UR7, 0x2", product)) == []
    assert unset_uniform_registers(sass("UMOV UR4, 0x1", "UMOV UR5, 0x2", product)) == [product]


def test_the_factors_of_a_wide_product_are_single() -> None:
    product = "UIMAD.WIDE.U32 UR6, UR14, UR16, URZ"
    assert unset_uniform_registers(sass("UMOV UR14, 0x1", "UMOV UR16, 0x2", product)) == []
    assert unset_uniform_registers(sass("UMOV UR14, 0x1", product)) == [product]


def test_both_halves_of_a_pair_are_needed() -> None:
    pair = "UIADD3.64 UR12, UR36, 0x4, URZ"
    assert unset_uniform_registers(sass("UMOV UR36, 0x1", pair)) == [pair]
