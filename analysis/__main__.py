"""`python -m analysis FOLDER`: the report on any folder that holds a `trials.parquet`."""

import argparse
import sys
from pathlib import Path

from analysis.claims import verify
from analysis.load import load_sweep
from analysis.report import write_report
from analysis.study import Settings

DONE, REFUSED, DRIFTED = 0, 2, 3


def main(arguments: list[str] | None = None) -> int:
    """Writes or verifies a report; returns 0, 2 for refused input, 3 for claims that drifted."""
    options = _parser().parse_args(arguments)
    within = tuple(options.compare_within) if options.compare_within else None
    try:
        if options.verify:
            return _verify(options.folder, options.out)
        result = write_report(
            options.folder,
            options.out,
            title=options.title,
            settings=Settings(
                baseline=options.baseline,
                margin_nats=options.margin_nats,
                published=options.published,
            ),
            compare_within=within,
        )
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return REFUSED
    sys.stdout.write(f"{result.headline['answer']}\n{result.folder / 'index.html'}\n")
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis", description=__doc__)
    parser.add_argument("folder", type=Path, help="holds trials.parquet")
    parser.add_argument("--out", type=Path, help="the report's folder; FOLDER/report by default")
    parser.add_argument("--title", help="heading of the report")
    parser.add_argument("--baseline", help="arm_id that the others are compared with")
    parser.add_argument(
        "--margin-nats",
        type=float,
        default=Settings().margin_nats,
        help="difference in loss that is too small to matter",
    )
    parser.add_argument(
        "--compare-within", nargs="+", metavar="AXIS", help="axes across which nothing is compared"
    )
    parser.add_argument(
        "--published", metavar="PATH#TABLE", help="published numbers to put beside the arms"
    )
    parser.add_argument(
        "--verify", action="store_true", help="compute every claim of the report again"
    )
    return parser


def _verify(folder: Path, out: Path | None) -> int:
    drifts = verify(folder, out)
    for drift in drifts:
        sys.stderr.write(f"{drift}\n")
    if drifts:
        return DRIFTED
    count = load_sweep(folder).accounting.found
    sys.stdout.write(f"Every claim follows from the {count} replicates.\n")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
