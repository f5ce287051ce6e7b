"""Compiles every Triton kernel for Hopper on a machine without a GPU, and reads faults out of it.

The calls of a table run the real launch code on CPU tensors while launches are recorded instead of
carried out; each distinct one is compiled for sm_90 with the assembler that comes with Triton. So
tiles, warps, dtypes and flags are the ones that a GPU would see, and cannot drift from a copy.

What is refused:

- a dot result that is transposed and becomes a dot operand: Triton 3.4 to 3.7.0 stores such a tile
  wrongly on Hopper for some widths (flash-linear-attention issue 640). Its trace in the TTGIR is a
  `local_alloc` whose source has a `#linear` layout with consecutive registers down a column, which
  is what transposing makes of an accumulator; a reshaped tile has them along a row and is fine;
- more shared memory than a block may have, or more spilled bytes than the kernel's budget;
- a matrix descriptor with an upper word that is no constant, or a uniform register that is read
  before it was written (`kernels.uniform_registers`): faults of ptxas 12.8, which comes with Triton
  3.6;
- a kernel of 16-bit products without warp-group matrix instructions, with the slow ones, or with
  each of them waiting for the one before: what a product adds to must not be read between its start
  and its end;
- whatever does not compile: types, missing constants, operations that only the compiler checks.

Usage: `python -m kernels.compile_check [--quick] [--only TEXT]`, without `TRITON_INTERPRET`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Said aloud, since Triton announces another default; the compiled code must not change with it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels.compile_cases import CASES
from kernels.uniform_registers import loose_descriptors, unset_uniform_registers

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_BYTES_LIMIT = 232_448
"""Shared memory that one block may have on sm_90."""

POINTER_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch, by what its compilation depends on.

    Attributes:
        kernel: the jitted function.
        types: signature of the run-time arguments, as (name, type).
        constants: compile-time constants, as (name, value); absent tensors are among them.
        warps: warps of a program.
        stages: pipeline stages outside of loops that name their own.
        registers: most registers of a thread; None for what the compiler takes.
    """

    kernel: JITFunction
    types: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    registers: int | None

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return str(self.kernel.__name__)

    @property
    def has_16_bit_products(self) -> bool:
        """Whether its operands are of 16 bit, so that warp-group instructions are expected."""
        return any(kind in ("*bf16", "*fp16") for _, kind in self.types)


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiled code of one launch shows.

    Attributes:
        hazards: transposed dot results that became operands.
        registers: registers of a thread.
        stack_bytes: bytes of a thread in local memory: what did not fit into registers.
        shared_bytes: shared memory of a block.
        wgmma: warp-group matrix instructions.
        mma_sync: matrix instructions of single warps, about three times slower on Hopper.
        seconds: wall time of the compilation.
        unset_registers: instructions that read a uniform register nobody wrote.
        loose_descriptors: matrix instructions whose descriptors are not right.
        wgmma_starts: how often the warps make ready for matrix instructions, once for all of a
            product; the assembler does so before every one where it cannot leave them in flight.
    """

    hazards: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    wgmma: int
    mma_sync: int
    seconds: float
    unset_registers: int = 0
    loose_descriptors: int = 0
    wgmma_starts: int = 0

    def faults(
        self, launch: Launch, stack_budget: int, *, is_transpose_proven: bool = False
    ) -> list[str]:
        """Every reason to refuse the kernel, in words."""
        found = []
        if self.hazards and not is_transpose_proven:
            found.append("a transposed dot result is a dot operand")
        if self.unset_registers:
            found.append(
                f"{self.unset_registers} reads of uniform registers that were never written"
            )
        if self.loose_descriptors:
            found.append(f"{self.loose_descriptors} matrix descriptors without a constant layout")
        if self.shared_bytes > SHARED_BYTES_LIMIT:
            found.append(f"{self.shared_bytes} bytes of shared memory exceed {SHARED_BYTES_LIMIT}")
        if self.stack_bytes > stack_budget:
            found.append(f"{self.stack_bytes} bytes spilled exceed {stack_budget}")
        if launch.has_16_bit_products and self.mma_sync:
            found.append(f"{self.mma_sync} slow matrix instructions beside {self.wgmma} fast ones")
        if launch.has_16_bit_products and 0 < self.wgmma <= self.wgmma_starts:
            found.append("every matrix instruction waits for the one before")
        return found


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Records launches of Triton kernels instead of carrying them out; outputs stay unwritten."""
    launches: list[Launch] = []
    original = JITFunction.run

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(_launch(self, args, kwargs))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def _launch(kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    constant_names = {p.name for p in kernel.params if p.is_constexpr}
    types, constants = [], []
    for name in kernel.arg_names:
        value = values[name]
        if name in constant_names or value is None:
            constants.append((name, value))
        elif isinstance(value, torch.Tensor):
            types.append((name, POINTER_TYPES[value.dtype]))
        else:
            types.append((name, "fp32" if isinstance(value, float) else "i32"))
    warps, stages = values.get("num_warps", 4), values.get("num_stages", 3)
    registers = values.get("maxnreg")
    return Launch(kernel, tuple(types), tuple(constants), warps, stages, registers)


def compile_launch(launch: Launch) -> Report:
    """Compiles the launch for sm_90 and reads the result."""
    types, constants = dict(launch.types), dict(launch.constants)
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(launch.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants[name]
        else:
            signature[name] = types[name]
            if types[name].startswith("*"):
                # What PyTorch's allocator gives, and what a real launch would see.
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=launch.kernel, signature=signature, constexprs=constexprs, attrs=attributes
    )
    options = {
        "num_warps": launch.warps,
        "num_stages": launch.stages,
        "maxnreg": launch.registers,
    }
    start = time.perf_counter()
    compiled = triton.compile(source, target=HOPPER, options=options)
    return _read(compiled, time.perf_counter() - start)


def _read(compiled: Any, seconds: float) -> Report:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])

        def dump(option: str) -> str:
            command = [str(tool), option, str(binary)]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout

        usage, sass = dump("-res-usage"), dump("-sass")
    return Report(
        hazards=transposed_stores(compiled.asm["ttgir"]),
        registers=int(_found(r"REG:(\d+)", usage)),
        stack_bytes=int(_found(r"STACK:(\d+)", usage)),
        shared_bytes=int(compiled.metadata.shared),
        wgmma=sass.count("HGMMA"),
        mma_sync=len(re.findall(r"\bHMMA\b", sass)),
        seconds=seconds,
        unset_registers=len(unset_uniform_registers(sass)),
        loose_descriptors=len(loose_descriptors(sass)),
        wgmma_starts=sass.count("WARPGROUP.ARRIVE"),
    )


