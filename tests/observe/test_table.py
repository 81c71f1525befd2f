"""The table at the end: its cells, and its plain form."""

from __future__ import annotations

from observe_support import failed_record, record

from weight_sync.observe.table import COLUMNS, rows, table_text
from weight_sync.observe.units import bytes_text, seconds_text


def test_each_phase_is_a_row_and_totals_are_over_the_whole_sync() -> None:
    made = record(1)
    assert rows([made]) == [
        ("1", "plan", "0.2500", "", "", ""),
        ("1", "pause", "0.1250", "", "", ""),
        ("1", "write", "2.0000", "4.00 GB", "2.00", "50%"),
        ("1", "verify", "0.5000", "", "", ""),
        ("1", "commit", "0.2500", "", "", ""),
        ("1", "post", "0.2500", "", "", ""),
        ("1", "resume", "0.1250", "", "", ""),
        ("1", "total (verified)", "3.5000", "4.00 GB", "1.14", "29%"),
    ]


def test_several_syncs_end_in_a_grand_total() -> None:
    assert rows([record(1), record(2)])[-1] == ("all", "2 syncs", "7.0000", "8.00 GB", "1.14", "29%")


def test_limits_that_differ_between_syncs_have_no_common_share() -> None:
    assert rows([record(1), record(2, limit=None)])[-1][-1] == ""


def test_the_plain_form_has_every_cell_and_no_escape_code() -> None:
    text = table_text([record(1), record(2)])
    assert "\x1b" not in text
    for name in COLUMNS:
        assert name in text
    for cells in rows([record(1), record(2)]):
        assert any(all(cell in line for cell in cells) for line in text.splitlines()), cells


def test_a_failed_sync_says_so_and_its_error_is_shown_whole() -> None:
    text = table_text([failed_record(3, "a" * 150 + " [bold] end")])
    assert "total (failed)" in text
    joined = text.replace("\n", "").replace(" ", "")
    assert "a" * 150 + "[bold]end" in joined


def test_numbers_are_decimal_and_readable() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 999_999, 61_060_000_000, 2e12)] == [
        "0 B",
        "999 B",
        "1.00 KB",
        "1.00 MB",
        "61.06 GB",
        "2.00 TB",
    ]
    assert [seconds_text(s) for s in (0.0032, 1.25)] == ["3.2 ms", "1.250 s"]
