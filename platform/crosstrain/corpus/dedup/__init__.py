"""Which documents say what an earlier one says already: in bounded memory, across all inputs."""

from crosstrain.corpus.dedup.find import Duplicates, find_duplicates

__all__ = ["Duplicates", "find_duplicates"]
