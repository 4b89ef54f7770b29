"""Which documents say what an earlier one says already: in bounded memory, across all inputs."""

from crosstrain.corpus.dedup.find import Repeated, find_repeated

__all__ = ["Repeated", "find_repeated"]
