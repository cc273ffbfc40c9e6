"""The error tree: one class per condition that a caller handles differently.

Every class has a stable `code`, which crosses the wire with the message; `from_wire` makes the same
class again on the other side. Messages carry the numbers and say what to do next.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum, unique


@unique
class ErrorCode(StrEnum):
    """Stable names of conditions; never renamed, never reused."""

    INTERNAL = "internal"
    BAD_REQUEST = "bad_request"
    VERSION_MISMATCH = "version_mismatch"
    NOT_AUTHORIZED = "not_authorized"
    UNKNOWN_SESSION = "unknown_session"
    TOO_MANY_SESSIONS = "too_many_sessions"
    TOO_MANY_IN_FLIGHT = "too_many_in_flight"
    QUOTA_EXCEEDED = "quota_exceeded"
    DRAINING = "draining"

    MODEL_NOT_FOUND = "model_not_found"
    NOT_A_MODEL = "not_a_model"
    DENSE_MODEL = "dense_model"
    UNSUPPORTED_MODEL = "unsupported_model"
    UNSUPPORTED_LAYOUT = "unsupported_layout"
    GIT_LFS_POINTER = "git_lfs_pointer"
    BAD_HEADER = "bad_header"
    TRUNCATED_FILE = "truncated_file"
    MISSING_SHARD = "missing_shard"
    DUPLICATE_TENSOR = "duplicate_tensor"
    UNREADABLE_FILE = "unreadable_file"
    MODEL_CHANGED = "model_changed"
    READ_FAILED = "read_failed"
    DAMAGED = "damaged"
    NO_SPACE = "no_space"

    BAD_BUDGET = "bad_budget"
    BUDGET_TOO_SMALL = "budget_too_small"
    BUDGET_EXHAUSTED = "budget_exhausted"
    OUT_OF_MEMORY = "out_of_memory"

    DAEMON_UNAVAILABLE = "daemon_unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ALREADY_RUNNING = "already_running"
    UNSAFE_PATH = "unsafe_path"
    PATH_TOO_LONG = "path_too_long"
    BAD_CONFIG = "bad_config"
    FORKED = "forked"
    STALE_EXPERTS = "stale_experts"
    CONTEXT_EXCEEDED = "context_exceeded"
    BAD_TRACE = "bad_trace"
    MISSING_EXTRA = "missing_extra"


@unique
class ExitCode(IntEnum):
    """What `expertd` and `expertctl` exit with (the table is in README.md)."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    MODEL = 3
    BUDGET = 4
    DAEMON = 5
    ALREADY_RUNNING = 6
    INEXACT = 7
    CONFIG = 78  # EX_CONFIG of sysexits.h
    INTERRUPTED = 130


#: What fits into one string on the wire (64 KiB) at four bytes a character.
MESSAGE_MAX_CHARS = 16_000


class ExpertdError(Exception):
    """Base of everything this project raises on purpose. `str(error)` is one clear sentence."""

    code: ErrorCode = ErrorCode.INTERNAL
    exit_code: ExitCode = ExitCode.FAILURE

    def __init__(self, message: str) -> None:
        if len(message) > MESSAGE_MAX_CHARS:
            message = message[: MESSAGE_MAX_CHARS - 4] + " ..."
        super().__init__(message)
        self.message = message


class ProtocolError(ExpertdError):
    """A message that cannot be understood or is not allowed."""

    code = ErrorCode.BAD_REQUEST


class VersionMismatch(ProtocolError):
    """The two sides speak different protocol versions."""

    code = ErrorCode.VERSION_MISMATCH


class NotAuthorized(ProtocolError):
    """The peer is another user."""

    code = ErrorCode.NOT_AUTHORIZED


class UnknownSession(ProtocolError):
    """The daemon does not know this session; attach again."""

    code = ErrorCode.UNKNOWN_SESSION


class TooManySessions(ProtocolError):
    """The daemon serves as many clients as it may."""

    code = ErrorCode.TOO_MANY_SESSIONS


class TooManyInFlight(ProtocolError):
    """A session has used up its credit of unanswered requests."""

    code = ErrorCode.TOO_MANY_IN_FLIGHT


class QuotaExceeded(ProtocolError):
    """A session asked for more experts at once than it may hold."""

    code = ErrorCode.QUOTA_EXCEEDED


class Draining(ProtocolError):
    """The daemon is stopping; wait for the next one and attach again."""

    code = ErrorCode.DRAINING
    exit_code = ExitCode.DAEMON


class ModelError(ExpertdError):
    """Something is wrong with a model folder; the daemon serves on."""

    exit_code = ExitCode.MODEL


class ModelNotFound(ModelError):
    """There is nothing at that path."""

    code = ErrorCode.MODEL_NOT_FOUND


class NotAModel(ModelError):
    """The path exists but holds no safetensors model."""

    code = ErrorCode.NOT_A_MODEL


class DenseModel(ModelError):
    """The model has no routed experts; plain mlx-lm runs it."""

    code = ErrorCode.DENSE_MODEL