def transposed_stores(ttgir: str) -> int:
    """How often a transposed accumulator is stored to shared memory, as a dot operand is."""
    # The first basis of `register` is the step from one register of a thread to the next.
    layouts = re.findall(
        r"^(#linear\d*) = #ttg\.linear<\{register = \[\[(\d+), (\d+)\]", ttgir, re.M
    )
    columns = [name for name, row_step, _ in layouts if int(row_step) > 0]
    allocations = re.findall(r"local_alloc [^:]*: \(tensor<[^,]*, (#linear\d*)>\)", ttgir)
    return sum(name in columns for name in allocations)


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise RuntimeError(f"cuobjdump printed nothing that matches {pattern!r}")
    return match[1]


def check(only: str = "", *, quick: bool = False) -> int:
    """Compiles what the table's calls launch and writes one line for each; the number of faults.

    Args:
        only: take the calls whose name contains this text.
        quick: compile each kernel once, as it is launched first.
    """
    seen: set[object] = set()
    num_faults = 0
    for case in CASES:
        if only not in case.name:
            continue
        with recorded_launches() as launches:
            case.call()
        for launch in launches:
            key: object = launch.name if quick else launch
            if key in seen:
                continue
            seen.add(key)
            report = compile_launch(launch)
            faults = report.faults(
                launch,
                case.stack_bytes.get(launch.name, 0),
                is_transpose_proven=launch.name in case.proven_transposes,
            )
            num_faults += len(faults)
            sys.stdout.write(
                f"{case.name:44s} {launch.name:36s}"
                f" warps {launch.warps} registers {report.registers:3d}"
                f" stack {report.stack_bytes:4d} shared {report.shared_bytes:6d}"
                f" wgmma {report.wgmma:3d} mma.sync {report.mma_sync:3d}"
                f" {report.seconds:4.1f} s  {'; '.join(faults) or 'ok'}\n"
            )
            sys.stdout.flush()
    if not seen:
        raise ValueError(
            f"{only=} matches no call; use a part of one of {[case.name for case in CASES]}"
        )
    return num_faults


def main() -> int:
    """Entry of `python -m kernels.compile_check`: 0 if nothing is wrong, else 1."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise ValueError("TRITON_INTERPRET=1 replaces the compiler; unset it to check kernels")
    parser = argparse.ArgumentParser(description="Compile every Triton kernel for sm_90.")
    parser.add_argument("--quick", action="store_true", help="each kernel once")
    parser.add_argument("--only", default="", help="calls whose name contains this text")
    arguments = parser.parse_args()
    return int(check(arguments.only, quick=arguments.quick) > 0)


if __name__ == "__main__":
    raise SystemExit(main())
