"""Addresses of object stores: gs://bucket/name and s3://bucket/name. No jax here."""

import re

_ADDRESS = re.compile(r"(gs|s3):/{1,2}([^/]+)/?(.*)", re.DOTALL)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


def is_store_address(text: str) -> bool:
    """Whether a text begins as the address of a place in an object store that checkpoints can be in."""
    # One slash too, because a `Path` has dropped the second.
    return text.startswith(("gs:/", "s3:/"))


def store_address(text: str) -> tuple[str, str, str]:
    """Returns the scheme, the bucket and the name in it, without empty parts.

    Args:
        text: gs://bucket/name or s3://bucket/name.

    Raises:
        ValueError: It is no such address; the message says what is wrong.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise ValueError(f"{text} names no bucket; write gs://bucket/name or s3://bucket/name")
    if not _BUCKET.fullmatch(found[2]):
        raise ValueError(
            f"{found[1]}://{found[2]} can be no bucket: a bucket's name has at least 3 lower-case letters, digits, "
            "hyphens, dots or underscores, with a letter or digit at both ends"
        )
    parts = [part for part in found[3].split("/") if part]
    if any(part in (".", "..") for part in parts) or any(sign in found[3] for sign in "\0*?[]\n"):
        raise ValueError(f"{text} has a part or a sign that is no name (., .., *, ?, [, ]); write it without")
    if found[1] == "gs" and "#" in found[3]:
        raise ValueError(f"{text} has a #, which begins the number of a version in Google's store; write it without")
    return found[1], found[2], "/".join(parts)
