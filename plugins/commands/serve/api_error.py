"""Errors in OpenAI's format."""

from typing import Any

from starlette.exceptions import HTTPException

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_LATER = {"Retry-After": "5"}  # seconds
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: _LATER, 503: _LATER}


class ApiError(HTTPException):
    """An error response: HTTP status, message, name of the invalid parameter, and OpenAI's error code."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message, _HEADERS.get(status))
        self.param, self.code = param, code

    @property
    def document(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "server_error" if self.status_code >= 500 else "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}


def wrong(param: str, problem: str, code: str | None = "invalid_value") -> ApiError:
    """Return an ApiError 400 about a parameter."""
    return ApiError(400, f"{param}: {problem}", param, code)
