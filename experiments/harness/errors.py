"""The error that users of an experiment can put right."""


class ExperimentError(ValueError):
    """Something the user of an experiment can put right; shown without a traceback."""
