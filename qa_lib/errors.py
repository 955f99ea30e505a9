"""What a user can mend: the base of every error that the command line prints as one line."""


class UserError(ValueError):
    """An error that the user can mend; its message is a single line, and the command line prints nothing else."""


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
