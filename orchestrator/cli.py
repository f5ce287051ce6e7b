"""The verbs of `python -m orchestrator`; each imports what it needs, so that help is instant."""

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import ConfigError, LedgerError
from orchestrator.store_uri import UI_PORT

if TYPE_CHECKING:
    from rich.console import Console

    from orchestrator.compose import Sweep
    from orchestrator.plan import Plan

EXIT_REFUSED = 2
EXIT_FAILED = 3
EXIT_INTERRUPTED = 130

SCHEME = re.compile(r"[a-z][a-z0-9+]*:/")
"""How a URI begins, also once `Path` has made one slash of two."""

STORE_HELP = "object store that has a copy of the sweep: s3://BUCKET/PREFIX"

DESCRIPTION = """\
Which attention architecture, at which optimizer and learning rate, gives the best loss for its
speed, and is the difference real? Sweeps of seeded trials, from a YAML grid to a Pareto plot."""

OVERRIDES = """\
conf=NAME names a file in conf/, conf=PATH.yaml a file of yours. Everything after it is Hydra
override grammar: budget.tokens=1_000_000 optimizer=adamw,muon 'seeds=range(5)'."""


def main(arguments: list[str]) -> int:
    """Run one verb and return the process's exit code."""
    options = _parse(arguments)
    try:
        return int(options.run(options))
    except (ConfigError, LedgerError) as error:
        sys.stderr.write(f"{' '.join(str(error).split())}\n")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe went away; what it wanted to read, it has read.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    """The options; overrides may also follow an option, where argparse itself takes none."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(text.startswith("-") for text in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m orchestrator", description=DESCRIPTION, allow_abbrev=False
    )
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument(
        "--root", type=Path, default=Path("runs"), help="folder of ledgers and data (runs/)"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, run, text in (
        ("sweep", _sweep, "run what is missing, then report"),
        ("plan", _plan, "the cells, what is done, what would run; starts nothing"),
        ("pilot", _pilot, "a few measured steps of each shape, and the price of the sweep"),
        ("train", _train, "one trial in this process, without Ray"),
    ):
        verb = verbs.add_parser(name, help=text, parents=[common], epilog=OVERRIDES)
        verb.add_argument("overrides", nargs="+", metavar="conf=… key=value")
        verb.set_defaults(run=run)
        if name == "sweep":
            verb.add_argument(
                "--yes", action="store_true", help="run it whatever price.max_gpu_hours says"
            )
            verb.add_argument("--store", metavar="URI", help=STORE_HELP)
        if name == "plan":
            verb.add_argument("--json", action="store_true", help="one JSON object with `cells`")
    for name, run, text in (
        ("status", _status, "counts by state, running trials, ETA"),
        ("report", _report, "tables, figures, report/index.html"),
        ("verify", _verify, "recompute every number of the report from the records"),
        ("rebuild", _rebuild, "make MLflow and Parquet again from the journals"),
    ):
        verb = verbs.add_parser(name, help=text, parents=[common])
        verb.add_argument("sweep", metavar="SWEEP")
        verb.set_defaults(run=run)
        if name == "status":
            verb.add_argument("--json", action="store_true", help="one object with `replicates`")
    fetch = verbs.add_parser("fetch", help="bring a sweep here from a store", parents=[common])
    fetch.add_argument("sweep", metavar="SWEEP")
    fetch.add_argument("--store", metavar="URI", required=True, help=STORE_HELP)
    fetch.set_defaults(run=_fetch)
    export = verbs.add_parser("export", help="write a finished trial's model", parents=[common])
    export.add_argument("sweep", metavar="SWEEP")
    export.add_argument("replicate_id", metavar="REPLICATE_ID")
    export.add_argument(
        "outdir", metavar="OUTDIR", type=Path, help="a folder that is not there yet"
    )
    export.set_defaults(run=_export)
    ui = verbs.add_parser("ui", help="the MLflow UI on the embedded store", parents=[common])
    ui.add_argument("--port", type=int, default=UI_PORT)
    ui.set_defaults(run=_ui)
    doctor = verbs.add_parser("doctor", help="is this machine fit to run?", parents=[common])
    doctor.add_argument("--json", action="store_true", help="one JSON object with `checks`")
    doctor.add_argument("--cluster", metavar="ADDRESS", help="of every node of a Ray cluster")
    doctor.set_defaults(run=_doctor)
    data = verbs.add_parser(
        "data", help="prepare, verify or describe token files", parents=[common]
    )
    data.add_argument("action", choices=("prepare", "verify", "info"))
    data.add_argument("overrides", nargs="+", metavar="conf=… | FOLDER")
    data.set_defaults(run=_data)
    _add_bench(verbs.add_parser("bench", help="measure kernels and steps", parents=[common]))
    return parser


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("what", choices=("kernels", "train", "context", "decode"))
    bench.add_argument(
        "overrides", nargs="*", metavar="conf=… key=value", help="of train and context"
    )
    bench.add_argument("--op", action="append", default=[], help="an op of kernels or decode")
    bench.add_argument("--impl", action="append", default=[], help="triton, chunked or fla")
    bench.add_argument(
        "--shape", action="append", default=[], metavar="BxTxHxHVxKxV", help="kernels: sizes"
    )
    bench.add_argument("--first-calls", action="store_true", help="kernels: time compilation too")
    bench.add_argument(
        "--tune", action="store_true", help="kernels: search tiles, and write a table of them"
    )
    bench.add_argument(
        "--length", action="append", type=int, default=[], help="context: a sequence length"
    )
    bench.set_defaults(run=_bench)


def _root(options: argparse.Namespace) -> Path:
    root: Path = options.root
    if SCHEME.match(str(root)):
        raise ConfigError(
            f"--root {root}: the root is a folder of this machine; give --store s3://BUCKET/PREFIX "
            "beside it to keep a copy of the sweep there"
        )
    return root.expanduser().absolute()


def _console() -> "Console":
    from orchestrator.console import make_console

    return make_console()


def _load(options: argparse.Namespace) -> "Sweep":
    from orchestrator.compose import load_sweep

    conf = [text for text in options.overrides if text.startswith("conf=")]
    if len(conf) != 1:
        raise ConfigError("give conf=NAME or conf=PATH.yaml once, for example conf=quickstart")
    overrides = [text for text in options.overrides if not text.startswith("conf=")]
    return load_sweep(conf[0].removeprefix("conf="), overrides, Path.cwd())


def _make_plan(options: argparse.Namespace, *, joins_ledger: bool = True) -> "Plan":
    return _planned(options, _load(options), joins_ledger=joins_ledger)


def _planned(options: argparse.Namespace, sweep: "Sweep", *, joins_ledger: bool = True) -> "Plan":
    from orchestrator.plan import make_plan
    from orchestrator.rounds import extended

    plan = make_plan(sweep, _root(options), Path.cwd(), joins_ledger=joins_ledger)
    return extended(plan) if joins_ledger else plan


def _sweep(options: argparse.Namespace) -> int:
    sweep = _load(options)
    if options.store is None:
        return _reconcile(options, sweep)

    from orchestrator.mirror import kept_in_store
    from orchestrator.readiness import interruptible

    with (
        interruptible(),
        kept_in_store(options.store, _root(options), sweep.spec.name, _console()) as copy,
    ):
        code = _reconcile(options, sweep)
    return code or (0 if copy.is_complete else EXIT_FAILED)


def _reconcile(options: argparse.Namespace, sweep: "Sweep") -> int:
    plan = _planned(options, sweep)

    from orchestrator.driver import reconcile
    from orchestrator.provenance import capture

    command = ["python", "-m", "orchestrator", *sys.argv[1:]]
    return reconcile(plan, capture(command), _console(), is_price_overruled=options.yes)


def _pilot(options: argparse.Namespace) -> int:
    plan = _make_plan(options)

    from orchestrator.driver import pilot
    from orchestrator.provenance import capture

    return pilot(plan, capture(["python", "-m", "orchestrator", *sys.argv[1:]]), _console())


def _plan(options: argparse.Namespace) -> int:
    from orchestrator.plan import plan_json

    plan = _make_plan(options)
    if plan.data_folder is not None:
        from orchestrator.readiness import refuse_unfit_data

        refuse_unfit_data(plan)
    if plan.sweep.space is not None:
        from orchestrator.search_view import search_json, show_search

        if options.json:
            sys.stdout.write(json.dumps(search_json(plan)) + "\n")
        else:
            show_search(plan, _console())
        return 0
    if options.json:
        from orchestrator.pilot import price_json, price_of

        found = plan_json(plan) | {"price": price_json(plan, price_of(plan))}
        if plan.spec.adaptive is not None:
            from orchestrator.adaptive import comparisons_json

            found["comparisons"] = comparisons_json(plan)
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    from orchestrator.display import show_plan
    from orchestrator.pilot import price_line, price_of
    from orchestrator.rounds import summary

    console = _console()
    show_plan(plan, console)
    console.print(price_line(plan, price_of(plan)), markup=False)
    for line in summary(plan):
        console.print(line, markup=False)
    return 0


def _train(options: argparse.Namespace) -> int:
    plan = _make_plan(options, joins_ledger=False)
    if plan.sweep.space is not None:
        raise ConfigError(
            "train runs one cell of a grid, and a search has points that results decide; give "
            "train a sweep file without search"
        )
    if len(plan.desired) != 1:
        raise ConfigError(
            f"train runs one cell with one seed, but {len(plan.sweep.cells)} cells and "
            f"{len(plan.spec.seeds)} seeds are left; override the axes, for example "
            "model.mixer=deltanet optimizer.lr=1e-3 seeds=0"
        )
    from orchestrator.single import train_one

    return train_one(plan, _console())


def _status(options: argparse.Namespace) -> int:
    from orchestrator.status import show_status, status_json

    root = _root(options)
    if options.json:
        sys.stdout.write(json.dumps(status_json(root, options.sweep)) + "\n")
    else:
        show_status(root, options.sweep, sys.stdout)
    return 0


def _report(options: argparse.Namespace) -> int:
    from orchestrator.remake import report_again

    return report_again(_root(options), options.sweep, _console())


def _verify(options: argparse.Namespace) -> int:
    from orchestrator.remake import verify

    return verify(_root(options), options.sweep, _console())


def _rebuild(options: argparse.Namespace) -> int:
    from orchestrator.provenance import capture
    from orchestrator.remake import rebuild

    provenance = capture(["python", "-m", "orchestrator", *sys.argv[1:]])
    return rebuild(_root(options), options.sweep, provenance, _console())


def _fetch(options: argparse.Namespace) -> int:
    from orchestrator.mirror import fetch

    fetch(options.store, _root(options), options.sweep, _console())
    return 0


def _export(options: argparse.Namespace) -> int:
    from orchestrator.export_verb import run_export

    target = options.outdir.expanduser().absolute()
    return run_export(_root(options), options.sweep, options.replicate_id, target, _console())


def _bench(options: argparse.Namespace) -> int:
    from orchestrator import bench
    from orchestrator.provenance import capture

    provenance = capture(["python", "-m", "orchestrator", *sys.argv[1:]])
    results = bench.BenchResults(options.what, _root(options), provenance, _console())
    takes_conf = options.what in ("train", "context")
    if takes_conf != bool(options.overrides):
        needs = "conf=NAME" if takes_conf else "no conf: it measures ops, not cells"
        raise ConfigError(f"bench {options.what} takes {needs}")
    if options.what == "kernels" and options.tune:
        bench.bench_tiles(results, options.op, options.shape)
    elif options.what == "kernels":
        bench.bench_kernels(
            results,
            options.op,
            options.impl,
            options.shape,
            with_first_calls=options.first_calls,
        )
    elif options.what == "decode":
        bench.bench_decode(results, options.op)
    else:
        plan = _make_plan(options, joins_ledger=False)
        if options.what == "train":
            bench.bench_train(results, plan)
        else:
            bench.bench_context(results, plan, options.length or bench.CONTEXT_LENGTHS)
    return 0


def _ui(options: argparse.Namespace) -> int:
    from orchestrator.tracking import serve_ui

    return serve_ui(_root(options), options.port)


def _doctor(options: argparse.Namespace) -> int:
    from orchestrator.doctor import examine, examine_cluster, show

    root = _root(options)
    checks = examine_cluster(root, options.cluster) if options.cluster else examine(root)
    if options.json:
        rows: list[dict[str, Any]] = [check.as_row() for check in checks]
        sys.stdout.write(json.dumps({"checks": rows}) + "\n")
    else:
        show(checks, _console())
    return 0 if all(check.fit for check in checks) else EXIT_REFUSED


def _data(options: argparse.Namespace) -> int:
    from orchestrator.data_verbs import run_data_verb

    return run_data_verb(options, _root(options), _console())
