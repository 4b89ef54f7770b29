"""Limits of a server; those of a single request's parameters are in `requests`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits beyond which a request is refused, with a status of its own."""

    batch: int = 8  # sequences that are computed together
    waiting: int = 512  # completions that wait for a place; more are refused with 429
    seconds: float = 600.0  # from the arrival of a request to its last token
    encoders: int = 8  # prompts, and as many chats, that are encoded at once
    connections: int = 1024  # whose request has not arrived; the oldest is closed for a new one
    header_seconds: float = 10.0  # for a request's headers to arrive
    body_seconds: float = 30.0  # for a request's body to arrive
    body_bytes: int = 32 << 20
    tokens: int = 4096  # new ones of a completion, where the model has no limit
    images: int = 8  # in one request
    image_pixels: int = 1 << 24
    finish_seconds: float = 8.0  # for what runs when the server is asked to stop
    grace_seconds: float = 10.0  # from then to the end of the process

    @property
    def requests(self) -> int:
        """Requests for completions that are answered at once."""
        return self.waiting + self.batch

    @property
    def all_connections(self) -> int:
        """Connections of any kind; more are refused with 503."""
        return 4 * self.connections + 2 * self.requests
