"""The cache's messages: the logger ``flashgen.cache``, imported only when there is something to say."""

from __future__ import annotations


def warn(message: str) -> None:
    """Log a warning; unlike ``warnings.warn`` it cannot become an exception that fails the caller."""
    import logging

    logging.getLogger("flashgen.cache").warning("%s", message)


def inform(message: str) -> None:
    """Log progress."""
    import logging

    logging.getLogger("flashgen.cache").info("%s", message)
