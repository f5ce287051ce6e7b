"""`bench`: measurements outside a sweep, printed as a table, kept as CSV and as an MLflow run.

`kernels` times the ops beside their peers and `decode` one token, both on a GPU; `train` times
whole optimizer steps of every cell of a configuration, and `context` the same over lengths, on the
device that the configuration names. Each writes `bench/WHAT-TIME.csv` under the root.
"""

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.config import TrialConfig
from orchestrator.errors import ConfigError
from orchestrator.plan import Plan
from orchestrator.provenance import Provenance
from orchestrator.readiness import with_data
from orchestrator.store_uri import tracking_uri
from orchestrator.training.runtime import Runtime
from orchestrator.training.speed import measure_speed

CONTEXT_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768)

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BenchResults:
    """Where a benchmark's rows go.

    Attributes:
        what: `kernels`, `decode`, `train` or `context`.
        root: folder of ledgers and of the embedded MLflow store.
        provenance: of this call.
        console: for the user.
    """

    what: str
    root: Path
    provenance: Provenance
    console: Console

    def keep(self, rows: Sequence[Row]) -> Path:
        """Write the rows as CSV and as a run of the MLflow experiment `bench`; returns the file."""
        from orchestrator.tracking import MlflowView

        folder = self.root / "bench"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.what}-{time.strftime('%Y%m%d-%H%M%S')}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        view = MlflowView(tracking_uri(None, self.root), self.root, "bench")
        view.record_file(path, self.provenance)
        self.console.print(f"{len(rows)} rows: {path}", markup=False)
        return path


def bench_kernels(
    results: BenchResults,
    ops: Sequence[str],
    impls: Sequence[str],
    shapes: Sequence[str] = (),
    *,
    with_first_calls: bool,
) -> None:
    """Time forward and backward of ops by implementation.

    Args:
        results: what to do with the rows.
        ops: names of ops; all for none.
        impls: names of implementations; for none ours and, where installed, that of fla.
        shapes: written as `BxTxHxHVxKxV`; for none those of the benchmark.
        with_first_calls: also time the first call in fresh processes.

    Raises:
        ConfigError: an unknown name, no shape, or no GPU.
    """
    from kernels import benchmark

    ops = tuple(ops) or benchmark.OPS
    impls = tuple(impls) or benchmark.installed_implementations()
    sizes = _shapes(shapes) or benchmark.SHAPES
    rows = _run(
        results,
        lambda: benchmark.benchmark(ops, sizes, impls),
        lambda row: benchmark.table([row]),
    )
    results.console.print(benchmark.table(rows), markup=False)
    results.keep([row.as_fields() for row in rows])
    if not with_first_calls:
        return
    shape = sizes[0]
    first_calls: list[Row] = []
    for op in ops:
        for impl in impls:
            cold, warm = benchmark.first_call_seconds(op, shape, impl)
            results.console.print(f"{op} {impl}: first call {cold:.1f} s, compiled {warm:.1f} s")
            first_calls.append({"op": op, "impl": impl, "cold_seconds": cold, "warm_seconds": warm})
    replace(results, what="first-calls").keep(first_calls)


def bench_tiles(results: BenchResults, ops: Sequence[str], shapes: Sequence[str] = ()) -> None:
    """Search tiles, warps and stages of our kernels, and write the table that comes out.

    Args:
        results: what to do with the rows.
        ops: names of ops; all for none.
        shapes: written as `BxTxHxHVxKxV`; for none the benchmark's batch.

    Raises:
        ConfigError: an unknown op, no shape, or no GPU.
    """
    from kernels import benchmark, tune

    chosen = tuple(ops) or benchmark.OPS
    sizes = _shapes(shapes) or benchmark.SHAPES[:1]
    rows = _run(
        results,
        lambda: (row for op in chosen for shape in sizes for row in tune.tune(op, shape)),
        str,
    )
    kept = replace(results, what="tiles").keep([row.as_fields() for row in rows])
    path = kept.with_suffix(".txt")
    lines = tune.entries(rows) or ["# nothing was faster than what there is"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    results.console.print("\n".join([*lines, f"entries for the tables: {path}"]), markup=False)


def _shapes(texts: Sequence[str]) -> tuple[Any, ...]:
    from kernels.benchmark_ops import BenchmarkShape

    try:
        return tuple(BenchmarkShape.parse(text) for text in texts)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def bench_decode(results: BenchResults, ops: Sequence[str]) -> None:
    """Time one decoded token of ops by batch size.

    Raises:
        ConfigError: an unknown op, or no GPU.
    """
    from kernels import benchmark_decode

    ops = tuple(ops) or tuple(benchmark_decode.STEPS)
    rows = _run(
        results,
        lambda: benchmark_decode.benchmark_decode(ops),
        lambda row: benchmark_decode.table([row]),
    )
    results.console.print(benchmark_decode.table(rows), markup=False)
    results.keep([row.as_fields() for row in rows])


def _run(results: BenchResults, measure: Callable[[], Any], line: Callable[[Any], str]) -> Any:
    """All rows, each shown as it comes."""
    rows = []
    try:
        for row in measure():
            rows.append(row)
            results.console.print(line(row).splitlines()[-1], markup=False)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return rows


def bench_train(results: BenchResults, plan: Plan) -> None:
    """Time training steps of every cell of a plan, with its first seed.

    Raises:
        ConfigError: data that is missing or too short.
    """
    plan = with_data(plan, results.console)
    configs = [(dict(cell.assignment), cell.config) for cell in plan.sweep.cells]
    results.keep(_time_steps(results, plan, configs))


def bench_context(results: BenchResults, plan: Plan, lengths: Sequence[int]) -> None:
    """Time training steps of every cell over sequence lengths, at the cell's tokens a step.

    Raises:
        ConfigError: a length that does not divide a step's tokens, or longer than the data.
    """
    configs = []
    for cell in plan.sweep.cells:
        for length in lengths:
            try:
                config = replace(cell.config, seq_len=length)
            except ValueError as error:
                raise ConfigError(f"length {length}: {error}") from None
            configs.append(({**cell.assignment, "seq_len": length}, config))
    plan = with_data(plan, results.console)
    results.keep(_time_steps(results, plan, configs))


def _time_steps(
    results: BenchResults, plan: Plan, configs: Sequence[tuple[Row, TrialConfig]]
) -> list[Row]:
    assert plan.data_folder is not None
    lane = plan.spec.lanes.speed
    runtime = Runtime(device=plan.device, precision=plan.precision, threads=plan.threads)
    rows = []
    for labels, config in configs:
        try:
            speed = measure_speed(
                config,
                seed=plan.spec.seeds[0],
                data_folder=plan.data_folder,
                runtime=runtime,
                steps=lane.steps,
                warmup_steps=lane.warmup_steps,
            )
        except ValueError as error:
            raise ConfigError(f"{labels}: {error}") from None
        rows.append({**labels, **speed.as_fields()})
        results.console.print(
            f"{' '.join(f'{key}={value}' for key, value in labels.items())}: "
            f"{speed.tokens_per_second:,.0f} tokens/s, "
            f"{speed.step_seconds_median * 1e3:.1f} ms a step, "
            f"{speed.peak_memory_bytes / 2**20:,.0f} MiB",
            markup=False,
        )
    return rows
