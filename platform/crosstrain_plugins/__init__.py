"""The package of all plugins. Its modules are found by the registry, which this import starts in a new process."""

import crosstrain.config.registry  # noqa: F401

__path__: list[str] = []
