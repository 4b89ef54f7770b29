"""Configuration: its sources, the registry of plugins, and typed and bounded options."""
