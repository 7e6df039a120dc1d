"""Errors for people: the fault, its place, the value found, the remedy. The command line prints one as a single line
and exits with status 2."""


class SpecjaxError(ValueError):
    """Base of every error that a user can mend: one line with the place, the value found, what was expected and the
    remedy."""


class ConfigError(SpecjaxError):
    """A run's configuration does not validate; the message names the field."""


class DataError(SpecjaxError):
    """A corpus or prompt cannot be used; the message names the file or prompt."""


class ModelError(SpecjaxError):
    """A model directory cannot be read, written or paired; the message names the file or setting."""


class TrainingError(SpecjaxError):
    """Training cannot go on (a loss that is not finite, a directory in use); what was saved stays valid."""


class Stopped(KeyboardInterrupt):
    """SIGTERM asked to end. Training has saved, and the message says where; elsewhere, finished work stays. Like Ctrl-C
    this is no error, and passes any handler of errors."""


def unwritable(path: object, error: OSError) -> TrainingError:
    """The error for a full disk or a directory that may not be written."""
    return TrainingError(
        f"{path}: cannot be written ({(error.strerror or str(error)).lower()}); what was saved stays valid; make room "
        "or mend the directory, then run the same command again"
    )
