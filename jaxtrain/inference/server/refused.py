"""A request that is not served, and the error object that says why. No jax here."""

from typing import Any

_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "overloaded_error"}
_INVALID = "invalid_request_error"


class RefusedError(Exception):
    """What the client asked for is not done.

    Args:
        status: of HTTP.
        message: one line for people: what was given, and what is wanted.
        param: the field of the body that is the cause; None: no single one.
        code: a short name for programs; None: the status says it.
        retry_after: seconds after which another attempt may succeed; None: the same request would fail again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after = retry_after

    def to_json(self) -> dict[str, Any]:
        """The error object of OpenAI's interface."""
        kind = _TYPES.get(self.status, _INVALID)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Headers that belong to the answer."""
        found = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        return found | ({"www-authenticate": "Bearer"} if self.status == 401 else {})
