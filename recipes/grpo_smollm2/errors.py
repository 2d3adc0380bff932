"""What a run says when it cannot start."""


class RecipeError(Exception):
    """One sentence for the person who started the run: what is wrong, what is accepted, what to do.

    Attributes:
        exit_code: what a command should exit with; 2, the call was wrong.
    """

    exit_code = 2
