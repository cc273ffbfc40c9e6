"""Every setting of the daemon: its key, default and meaning. TOML file < environment < flags.

The file is config.toml in the platform's configuration directory, or what `EXPERTD_CONFIG` names; the
environment is `EXPERTD_<KEY>`; the flag is `--<key-with-dashes>`. Unknown keys and wrong values stop the
start with exit code 78, a budget that is no size with 4: a setting is never ignored, and nothing falls
back to ignoring the budget (B04).
"""

from __future__ import annotations

import difflib
import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    CliSuppress,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from expertd_protocol.endpoints import default_run_dir
from expertd_protocol.errors import BadConfig

CONFIG_ENV = "EXPERTD_CONFIG"
#: Variables of the workers' side; every other `EXPERTD_*` must be a key of `DaemonConfig`.
WORKER_ENV = (
    "EXPERTD_ARENA_VIEW",
    "EXPERTD_DAEMON_DEADLINE_SECONDS",
    "EXPERTD_MISS_DEADLINE_SECONDS",
    "EXPERTD_MLX_CACHE_MB",
)


def config_path() -> Path:
    """Return where the TOML file is looked for; it need not exist."""
    if chosen := os.environ.get(CONFIG_ENV):
        return Path(chosen).expanduser()
    return platformdirs.user_config_path("expertd") / "config.toml"


class DaemonConfig(BaseSettings):
    """Settings of `expertd`."""

    model_config = SettingsConfigDict(
        env_prefix="EXPERTD_",
        extra="forbid",
        frozen=True,
        cli_prog_name="expertd",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    budget: str = Field(
        "auto",
        # no percent sign here: whether argparse gets it escaped depends on pydantic-settings
        description="memory for experts: auto, a size as 24GiB, or a percentage of all memory",
    )
    run_dir: Path = Field(
        default_factory=default_run_dir,
        description="directory (0700) of the sockets; its path must be short",
    )
    read_mode: Literal["auto", "direct", "buffered"] = Field(
        "auto", description="direct bypasses the page cache; auto falls back where that fails"
    )
    reader_threads: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None, description="threads that read from one device; measured once for each when not set"
    )
    warm: bool = Field(
        True, description="read a model that fits the budget whole, in the background"
    )
    prefetch: Literal["auto", "off"] = Field(
        "auto",
        description="read what a worker will probably want next, while the device is idle and where "
        "a worker finds that this is faster",
    )
    max_sessions: Annotated[int, Field(ge=1, le=4096)] = Field(
        64, description="workers that may be attached at once"
    )
    max_in_flight: Annotated[int, Field(ge=1, le=64)] = Field(
        4, description="unanswered requests of one worker"
    )
    grace_ms: Annotated[float, Field(ge=0, le=1000, allow_inf_nan=False)] = Field(
        1.0, description="how long an evicted slot rests before it is reused, milliseconds"
    )
    drain_seconds: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = Field(
        4.0, description="how long SIGTERM waits for requests that are being served"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="what goes to stderr"
    )
    poison_free_slots: CliSuppress[bool] = Field(
        False, description="fill free slots with 0xFF, to find a use after free (tests)"
    )
    lifeline_fd: CliSuppress[Annotated[int, Field(ge=3)] | None] = Field(
        None, description="stop when this inherited pipe reaches its end (private daemons)"
    )

    @field_validator("run_dir")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        file = TomlConfigSettingsSource(settings_cls, toml_file=config_path())
        return init_settings, env_settings, file


def refuse_unknown_variables() -> None:
    """Raise `BadConfig` for an `EXPERTD_*` variable that means nothing: a typo is not a setting."""
    keys = [f"EXPERTD_{name.upper()}" for name in DaemonConfig.model_fields]
    known = [*keys, *WORKER_ENV, CONFIG_ENV]
    for name in sorted(os.environ):
        if name.startswith("EXPERTD_") and name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise BadConfig(f"the environment variable {name} is not a setting; {hint}")


def load_config(args: list[str]) -> DaemonConfig:
    """Return the settings of this start.

    Raises:
        BadConfig: a wrong value or an unknown key, named with where it may come from.
        SystemExit: `--help`, or a flag that does not exist (exit code 2).
    """
    refuse_unknown_variables()
    try:
        return DaemonConfig(_cli_parse_args=args)
    except ValidationError as exc:
        lines = "; ".join(
            f"{'.'.join(str(p) for p in e['loc'])}: {e['msg']}"
            for e in exc.errors(include_url=False, include_input=False)
        )
        raise BadConfig(
            f"configuration is wrong: {lines} (flags, EXPERTD_* and {config_path()} were read)"
        ) from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as exc:
        raise BadConfig(f"{config_path()} cannot be read: {exc}") from exc
