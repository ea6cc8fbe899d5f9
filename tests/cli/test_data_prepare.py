"""`jaxtrain data prepare`: shards, and the config lines that use them."""

from jaxtrain.config import load_config
from jaxtrain.data import open_data


def test_prints_the_config_that_reads_what_it_wrote(cli, tmp_path):
    (tmp_path / "text.txt").write_text("Some words and more words. " * 50)
    words = (f"data.path={tmp_path / 'text.txt'}", "data.tokenizer.kind=byte", "--tokens-per-shard", "500")
    answer = cli("data", "prepare", "quickstart", *words, "-o", str(tmp_path / "tokens"))
    assert answer.code == 0
    assert "one document, 1,351 tokens of 256 ids (uint16) in 3 files" in answer.err
    (tmp_path / "config.yaml").write_text(answer.out)
    config = load_config(tmp_path / "config.yaml").config
    assert (config.data.kind, config.data.path) == ("tokens", str(tmp_path / "tokens"))
    data = open_data(config.data, sequence_length=32, seed=0)
    assert (data.vocab_size, data.units_per_row) == (256, 32)
    again = cli("data", "prepare", "quickstart", *words, "-o", str(tmp_path / "tokens"))
    assert (again.code, again.out) == (3, "")
    assert again.err.startswith("jaxtrain: output ")
    assert again.err.count("\n") == 1
