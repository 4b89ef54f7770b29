"""OpenAI's error documents."""

from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An HTTP status, a message, the wrong parameter, OpenAI's code, and the seconds to wait before a retry."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry = status, message, param, code, retry

    @property
    def document(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        wanted = {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
        return wanted if self.retry is None else {"Retry-After": str(self.retry)}


def wrong(param: str, problem: str, code: str | None = "invalid_value") -> ApiError:
    """Return an ApiError 400 about a parameter."""
    return ApiError(400, f"{param}: {problem}", param, code)
