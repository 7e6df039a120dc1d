"""Errors for people: what, where, the value found, the remedy. The command line prints them as one line, status 2."""


class SpecjaxError(ValueError):
    """The base of every error that a user can mend: one line with the place, the value found, what was expected and the
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
    """SIGTERM asked to end: training has saved and the message says where, elsewhere what was finished is kept. Like
    Ctrl-C it is no error, and passes whatever handles errors."""


def unwritable(path: object, error: OSError) -> TrainingError:
    """The error of a full disk or a directory that may not be written."""
    return TrainingError(
        f"{path}: cannot be written ({(error.strerror or str(error)).lower()}); what was saved stays valid; make room "
        "or mend the directory, then run the same command again"
    )
