"""The error tree: codes are stable, and an error stays itself across the wire."""

import pytest

from expertd_protocol import errors
from expertd_protocol.errors import ErrorCode, ExitCode, ExpertdError, from_wire


def _classes(base: type[ExpertdError] = ExpertdError) -> list[type[ExpertdError]]:
    return [base, *(c for sub in base.__subclasses__() for c in _classes(sub))]


def _owner(code: ErrorCode) -> type[ExpertdError]:
    owners = [c for c in _classes() if c.__dict__.get("code") == code]
    assert len(owners) == 1, f"{code} belongs to {owners}"
    return owners[0]


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_comes_back_as_the_class_that_raised_it(code: ErrorCode) -> None:
    cls = _owner(code)
    raised = cls("12 of 34 bytes are free")

    again = from_wire(str(raised.code), raised.message)

    assert type(again) is cls
    assert str(again) == "12 of 34 bytes are free"
    assert (again.code, again.exit_code) == (raised.code, raised.exit_code)


def test_an_unknown_code_is_kept_in_the_sentence() -> None:
    error = from_wire("disk_on_fire", "the disk burns")

    assert type(error) is ExpertdError
    assert error.code == ErrorCode.INTERNAL
    assert str(error) == "disk_on_fire: the disk burns"


def test_every_exit_code_is_known_and_no_error_exits_0() -> None:
    for cls in _classes():
        assert cls.exit_code in ExitCode
        assert cls.exit_code != ExitCode.OK


def test_every_class_says_what_happened() -> None:
    for cls in _classes():
        if cls.__module__ == errors.__name__:
            assert cls.__doc__, cls
