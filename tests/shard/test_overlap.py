import jax
import pytest

from memjax.shard import overlap


def test_condition_of_full_overlap_is_where_hop_and_step_take_the_same_time():
    link = overlap.Link((2**10, 2**40), (100e9, 100e9))
    rate = 800e12
    # 2 bytes an entry, 2 FLOP an entry and token: tokens = rate / bandwidth.
    step = lambda t: overlap.mlp_step(t, dim=512, hidden=2048, size=8)
    assert overlap.full_overlap_tokens(step, rate, link) == 8000
    # 6 bytes an entry for 5 matmuls instead of 2: 1.2 times as many.
    backward = lambda t: overlap.mlp_step(t, dim=512, hidden=2048, size=8, backward=True)
    assert overlap.full_overlap_tokens(backward, rate, link) == 9600
    assert overlap.hidden_share(step(4000), rate, link) == pytest.approx(0.5)
    with pytest.raises(
        ValueError, match="limit must be a number of tokens per device with which hops are hidden, got 100"
    ):
        overlap.full_overlap_tokens(step, rate, link, limit=100)


def test_bandwidth_is_interpolated():
    link = overlap.Link((2**20, 2**22), (10.0, 30.0))
    assert [link.bandwidth(2**n) for n in (18, 20, 21, 24)] == pytest.approx([10, 10, 20, 30])


def test_the_machine_is_measured():
    assert overlap.measure_matmul(64, "float32") > 0
    link = overlap.measure_link(jax.devices()[:2], sizes=(2**10, 2**12))
    assert link.sizes == (2**10, 2**12)
    assert min(link.bandwidths) > 0
    with pytest.raises(ValueError, match="devices must be at least two"):
        overlap.measure_link(jax.devices()[:1])
