"""Errors that a person can act on: what is wrong, where, and what to do about it."""


class ConfideError(Exception):
    """Base of every error that the command line prints without a traceback."""


class ConfigError(ConfideError):
    """A setting is missing, out of range, or contradicts another one."""


class DataError(ConfideError):
    """Records, columns or labels are not what the task needs."""


class ModelError(ConfideError):
    """A model can't be loaded, trained exactly, or combined with another."""


class PrivacyError(ConfideError):
    """No valid privacy claim could be made; nothing is trained or released."""


class MergeError(ConfideError):
    """Models can't be merged; names the tensor, the models and the shapes."""


class ReleaseError(ConfideError):
    """A release folder is incomplete, altered, or can't be written."""


class ResumeError(ConfideError):
    """An unfinished run can't go on from here, or is at work already."""
