"""Runs that go on in the same processes when a worker is lost, and take up new workers."""
