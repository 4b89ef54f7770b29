"""Run two configurations side by side and find where they part."""
