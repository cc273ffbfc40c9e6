"""Plain tables."""

from expertctl.table import table


def test_columns_align_and_nothing_is_cut_off() -> None:
    path = "/a/very/long/path/" + "x" * 300
    text = table(("name", "n"), [(path, "1"), ("b", "1,000")])

    lines = text.splitlines()
    assert lines[1] == f"{path}      1"
    assert lines[2] == "b".ljust(len(path)) + "  1,000"
    assert all(line == line.rstrip() for line in lines)


def test_a_table_without_rows_is_its_headers() -> None:
    assert table(("a", "b"), []) == "a  b"
