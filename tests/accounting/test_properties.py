"""What every accountant must satisfy, whatever the mechanisms: each within the error that it reports."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpkernels.accounting import Gaussian, Laplace, PureEpsilon, SampledGaussian, bound

FEW, MANY = 8, 80


def logarithmic(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


steps = logarithmic(1, 3000).map(int)
sampled = st.builds(SampledGaussian, logarithmic(0.4, 30), logarithmic(1e-4, 1), steps)
events = st.one_of(
    sampled,
    st.builds(Gaussian, logarithmic(1, 100), st.integers(1, 5)),
    st.builds(Laplace, logarithmic(1, 100), st.integers(1, 20)),
    st.builds(PureEpsilon, logarithmic(1e-3, 1), st.integers(1, 20)),
)
deltas = logarithmic(1e-12, 0.3)
accountants = st.sampled_from(["pld", "rdp"])


def certainly_less(a, b):
    """Whether the intervals show a < b beyond their errors; upper bounds of one method may differ by 0.1%."""
    return a.upper * (1 + 1e-3) + 1e-9 < b.lower or a.upper < b.upper * (1 - 2e-3) - 1e-9


def monotone(event, delta, factor, accountant):
    """In every argument."""
    here = bound([event], delta, accountant)
    assert here.upper >= here.lower >= 0
    quieter = SampledGaussian(event.noise_multiplier * factor, event.sampling_rate, event.count)
    longer = event.times(math.ceil(event.count * factor))
    rarer = SampledGaussian(event.noise_multiplier, event.sampling_rate / factor, event.count)
    assert not certainly_less(here, bound([quieter], delta, accountant))
    assert not certainly_less(bound([longer], delta, accountant), here)
    assert not certainly_less(here, bound([rarer], delta, accountant))
    assert not certainly_less(bound([event], delta / factor, accountant), here)


def composed(first, second, delta_first, delta_second, accountant):
    """epsilon(A and B; d1 + d2) <= epsilon_A(d1) + epsilon_B(d2), and never below either part at the same delta."""
    delta = min(delta_first + delta_second, 0.99)
    both = bound([first, second], delta, accountant)
    parts = bound([first], delta_first, accountant).upper + bound([second], delta_second, accountant).upper
    assert both.upper <= parts * (1 + 2e-3) + 1e-6
    for part in (first, second):
        assert not certainly_less(both, bound([part], delta, accountant))


def additive(event, cut, delta, accountant):
    """In any order and any grouping of the same mechanisms."""
    first = max(1, int(event.count * cut))
    parts = [event.times(first), event.times(event.count - first)] if first < event.count else [event]
    whole, forth, back = (bound(e, delta, accountant) for e in ([event], parts, parts[::-1]))
    for other in (forth, back):
        assert not certainly_less(whole, other)
        assert not certainly_less(other, whole)


def agreed(event, delta):
    """No lower bound lies above another's upper bound; "auto" raises otherwise, and reports the smallest."""
    answer = bound([event], delta)
    rdp, pld, classic = (bound([event], delta, name) for name in ("rdp", "pld", "rdp-classic"))
    assert max(b.lower for b in (answer, rdp, pld, classic)) <= min(b.upper for b in (answer, rdp, pld, classic))
    assert pld.upper <= rdp.upper * (1 + 1e-3) + 1e-9
    assert answer.upper <= min(rdp.upper, pld.upper)
    assert answer.lower >= pld.lower
    assert rdp.upper <= classic.upper + 1e-9


PROPERTIES = {
    monotone: (sampled, deltas, st.floats(1.01, 4), accountants),
    composed: (events, events, deltas, deltas, accountants),
    additive: (events, st.floats(0, 1), deltas, accountants),
    agreed: (events, deltas),
}
each = pytest.mark.parametrize("holds", PROPERTIES)


def check(holds, examples):
    options = settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    options(given(*PROPERTIES[holds])(holds))()


@each
def test_accountants(holds):
    check(holds, FEW)


@pytest.mark.slow
@each
def test_accountants_on_many_mechanisms(holds):
    check(holds, MANY)
