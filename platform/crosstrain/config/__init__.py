"""Configuration: its sources, the registry of plugins, typed and bounded options."""
