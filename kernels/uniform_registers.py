"""Uniform registers that compiled code reads before anything was written to them.

The assembler that comes with Triton 3.6 (ptxas 12.8) sometimes moves part of the arithmetic of a
matrix instruction's shared-memory descriptor to the top of a kernel and drops the instruction that
gave it its input. What is left, such as `UIADD3 UR58, UP3, UR58, 0x40, URZ` with no earlier write
of UR58, makes the instruction read the wrong shared memory: results are wrong by orders of
magnitude for some tiles, and some launches end in an illegal memory access. It was met in kernels
with 16- and 32-wide operand tiles and several loops. Neither the PTX nor the TTGIR shows it.

Addresses are scanned upwards, so that a register which only a later block defines is reported too,
even if control reaches that block first. The compiler lays blocks out in the order of control.
"""

import re

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;", re.M)
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
