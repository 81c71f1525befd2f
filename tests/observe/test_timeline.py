"""The picture: well-formed, to scale, legible at any number of ranks."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from observe_support import failed_record, recorded

from weight_sync.observe.records import PHASES, Span
from weight_sync.observe.timeline import COLOURS, LABEL, PLOT, timeline_svg, write_timeline

SVG = "{http://www.w3.org/2000/svg}"


def bars(text: str) -> list[ElementTree.Element]:
    """The span bars: the rectangles that carry a hint."""
    return [node for node in ElementTree.fromstring(text).iter(f"{SVG}rect") if node.find(f"{SVG}title") is not None]


def labels(text: str) -> list[str]:
    return [node.text or "" for node in ElementTree.fromstring(text).iter(f"{SVG}text") if node.get("text-anchor") == "end"]


def test_bars_stand_where_the_clock_says_in_the_colour_of_their_phase(tmp_path: Path) -> None:
    made = recorded(1)
    path = write_timeline(tmp_path, made.record(), made.spans)
    text = path.read_text()
    assert path.name == "timeline-1.svg"
    assert "version 1: 4.00 GB in 3.500 s, verified" in text
    drawn = bars(text)
    assert len(drawn) == 9
    trainer = next(bar for bar in drawn if "trainer 1: write" in (bar.findtext(f"{SVG}title") or ""))
    assert float(trainer.attrib["x"]) == pytest.approx(LABEL + PLOT * 0.375 / 3.5, abs=0.01)
    assert float(trainer.attrib["width"]) == pytest.approx(PLOT * 1.0 / 3.5, abs=0.01)
    assert trainer.attrib["fill"] == COLOURS["write"]
    assert trainer.findtext(f"{SVG}title") == "trainer 1: write, 1.000 s, 1.00 GB, 1.00 GB/s"
    assert labels(text) == ["controller", "trainer 0", "trainer 1"]


def test_a_retry_of_a_version_does_not_overwrite_the_first_picture(tmp_path: Path) -> None:
    made = recorded(2)
    names = [write_timeline(tmp_path, made.record(), made.spans).name for _ in range(3)]
    assert names == ["timeline-2.svg", "timeline-2-2.svg", "timeline-2-3.svg"]


def test_a_failed_sync_is_drawn_as_far_as_it_went(tmp_path: Path) -> None:
    spans = [Span("controller", "write", 0.0, 1.0, 5.0)]
    assert ", failed" in write_timeline(tmp_path, failed_record(), spans).read_text()


def test_labels_with_markup_stay_text() -> None:
    text = timeline_svg([Span('<a&"b>', "write", 0.0, 1.0, 0.0)], title="<t> & more")
    assert labels(text) == ['<a&"b>']


def test_ranks_are_sorted_as_people_count() -> None:
    spans = [Span(f"trainer {rank}", "write", 0.0, 1.0, 0.0) for rank in (10, 9, 1)] + [
        Span("rollout", "verify", 0.0, 1.0, 1.0)
    ]
    assert labels(timeline_svg(spans, "t")) == ["rollout", "trainer 1", "trainer 9", "trainer 10"]


def test_beyond_sixty_four_rows_the_busiest_are_kept_and_the_rest_is_counted() -> None:
    spans = [Span(f"trainer {rank}", "write", 0.0, float(rank), 0.0) for rank in range(100)]
    spans.append(Span("controller", "plan", 0.0, 0.1, 0.0))
    text = timeline_svg(spans, "t")
    assert labels(text) == ["controller", *[f"trainer {rank}" for rank in range(37, 100)]]
    assert "37 less busy ranks not shown" in text


def test_a_span_without_length_still_leaves_a_mark_and_nothing_divides_by_zero() -> None:
    (bar,) = bars(timeline_svg([Span("r", "commit", 3.0, 3.0, 9.0)], "t"))
    assert float(bar.attrib["width"]) == 1.0


def test_a_picture_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no span"):
        timeline_svg([], "t")


def test_every_phase_has_its_own_colour() -> None:
    assert COLOURS.keys() == set(PHASES)
    assert len(set(COLOURS.values())) == len(PHASES)
