"""Max-min sharing against its own definition, and runs against what can be said of any run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.simulate.fluid import Flows, fair_rates, loads, solve


@st.composite
def networks(draw: st.DrawFn) -> tuple[Flows, np.ndarray]:
    """Flows over two of up to six resources."""
    resources = draw(st.integers(2, 6))
    count = draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    resource = np.stack([random.permutation(resources)[:2] for _ in range(count)])
    coef = random.uniform(0.5, 2.0, (count, 2))
    return Flows(random.uniform(1, 100, count), resource, coef), random.uniform(1, 10, resources)


@settings(max_examples=60, deadline=None)
@given(networks())
def test_no_resource_is_overfull_and_every_flow_is_held_back_by_a_full_one_where_no_other_is_faster(
    case: tuple[Flows, np.ndarray],
) -> None:
    flows, capacity = case
    rate = fair_rates(flows, capacity, np.arange(len(flows)))
    used = np.bincount(flows.resource.ravel(), (flows.coef * rate[:, None]).ravel(), len(capacity))
    assert (used <= capacity * (1 + 1e-9)).all()
    for i in range(len(flows)):
        held_back = [
            used[r] >= capacity[r] * (1 - 0.02) and rate[i] >= rate[(flows.resource == r).any(axis=1)].max() * (1 - 0.02)
            for r in flows.resource[i]
        ]
        assert any(held_back), f"flow {i} could be faster without slowing a slower one"


@settings(max_examples=60, deadline=None)
@given(networks())
def test_a_run_moves_every_byte_and_is_never_faster_than_its_fullest_resource(case: tuple[Flows, np.ndarray]) -> None:
    flows, capacity = case
    solution = solve(flows, capacity)
    assert solution.seconds >= loads(flows, capacity).max() * (1 - 1e-9)
    done = sum(step.usage * capacity * step.seconds for step in solution.steps)
    want = np.bincount(flows.resource.ravel(), (flows.coef * flows.amount[:, None]).ravel(), len(capacity))
    np.testing.assert_allclose(done, want, rtol=1e-6)
    slot = solution.seconds / 50
    assert solve(flows, capacity, slot).seconds == pytest.approx(solution.seconds, rel=0.15)


def test_two_flows_share_a_link_and_the_longer_one_has_it_alone_afterwards() -> None:
    flows = Flows(np.array([10.0, 30.0]), np.zeros((2, 1), np.int64), np.ones((2, 1)))
    solution = solve(flows, np.array([10.0]))
    assert solution.finish.tolist() == pytest.approx([2.0, 4.0])
    assert [step.seconds for step in solution.steps] == pytest.approx([2.0, 2.0])


def test_a_flow_over_a_link_without_capacity_is_an_error_and_not_an_endless_run() -> None:
    flows = Flows(np.array([1.0]), np.zeros((1, 1), np.int64), np.ones((1, 1)))
    with pytest.raises(ValueError, match="no way"):
        solve(flows, np.array([0.0]))
