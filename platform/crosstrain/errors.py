"""Errors that are the user's to fix: one sentence, no traceback, exit code 1."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend; its message says what, where and what to do, in one sentence."""


class ConfigError(UserError):
    """The configuration is wrong: unknown key, wrong type, impossible combination."""


class DataError(UserError):
    """Input data is missing, empty or damaged."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged or does not fit the model."""


class TrainingError(UserError):
    """Training cannot sensibly go on: divergence, endless overflow, a full disk."""
