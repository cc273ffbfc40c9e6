"""Log lines to stderr: event first, then key=value. launchd and systemd keep and rotate them."""

from __future__ import annotations

import logging
import sys


def set_up(level: str) -> None:
    """Send everything of `level` and above to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s", "%Y-%m-%dT%H:%M:%S%z")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
