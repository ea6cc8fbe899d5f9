"""`jaxtrain config`: every key with where it was set, YAML that loads back, a schema, shardings."""

from jaxtrain.config import Config, load_config, shipped_configs
from jaxtrain.config.errors import walk
from jaxtrain.config.files import find_config
from jaxtrain.config.schema import TrainConfig


def test_lists_the_shipped_configs(cli):
    answer = cli("config")
    assert (answer.code, answer.err) == (0, "")
    assert [line.split()[0] for line in answer.out.splitlines()[1:]] == shipped_configs()


def test_prints_every_key_with_value_type_default_origin_and_doc(cli):
    answer = cli("config", "quickstart", "train.steps=7", "--optimizer.b1=0.5")
    assert (answer.code, answer.err) == (0, "")
    header, *lines = answer.out.splitlines()
    assert header.split() == ["key", "value", "type", "default", "origin", "doc"]
    rows = {line.split()[0]: line.split(None, 1)[1] for line in lines}
    assert rows.keys() == {key.path for key in walk(Config, load_config("quickstart").config)}
    assert rows["train.steps"].split("  ")[0] == "7"
    assert "command line" in rows["train.steps"]
    assert str(TrainConfig.model_fields["steps"].description) in rows["train.steps"]
    assert rows["optimizer.b1"].startswith("0.5")
    assert "quickstart.yaml:" in rows["model.num_layers"]
    assert "default" in rows["train.prefetch"]


def test_yaml_loads_back_to_the_same_config(cli, tmp_path):
    """Also values that plain YAML would read back as something else."""
    # What is written to be read again takes the weights that a config is about, for their tokenizer.
    shipped = [name for name in shipped_configs() if "  from:" not in find_config(name).read_text()]
    nasty = ("'1e-3'", "'010'", "'null'", "'12:30'", "'a: b # c'", "'2024-01-01'")
    words = [(name, []) for name in shipped] + [("quickstart", [f"name={value}"]) for value in nasty]
    words += [("quickstart", ["evaluation.sample_prompt='é\u2028'"])]
    words += [("quickstart", ["model.size=llama3.1_8b", "optimizer.freeze=['1e3', 'a/*']"])]
    for config, overrides in words:
        answer = cli("config", config, *overrides, "--yaml")
        (tmp_path / "copy.yaml").write_text(answer.out, encoding="utf-8")
        again, loaded = load_config(tmp_path / "copy.yaml"), load_config(config, overrides=overrides)
        assert again.config == loaded.config, (config, overrides)


def test_shardings_of_a_published_size_need_no_data(cli):
    words = ("model.size=llama3.2_1b", "data.path=/no/such.txt", "parallel.fsdp=4", "parallel.tensor=2", "--sharding")
    answer = cli("config", "quickstart", *words)
    assert answer.code == 0
    rows = {line.split("  ")[0]: line for line in answer.out.splitlines()}
    row = [cell.strip() for cell in rows["blocks/attention/query/kernel"].split("  ") if cell.strip()]
    assert row[1:4] == [
        "(16, 2048, 32, 64)",
        "('layers', 'embed', 'heads', 'head_dim')",
        "(None, 'fsdp', 'tensor', None)",
    ]
