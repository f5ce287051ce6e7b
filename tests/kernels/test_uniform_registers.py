"""The scans for uniform registers and matrix descriptors that the assembler gets wrong."""

from kernels.uniform_registers import loose_descriptors, unset_uniform_registers


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


PRODUCT = "HGMMA.64x32x16.F32.BF16 R24, R112, gdesc[UR12].tnspB, R24"


def descriptor(low: str, zero: str) -> tuple[str, ...]:
    """The second descriptor beside an operand in registers: a sum of two words with a carry."""
    return (
        "ULEA UR4, UR57, UR4, 0x18",
        "USHF.R.U32.HI UR5, URZ, 0x4, UR4",
        "UMOV UR7, URZ",
        f"UIADD3 UR14, UP0, {low}, 0x40, URZ",
        f"UIADD3.X UR15, {zero}, -0x7fffffe0, URZ, UP0, !UPT",
        PRODUCT,
    )


def test_a_layout_added_to_an_address_is_found() -> None:
    assert loose_descriptors(sass(*descriptor("UR4", "UR4"))) == [PRODUCT]


def test_a_layout_added_to_nothing_that_was_written_is_found() -> None:
    assert loose_descriptors(sass(*descriptor("UR5", "UR36"))) == [PRODUCT]


def test_a_layout_added_to_zero_is_fine() -> None:
    assert loose_descriptors(sass(*descriptor("UR5", "UR7"))) == []
    assert loose_descriptors(sass(*descriptor("UR5", "URZ"))) == []


def test_layouts_travel_through_pairs_moves_and_vector_registers() -> None:
    code = descriptor("UR5", "UR7")[:-1]
    step = ("UIADD3.64 UR18, UR14, 0x80, URZ", "UMOV UR11, UR19", "UIADD3.64 UR22, UR18, -UR8, URZ")
    last = "HGMMA.64x32x16.F32.BF16 R24, R112, gdesc[UR20].tnspB, R24, gsb0"
    assert loose_descriptors(sass(*code, *step, last)) == [last]
    assert loose_descriptors(sass(*code, "UMOV UR9, URZ", *step, last)) == []
    kept = ("R2UR UR15, R4", "R2UR UR14, R5", "ULOP3.LUT UR15, UR15, UR14, URZ, 0x3c, !UPT")
    assert loose_descriptors(sass(*kept, PRODUCT)) == []


def test_without_registers_both_descriptors_are_checked() -> None:
    product = "HGMMA.64x32x16.F32.BF16 R24, gdesc[UR12].tnspB, R24"
    code = descriptor("UR5", "UR7")[:-1]
    assert loose_descriptors(sass(*code, product)) == [product]
    assert loose_descriptors(sass(*code, "@!UP0 UMOV UR13, 0x40000040", product)) == []
