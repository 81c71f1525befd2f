"""Reductions, against sums done by hand and against brute force."""

from __future__ import annotations

import math
import pickle
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_support import SECONDS, Clock, failed_record, record, recorded

from weight_sync.errors import SessionError
from weight_sync.observe.recorder import Recorder, SpanLog
from weight_sync.observe.records import PHASES, RankStats, Span, SyncRecord, busy_seconds, reduce_phases


def test_a_sync_is_reduced_to_the_numbers_a_person_would_compute() -> None:
    made = record()
    assert made.phases == SECONDS
    assert list(made.phases) == [phase for phase in PHASES if phase in SECONDS]
    assert (made.bytes, made.gathered_bytes, made.seconds) == (4_000_000_000, 0, 3.5)
    assert made.gb_per_s == 2.0
    assert made.share_of_limit == 0.5
    assert made.sync_gb_per_s == pytest.approx(4 / 3.5)
    assert made.rank_seconds == {"trainer 0": 2.0, "trainer 1": 1.0}
    assert made.rank_bytes == {"trainer 0": 3_000_000_000, "trainer 1": 1_000_000_000}
    assert made.rank_stats == RankStats(ranks=2, max=2.0, mean=1.5, skew=2.0 / 1.5, slowest="trainer 0")
    assert made.stalled_seconds == 3.25
    assert made.with_step_seconds(13.0).bubble_share == 0.25
    assert (made.verified, made.committed, made.error, made.tokens_match) == (True, True, None, None)
    assert made.with_tokens_match(False).tokens_match is False


def test_what_is_unknown_is_none_and_never_zero() -> None:
    made = record(limit=None, seconds={"plan": 0.5})
    assert made.phases.keys() == {"plan", "write"}, "the ranks' own write spans still count"
    assert (made.share_of_limit, made.bubble_share, made.tokens_match) == (None, None, None)
    assert SyncRecord(1, "s", 0, 0, 1.0, {}, False, False, 0.0).gb_per_s is None


def test_a_phase_only_ranks_measured_takes_the_slowest_rank_and_says_so() -> None:
    clock = Clock()
    recorder = Recorder(1, "s", clock=clock, wall=Clock())
    with recorder:
        clock.tick(5.0)
        recorder.add_spans("trainer 0", [Span("", "quantise", 0.0, 1.0, 0.0)])
        recorder.add_spans("trainer 1", [Span("", "quantise", 9.0, 12.0, 0.0)])
    (times,) = recorder.record().phase_times
    assert (times.phase, times.seconds, times.timed_by) == ("quantise", 3.0, "ranks")


def test_a_phase_that_comes_in_rounds_adds_up_without_the_time_between() -> None:
    clock = Clock()
    recorder = Recorder(1, "s", clock=clock, wall=Clock())
    with recorder:
        for _ in range(3):
            with recorder.phase("write"):
                clock.tick(1.0)
            clock.tick(10.0)
    assert recorder.record().phases == {"write": 3.0}


def test_counted_bytes_win_over_the_bytes_in_spans() -> None:
    assert record(bytes=8_000_000_000).gb_per_s == 4.0


def test_a_failed_sync_is_recorded_with_its_phase_and_error_and_is_not_verified() -> None:
    made = failed_record(3)
    assert made.error == "write: OSError: endpoint 10.0.0.1:5 refused"
    assert (made.verified, made.committed, made.version) == (False, False, 3)
    assert made.phases == {"pause": 0.5, "write": 1.0}
    assert made.stalled_seconds == 1.5, "nothing resumed the engines"


def test_a_sync_that_fails_after_the_digests_agreed_does_not_count_as_verified_but_keeps_its_commit() -> None:
    recorder = Recorder(4, "s")

    def sync() -> None:
        with recorder:
            recorder.mark_verified()
            recorder.mark_committed()
            with recorder.phase("resume"):
                raise ConnectionError("engine gone")

    with pytest.raises(ConnectionError):
        sync()
    made = recorder.record()
    assert (made.verified, made.committed, made.error) == (False, True, "resume: ConnectionError: engine gone")


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit])
def test_every_exception_passes_through_unchanged_and_its_span_is_kept(kind: type[BaseException]) -> None:
    error = kind("why")
    recorder = Recorder(1, "s")
    with pytest.raises(kind) as caught, recorder, recorder.phase("verify"):
        raise error
    assert caught.value is error
    assert [span.phase for span in recorder.spans] == ["verify"]
    assert recorder.record().error == f"verify: {kind.__name__}: why"


def test_an_exception_the_session_handles_inside_the_sync_is_no_error_of_the_sync() -> None:
    recorder = Recorder(1, "s")
    with recorder:
        with pytest.raises(OSError), recorder.phase("write"):
            raise OSError("first attempt")
        with recorder.phase("write"):
            recorder.count(retries=1)
    made = recorder.record()
    assert (made.error, made.retries) == (None, 1)


def test_phases_out_of_order_use_are_refused() -> None:
    recorder = Recorder(1, "s")
    with pytest.raises(SessionError, match="not running"), recorder.phase("plan"):
        pass
    with pytest.raises(SessionError, match="not ended"):
        recorder.record()
    with recorder:
        with recorder.phase("plan"), pytest.raises(SessionError, match="inside phase 'plan'"), recorder.phase("write"):
            pass
        with pytest.raises(ValueError, match=r"'transfer'.*plan, pause, gather"), recorder.phase("transfer"):  # type: ignore[arg-type]
            pass
        with pytest.raises(ValueError, match="own label"):
            recorder.add_spans("controller", [])
    assert recorder.record().error is None
    with pytest.raises(SessionError, match="used before"), recorder:
        pass


