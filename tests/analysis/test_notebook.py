"""The example notebook runs as it stands, on a made sweep."""

import json
from pathlib import Path

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "explore_a_sweep.ipynb"


def test_the_example_notebook_runs_from_top_to_bottom(small_folder):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    codes = [cell for cell in cells if cell["cell_type"] == "code"]
    tagged = ["parameters" in cell["metadata"].get("tags", ()) for cell in codes]
    assert sum(tagged) == 1
    assert all(cell["outputs"] == [] for cell in codes)
    names = {"__name__": "notebook"}
    for cell, is_parameters in zip(codes, tagged, strict=True):
        source = "".join(cell["source"])
        exec(compile(source, NOTEBOOK.name, "exec"), names)
        if is_parameters:
            names["FOLDER"] = str(small_folder)
    assert len(names["front"]) == 5
    assert names["front"]["on front"].sum() == 4
    assert names["said"][0].startswith("Which of 5 arms")
    difference = names["difference"]
    assert difference.low < difference.mean < difference.high
