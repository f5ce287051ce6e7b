"""Matrix descriptors that the assembler gets wrong, found in the disassembly of compiled kernels.

A warp-group matrix instruction of Hopper reads its operands through descriptors in uniform
registers: the lower word holds an address, the upper one the layout, a constant. Triton adds both
as one 64-bit constant to the address of a tile. The assembler that comes with Triton 3.6 (ptxas
12.8) makes mistakes in this sum where the constant is negative, that is, where the rows of a tile
are shorter than 128 bytes, so that the layout's code for its swizzle sets the highest bit: it takes
a register for the upper word that holds something else, an address or nothing at all, as in

    UIADD3 UR10, UP0, UR4, 0x40, URZ            where UR4 is not the tile's address
    UIADD3.X UR11, UR4, -0x7fffffe0, URZ, UP0   where UR4 should be zero

The instruction then reads the wrong shared memory: results are off by orders of magnitude, and some
launches end in an illegal memory access. Neither the PTX nor the TTGIR shows it; ptxas 12.9 and
13.0 make correct code of the same PTX.

Instructions are scanned in the order of addresses, in which the compiler lays blocks out. What only
a later block defines is taken for undefined, even if control reaches that block first.
"""

import re

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;", re.M)
_IS_CONDITIONAL = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+@")
_UNIFORM = re.compile(r"\bUR(\d+)\b")
_PREDICATE = re.compile(r"!?U?P(\d|T)$")


def unset_uniform_registers(sass: str) -> list[str]:
    """The instructions, as text, that read a uniform register which none before them wrote.

    Args:
        sass: disassembly of one kernel, as `cuobjdump -sass` prints it.
    """
    written: set[int] = set()
    found = []
    for instruction in _INSTRUCTION.findall(sass):
        reads, writes = _uses(instruction)
        if not reads <= written:
            found.append(instruction)
        written |= reads | writes
    return found


def _uses(instruction: str) -> tuple[set[int], set[int]]:
    """Numbers of the uniform registers that an instruction reads, and those that it writes."""
    name, _, rest = instruction.partition(" ")
    operands = [operand.strip() for operand in rest.split(",")]
    reads: set[int] = set()
    writes: set[int] = set()
    may_write = re.match(r"(U|S2UR|R2UR)", name) and not name.startswith(("UISETP", "UPLOP"))
    for i, operand in enumerate(operands):
        for number in map(int, _UNIFORM.findall(operand)):
            is_target = (
                may_write
                and not writes
                and re.fullmatch(r"UR\d+", operand)
                and all(_PREDICATE.match(before) for before in operands[:i])
            )
            target = writes if is_target else reads
            target.update(number + offset for offset in _span(name, i, operands))
    return reads, writes


def _span(name: str, position: int, operands: list[str]) -> range:
    """Which registers the operand at a position names, counted from the one that is written."""
    operand = operands[position]
    if "gdesc" in operand:
        # Four hold the descriptors of both operands; those of the first are not read if it is in
        # registers itself.
        first_in_registers = len(operands) > 2 and operands[1].startswith("R")
        return range(2, 4) if first_in_registers else range(4)
    if name.startswith("U") and "WIDE" in name:
        # A wide product: the factors are single, the sum that it is added to is not.
        return range(2 if position in (0, len(operands) - 1) else 1)
    is_pair = name.startswith("U") and ".64" in name
    return range(2 if is_pair or "desc[" in operand else 1)


_Value = frozenset[int] | str
"""What a uniform register holds: one of some constants, or `UNKNOWN`, or `ADDRESS`."""

UNKNOWN = "moved from a vector register, in which constants are kept as well"
ADDRESS = "not a constant"


def loose_descriptors(sass: str) -> list[str]:
    """The matrix instructions, as text, with a descriptor whose upper word is no constant.

    Args:
        sass: disassembly of one kernel, as `cuobjdump -sass` prints it.
    """
    values: dict[int, _Value] = {}
    found = []
    for match in _INSTRUCTION.finditer(sass):
        instruction = match[1]
        name, _, rest = instruction.partition(" ")
        operands = [operand.strip() for operand in rest.split(",")]
        descriptor = re.search(r"gdesc\[UR(\d+)\]", instruction)
        if descriptor:
            first = int(descriptor[1])
            uppers = (3,) if operands[1].startswith("R") else (1, 3)
            if any(values.get(first + upper, ADDRESS) == ADDRESS for upper in uppers):
                found.append(instruction)
            continue
        is_conditional = bool(_IS_CONDITIONAL.match(match[0]))
        for register, value in _results(name, operands, values).items():
            before = values.get(register)
            if is_conditional and isinstance(value, frozenset) and isinstance(before, frozenset):
                value |= before
            values[register] = value
    return found


def _results(name: str, operands: list[str], values: dict[int, _Value]) -> dict[int, _Value]:
    """What an instruction leaves in the uniform registers that it writes."""
    target = re.fullmatch(r"UR(\d+)", operands[0])
    if target is None or not re.match(r"(U|S2UR|R2UR)", name):
        return {}
    register = int(target[1])
    sources = [x for x in operands[1:] if not _PREDICATE.match(x)]
    if name == "R2UR":
        return {register: UNKNOWN}
    if name in ("UMOV", "UIADD3", "UIADD3.X"):
        carries = (0, 1) if name == "UIADD3.X" else (0,)
        return {register: _sum([_value(x, values) for x in sources], carries)}
    if name == "UIADD3.64":
        uppers = [_value(x, values, upper=True) for x in sources]
        return {register: ADDRESS, register + 1: _sum(uppers, (-1, 0, 1))}
    if name.startswith("ULOP3"):
        # Bits that are kept, or two registers that change places: no sum, where the fault is.
        terms = [_value(x, values) for x in sources[:3]]
        return {register: ADDRESS if ADDRESS in terms else UNKNOWN}
    is_wide = ".64" in name or "WIDE" in name
    return dict.fromkeys((register, register + 1) if is_wide else (register,), ADDRESS)


def _value(operand: str, values: dict[int, _Value], *, upper: bool = False) -> _Value:
    """What an operand holds; with `upper` the upper word of a pair."""
    sign = -1 if operand.startswith("-") else 1
    operand = operand.lstrip("-")
    if operand == "URZ":
        return frozenset({0})
    if operand.startswith("0x"):
        # Immediate numbers have 32 bits, which a pair takes as its lower word.
        return frozenset({0 if upper else sign * int(operand, 16)})
    register = re.fullmatch(r"UR(\d+)", operand)
    if register is None:
        return ADDRESS
    value = values.get(int(register[1]) + upper, ADDRESS)
    return frozenset(sign * x for x in value) if isinstance(value, frozenset) else value


def _sum(terms: list[_Value], carries: tuple[int, ...]) -> _Value:
    """Every sum that the terms can have."""
    if ADDRESS in terms:
        return ADDRESS
    sums = set(carries)
    for term in terms:
        if isinstance(term, str):
            return UNKNOWN
        sums = {(x + y) % 2**32 for x in sums for y in term}
    return frozenset(sums)
