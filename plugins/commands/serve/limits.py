"""Limits of a server; limits of request parameters are in requests.py."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of a server. A request beyond a limit is refused with that limit's HTTP status."""

    batch: int = 8  # sequences that are computed together
    waiting: int = 512  # completions that wait for a slot; more are refused with 429
    seconds: float = 600.0  # time limit from the arrival of a request to its last token
    encoders: int = 8  # prompts encoded at once, separately for completions and for chats
    connections: int = 1024  # connections with incomplete requests; beyond this limit, the oldest is closed
    header_seconds: float = 10.0  # time limit for a request's headers to arrive
    body_seconds: float = 30.0  # time limit for a request's body to arrive
    body_bytes: int = 32 << 20
    tokens: int = 4096  # new tokens of a completion, if the model has no length limit
    images: int = 8  # images in one request
    image_pixels: int = 1 << 24
    finish_seconds: float = 8.0  # time for running requests to finish after a stop signal
    grace_seconds: float = 10.0  # time from the stop signal to the end of the process

    @property
    def all_connections(self) -> int:
        """Maximum number of connections of any kind; more are refused with 503."""
        return 4 * self.connections + 2 * (self.waiting + self.batch)
