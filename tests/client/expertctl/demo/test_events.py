"""Lines between the command and its workers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.demo.events import (
    Done,
    Event,
    Failed,
    Job,
    Ready,
    Text,
    dump,
    dump_job,
    parse,
    parse_job,
)

_TEXT = st.text(max_size=40)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Ready, versions=st.dictionaries(_TEXT, _TEXT, max_size=3)),
    st.builds(Text, prompt=st.integers(0, 9), token=st.integers(0, 2**31), text=_TEXT),
    st.builds(Done, seconds=st.floats(0, 1e6)),
    st.builds(Failed, code=_TEXT, message=_TEXT, exit_code=st.integers(0, 255)),
)


@given(EVENTS)
def test_every_event_is_one_line_and_comes_back(event: Event) -> None:
    line = dump(event)

    assert "\n" not in line
    assert parse(line) == event


@given(st.lists(_TEXT, min_size=1, max_size=3), st.none() | _TEXT)
def test_a_job_is_one_line_and_comes_back(prompts: list[str], socket: str | None) -> None:
    job = Job("a", "/m", tuple(prompts), 8, socket)

    assert "\n" not in dump_job(job)
    assert parse_job(dump_job(job)) == job


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "3", "{}", '{"event": "huh"}', '{"event": "done"}',
     '{"event": "done", "seconds": 1, "more": 2}'],
)  # fmt: skip
def test_what_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - a JSON error is one too
        parse(line)


def test_events_are_named_by_what_they_are() -> None:
    assert json.loads(dump(Done(1.5))) == {"event": "done", "seconds": 1.5}
