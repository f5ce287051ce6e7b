"""What people are told with: the console, and how replicates and times are put in words.

Apart from `display`, which needs all of a plan: `status` answers at once.
"""

import sys
from typing import TYPE_CHECKING

from orchestrator.records import TrialRecord

if TYPE_CHECKING:
    from rich.console import Console


def make_console() -> "Console":
    """Standard output; long lines are left whole where it is no terminal."""
    from rich.console import Console  # noqa: PLC0415 - slow to load, and `status` does without

    return Console(soft_wrap=True, highlight=False, width=None if sys.stdout.isatty() else 200)


def label(record: TrialRecord) -> str:
    """A replicate in words: the choices that tell it from its neighbours."""
    return f"{record.mixer} {record.stack} {record.optimizer} lr={record.lr:g} seed {record.seed}"


def duration(seconds: float) -> str:
    """Seconds as a person says them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
