"""The package of all plugins. In a new process, the import below sets up the registry, which finds the modules."""

import crosstrain.config.registry  # noqa: F401

__path__: list[str] = []
