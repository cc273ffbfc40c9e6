"""`expertd`: parse, load the configuration, run. Exit codes are those of `ExitCode`."""

from __future__ import annotations

import sys

from expertd import __version__, logs
from expertd.app import run
from expertd.config import load_config
from expertd_protocol.errors import ExitCode, ExpertdError


def main() -> None:
    """Run the daemon in the foreground (launchd and systemd do the rest)."""
    if sys.argv[1:] == ["--version"]:
        print(f"expertd {__version__}")
        sys.exit(int(ExitCode.OK))
    try:
        config = load_config(sys.argv[1:])
        logs.set_up(config.log_level)
        run(config)
    except ExpertdError as exc:
        print(f"expertd: error: {exc}", file=sys.stderr)
        sys.exit(int(exc.exit_code))
    sys.exit(int(ExitCode.OK))


if __name__ == "__main__":
    main()
