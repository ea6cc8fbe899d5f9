"""Runs on rows that are read by number: two processes and a resumed run read what one process reads."""

import sys
from pathlib import Path

import numpy as np
import pytest
from test_processes import finish, start_two
from training_runs import losses, run_process, saved_arrays, write_config

sys.path.insert(0, str(Path(__file__).parents[1] / "data"))

FORMATS = ("parquet", "arrow", "arrow_file", "saved", "array_record", "tar", "lines", "lines.gz", "lines.zst")


def document_rows(folder: Path) -> dict[str, object]:
    """A text a row, from two Parquet files read by row group."""
    import pyarrow
    from pyarrow import parquet

    texts = [f"row {i} of a table of texts, {i % 7} and {i % 11}" for i in range(300)]
    for part in range(2):
        table = pyarrow.table({"text": texts[part::2]})
        parquet.write_table(table, folder / f"{part}.parquet", row_group_size=20)
    return {"kind": "documents", "path": str(folder), "rows": "document"}


def every_format(folder: Path) -> dict[str, object]:
    """A weighted mixture of sources, one of each format."""
    from format_files import write_rows

    components = []
    for weight, form in enumerate(FORMATS, 1):
        (folder / form).mkdir()
        rows = [{"text": f"row {i} of {form}, {i % 7} and {i % 11}"} for i in range(80)]
        path = write_rows(folder / form, form, rows)
        components.append({"source": {"kind": "documents", "path": str(path)}, "weight": weight})
    return {"kind": "mixture", "components": components}


@pytest.mark.parametrize("make", [document_rows, every_format])
@pytest.mark.long
def test_one_process_then_two_read_the_same_rows(tmp_path, make):
    """A run of one process with four devices goes on in two with two each."""
    (tmp_path / "rows").mkdir()
    config = write_config(tmp_path, train__steps=8, data=make(tmp_path / "rows"))
    first = run_process(config, tmp_path / "moved", "--emulate", "4", "train.steps=4")
    assert first.returncode == 0, first.stderr
    results = finish(start_two(config, tmp_path / "moved"))
    assert [code for code, _, _ in results] == [0, 0], results
    assert "resuming step 4" in results[0][2]
    alone = run_process(config, tmp_path / "alone", "--emulate", "4")
    assert alone.returncode == 0, alone.stderr
    assert losses(tmp_path / "moved").keys() == losses(tmp_path / "alone").keys()
    for step, loss in losses(tmp_path / "alone").items():
        # The same rows; sums over processes are added in another order.
        assert losses(tmp_path / "moved")[step] == pytest.approx(loss, rel=1e-5)
    one, other = (saved_arrays(tmp_path / name, 8) for name in ("moved", "alone"))
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-5)  # as above, after 8 steps of adamw
