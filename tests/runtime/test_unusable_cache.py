"""A folder for compiled programs that cannot be made: a mistake where it was chosen, and a remark where it was not."""

import jax
import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.runtime.compilation_cache import use_cache


def test_a_home_without_a_cache_keeps_nobody_from_training(tmp_path, monkeypatch, capsys):
    (tmp_path / "home").write_text("a file, below which no folder can be made")
    monkeypatch.delenv("JAXTRAIN_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    before = jax.config.jax_compilation_cache_dir
    use_cache("auto")
    assert jax.config.jax_compilation_cache_dir == before
    said = capsys.readouterr().err
    assert "programs are compiled, but not kept" in said
    assert said.count("\n") == 1
    with pytest.raises(ConfigError, match="cannot make the compilation cache"):
        use_cache(str(tmp_path / "home" / "chosen"))