def test_phase_names_are_announced_when_they_begin() -> None:
    seen: list[str] = []
    recorder = Recorder(1, "s", on_phase=seen.append)
    with recorder:
        with recorder.phase("plan"):
            assert seen == ["plan"]
        with recorder.phase("write"):
            pass
    assert seen == ["plan", "write"]


def test_a_rank_measures_with_real_clocks_and_its_spans_travel_as_plain_data() -> None:
    log = SpanLog("trainer 7")
    with log.span("write") as opened:
        time.sleep(0.01)
        opened.nbytes = 123
    with pytest.raises(RuntimeError, match="torn"), log.span("verify", nbytes=5):
        raise RuntimeError("torn")
    sent = pickle.loads(pickle.dumps(log.take()))
    assert log.take() == []
    recorder = Recorder(1, "s")
    with recorder:
        recorder.add_spans("trainer 7", sent)
    spans = recorder.spans
    assert [(span.rank, span.phase, span.nbytes) for span in spans] == [("trainer 7", "write", 123), ("trainer 7", "verify", 5)]
    assert spans[0].seconds >= 0.01
    assert abs(spans[0].wall - time.time()) < 60
    assert Span.from_json(spans[0].to_json()) == spans[0]


@pytest.mark.parametrize(
    ("span", "text"),
    [
        (("r", "transfer", 0.0, 1.0, 0.0, 0), "unknown phase 'transfer'"),
        (("r", "write", 2.0, 1.0, 0.0, 0), "before it starts"),
        (("r", "write", 0.0, math.nan, 0.0, 0), "before it starts"),
        (("r", "write", 0.0, 1.0, 0.0, -1), "-1 bytes"),
    ],
)
def test_an_impossible_span_is_refused_by_rank_and_phase(span: tuple, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Span(*span)


def test_a_limit_or_step_time_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="limit"):
        record(limit=0.0)
    with pytest.raises(ValueError, match="step_seconds"):
        record().with_step_seconds(-1.0)


def test_records_survive_pickling_between_processes() -> None:
    made = record()
    assert pickle.loads(pickle.dumps(made)) == made


ticks = st.integers(0, 60)


@given(st.lists(st.tuples(ticks, ticks), max_size=12))
def test_busy_seconds_equals_counting_covered_ticks(pairs: list[tuple[int, int]]) -> None:
    spans = [Span("r", "write", float(min(pair)), float(max(pair)), 0.0) for pair in pairs]
    covered = {tick for pair in pairs for tick in range(min(pair), max(pair))}
    assert busy_seconds(spans) == len(covered)


@given(st.dictionaries(st.sampled_from([f"rank {n}" for n in range(30)]), st.floats(0, 1e6), min_size=1))
def test_rank_statistics_stay_in_order_and_name_a_rank_that_is_slowest(values: dict[str, float]) -> None:
    stats = RankStats.over(values)
    assert stats is not None
    assert min(values.values()) <= stats.mean * (1 + 1e-12)
    assert stats.mean <= stats.max == values[stats.slowest] == max(values.values())
    assert stats.skew >= 1.0
    assert stats.ranks == len(values)


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 4), ticks, ticks, st.integers(0, 100)), max_size=30))
def test_reduction_keeps_every_byte_and_does_not_depend_on_the_order_of_spans(rows: list[tuple]) -> None:
    spans = [Span(f"rank {r}", phase, float(min(a, b)), float(max(a, b)), 0.0, n) for phase, r, a, b, n in rows]
    times = reduce_phases(spans)
    assert times == reduce_phases(reversed(spans))
    assert sum(t.nbytes for t in times) == sum(span.nbytes for span in spans)
    assert [t.phase for t in times] == [phase for phase in PHASES if phase in {span.phase for span in spans}]
    for t in times:
        assert t.ranks is not None
        assert t.seconds == t.ranks.max <= sum(span.seconds for span in spans if span.phase == t.phase)


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 50), st.integers(0, 50)), max_size=12))
def test_controller_phases_never_add_up_to_more_than_the_sync(steps: list[tuple]) -> None:
    clock = Clock(0.0)
    recorder = Recorder(1, "s", clock=clock, wall=Clock())
    with recorder:
        for phase, inside, between in steps:
            with recorder.phase(phase):
                clock.tick(inside)
            clock.tick(between)
    made = recorder.record()
    assert sum(made.phases.values()) == sum(inside for _, inside, _ in steps) <= made.seconds
    assert made.stalled_seconds <= made.seconds


def test_json_of_a_record_has_the_agreed_keys_and_only_plain_numbers() -> None:
    data = recorded(5).record().with_tokens_match(True).to_json()
    agreed = {"version", "bytes", "gathered_bytes", "seconds", "phases", "verified", "tokens_match", "error"}
    assert agreed <= data.keys()
    assert (data["version"], data["tokens_match"], data["phases"]["write"]) == (5, True, 2.0)
    assert data["limit_gb_per_s"] == 4.0
