"""What `--env` takes: names of secrets are refused, unless the variable is a path by its meaning."""

import pytest

from jaxtrain.errors import ConfigError
from jaxtrain.submit.kubernetes import parse_environment


@pytest.mark.parametrize(
    "text",
    ["GOOGLE_APPLICATION_CREDENTIALS=/var/run/key.json", "AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/token"],
)
def test_paths_of_keys_are_taken(text):
    name, _, path = text.partition("=")
    assert parse_environment([text]) == {name: path}


@pytest.mark.parametrize("text", ['GOOGLE_APPLICATION_CREDENTIALS={"type": "x"}', "WANDB_API_KEY=/x"])
def test_secrets_are_not(text):
    with pytest.raises(ConfigError, match="write --secret NAME-OF-THE-SECRET"):
        parse_environment([text])
