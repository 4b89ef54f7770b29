"""Configuration: where values come from, the registry of plugins, typed and bounded options."""
