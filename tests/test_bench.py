"""The benchmark's own arithmetic, and both sections in a small size; no time is asserted."""

import pytest

from bench import bench, gpu


def test_operations_of_a_pass_by_hand():
    # Per layer q, k, v, o of 192 x 192 and three matrices of 192 x 512; 4 layers; 2 a multiply-add.
    weights = 4 * (4 * 192 * 192 + 3 * 192 * 512)
    # Of 3 tokens one sees 1, one 2, one 3; scores and sums of values, 192 wide, in 4 layers.
    attention = 4 * 2 * 192 * (1 + 2 + 3)
    assert gpu.forward_flops(bench.make_model("sdpa"), 3, 1 + 2 + 3, 2) == 2 * (
        3 * weights + attention + 2 * 192 * 2048)


def test_a_ratio_is_formed_within_each_repeat():
    row = bench.compared("a", "b", "units/s", (10, 5), ([1.0, 2.0, 4.0], [1.0, 4.0, 2.0]))
    # Seconds a unit: ours 0.1, 0.2, 0.4; the other's 0.2, 0.8, 0.4.
    assert row["ratio"] == pytest.approx([2, 1, 4])
    assert (row["ours"], row["other"]) == pytest.approx((5, 2.5))


@pytest.mark.parametrize("difference", [1e-4, float("nan")])
def test_work_that_is_not_the_same_stops_the_benchmark(difference):
    bench.check("losses", 1e-6, 1e-5)
    with pytest.raises(SystemExit, match="losses"):
        bench.check("losses", difference, 1e-5)


def test_both_sections_compare_the_same_work(capsys):
    bench.main(["--quick"])
    said = capsys.readouterr().out
    assert "train step, 1/7" in said and "train step, 1/2" in said and "rollout, 4 slots" in said
