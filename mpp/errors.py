"""What a user can mend, apart from bugs."""


class UserError(ValueError):
    """Something that the user can mend: a setting, a file, a machine. Commands print it as one line.

    Every other exception is a bug of ours or of a library, and keeps its traceback.
    """


class ReadFailed(UserError):
    """A file cannot be read, though it was tried again: a disk or a server has gone away."""


def one_line(error: BaseException) -> str:
    """What an error of a library says, in one line; its sort, where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__


class Undecodable(UserError):
    """None of many images in a row can be decoded.

    Args:
        first: the first of them, and why.
    """

    def __init__(self, message: str, first: str = ""):
        super().__init__(message)
        self.first = first


class UnreadableImage(Exception):
    """The bytes are no image that can be shown."""


class Diverged(UserError, FloatingPointError):
    """A loss or gradient is not finite."""