class UnsupportedModel(ModelError):
    """mlx-lm does not know this family."""

    code = ErrorCode.UNSUPPORTED_MODEL


class UnsupportedLayout(ModelError):
    """The experts are stored in a way that cannot be read in place."""

    code = ErrorCode.UNSUPPORTED_LAYOUT


class GitLfsPointer(ModelError):
    """The file is a git-lfs pointer, not weights."""

    code = ErrorCode.GIT_LFS_POINTER


class BadHeader(ModelError):
    """A safetensors header that is malformed, too large or inconsistent."""

    code = ErrorCode.BAD_HEADER


class TruncatedFile(ModelError):
    """The file ends before its last tensor does."""

    code = ErrorCode.TRUNCATED_FILE


class MissingShard(ModelError):
    """The index names a file that is not there."""

    code = ErrorCode.MISSING_SHARD


class DuplicateTensor(ModelError):
    """One tensor name stands twice, in one header or in two files."""

    code = ErrorCode.DUPLICATE_TENSOR


class UnreadableFile(ModelError):
    """The file exists but the daemon may not read it."""

    code = ErrorCode.UNREADABLE_FILE


class ModelChanged(ModelError):
    """A file was replaced or rewritten after it was opened; its old and new bytes are never mixed."""

    code = ErrorCode.MODEL_CHANGED


class ReadFailed(ModelError):
    """The device did not deliver an expert."""

    code = ErrorCode.READ_FAILED


class Damaged(ModelError):
    """Bytes on the disk are not those that their checksum was made of."""

    code = ErrorCode.DAMAGED


class NoSpace(ExpertdError):
    """The disk has not enough room for what is to be written."""

    code = ErrorCode.NO_SPACE


class BudgetError(ExpertdError):
    """The memory budget does not allow it."""

    exit_code = ExitCode.BUDGET


class BadBudget(BudgetError):
    """The budget text is not a size."""

    code = ErrorCode.BAD_BUDGET


class BudgetTooSmall(BudgetError):
    """The budget is below the smallest working set of the model; the message has the minimum in bytes."""

    code = ErrorCode.BUDGET_TOO_SMALL


class BudgetExhausted(BudgetError):
    """Others hold the budget; the message says who holds what."""

    code = ErrorCode.BUDGET_EXHAUSTED


class OutOfMemory(BudgetError):
    """The system refused the shared memory that the budget allows."""

    code = ErrorCode.OUT_OF_MEMORY


class DaemonUnavailable(ExpertdError):
    """No daemon answers, or it went away and none came back in time."""

    code = ErrorCode.DAEMON_UNAVAILABLE
    exit_code = ExitCode.DAEMON


class DeadlineExceeded(ExpertdError):
    """The daemon is there but did not answer in time."""

    code = ErrorCode.DEADLINE_EXCEEDED
    exit_code = ExitCode.DAEMON


class AlreadyRunning(ExpertdError):
    """Another daemon holds this run directory."""

    code = ErrorCode.ALREADY_RUNNING
    exit_code = ExitCode.ALREADY_RUNNING


class UnsafePath(ExpertdError):
    """The run directory or a socket path is not ours alone."""

    code = ErrorCode.UNSAFE_PATH
    exit_code = ExitCode.CONFIG


class PathTooLong(ExpertdError):
    """A socket path does not fit into the kernel's 103 bytes."""

    code = ErrorCode.PATH_TOO_LONG
    exit_code = ExitCode.CONFIG


class BadConfig(ExpertdError):
    """The configuration is wrong; restarting will not help."""

    code = ErrorCode.BAD_CONFIG
    exit_code = ExitCode.CONFIG


class Forked(ExpertdError):
    """The client was carried over a fork; only the process that made it may use it."""

    code = ErrorCode.FORKED


class StaleExperts(ExpertdError):
    """Slots changed under a forward pass again and again (pin rule 6); must never happen."""

    code = ErrorCode.STALE_EXPERTS


class ContextExceeded(ExpertdError):
    """The prompt is longer than the model's context."""

    code = ErrorCode.CONTEXT_EXCEEDED
    exit_code = ExitCode.USAGE


class BadTrace(ExpertdError):
    """A file is no routing trace, or traces do not fit together."""

    code = ErrorCode.BAD_TRACE
    exit_code = ExitCode.USAGE


class MissingExtra(ExpertdError):
    """A package that only some commands need is not installed."""

    code = ErrorCode.MISSING_EXTRA
    exit_code = ExitCode.USAGE


def _all_classes(base: type[ExpertdError]) -> list[type[ExpertdError]]:
    return [base, *(c for sub in base.__subclasses__() for c in _all_classes(sub))]


def from_wire(code: str, message: str) -> ExpertdError:
    """Make the error that the other side raised; an unknown code becomes a plain `ExpertdError`."""
    for cls in _all_classes(ExpertdError):
        if cls.__dict__.get("code") == code:
            return cls(message)
    return ExpertdError(f"{code}: {message}")
