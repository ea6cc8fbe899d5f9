"""The setting of data that may lie in a store of remote files."""

from jaxtrain.config.base import Group


class Stored(Group):
    """Data whose paths may be addresses: s3://, gs:// or https://."""

    cache: str | None = None
    """Folder for the copies of remote files (s3://, gs://, https://); null: the user's cache folder."""
