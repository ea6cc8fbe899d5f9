"""Runs on rows that are read by number: two processes and a resumed run read what one process reads."""

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from test_processes import finish, start_two
from training_runs import losses, run_process, saved_arrays, write_config


@pytest.mark.long
def test_one_process_then_two_read_the_same_rows(tmp_path):
    """A run of one process with four devices goes on in two with two each, on Parquet files read by row group."""
    texts = [f"row {i} of a table of texts, {i % 7} and {i % 11}" for i in range(300)]
    for part in range(2):
        (tmp_path / "rows").mkdir(exist_ok=True)
        table = pyarrow.table({"text": texts[part::2]})
        parquet.write_table(table, tmp_path / "rows" / f"{part}.parquet", row_group_size=20)
    config = write_config(tmp_path, train__steps=8)
    words = ["data.kind=documents", f"data.path={tmp_path}/rows", "data.rows=document"]
    first = run_process(config, tmp_path / "moved", "--emulate", "4", "train.steps=4", *words)
    assert first.returncode == 0, first.stderr
    results = finish(start_two(config, tmp_path / "moved", *words))
    assert [code for code, _, _ in results] == [0, 0], results
    assert "resuming step 4" in results[0][2]
    alone = run_process(config, tmp_path / "alone", "--emulate", "4", *words)
    assert alone.returncode == 0, alone.stderr
    assert losses(tmp_path / "moved").keys() == losses(tmp_path / "alone").keys()
    for step, loss in losses(tmp_path / "alone").items():
        # The same rows; sums over processes are added in another order.
        assert losses(tmp_path / "moved")[step] == pytest.approx(loss, rel=1e-5)
    one, other = (saved_arrays(tmp_path / name, 8) for name in ("moved", "alone"))
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=1e-3, atol=1e-5)  # as above, after 8 steps of adamw
