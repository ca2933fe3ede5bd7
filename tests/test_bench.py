"""The benchmark's own arithmetic, and one of its sections in a small size; nothing is timed."""

import json

import pytest

from bench import bench


def test_operations_of_a_pass_by_hand():
    # Per layer q, k, v, o of 192 x 192 and three matrices of 192 x 512; 4 layers; 2 a multiply-add.
    weights = 4 * (4 * 192 * 192 + 3 * 192 * 512)
    # Of 3 tokens one sees 1, one 2, one 3; scores and sums of values, 192 wide, in 4 layers.
    attention = 4 * 2 * 192 * (1 + 2 + 3)
    assert bench.forward_flops(bench.make_model("sdpa"), [1, 2, 3], 2) == 2 * (
        3 * weights + attention + 2 * 192 * 2048)


def test_a_ratio_is_formed_within_each_repeat():
    row = bench.compared("a", "b", "units/s", (10, 5), ([1.0, 2.0, 4.0], [1.0, 4.0, 2.0]), 0.5)
    # Seconds a unit: ours 0.1, 0.2, 0.4; theirs 0.2, 0.8, 0.4.
    assert row["ratio"] == pytest.approx([2, 1, 4])
    assert (row["ours"], row["theirs"], row["of_floor"]) == pytest.approx((5, 2.5, 0.25))
    assert "| 2.00 (1.00-4.00) | 0.25     |" in bench.markdown([row])


def test_work_that_is_not_the_same_stops_the_benchmark():
    assert bench.check("losses", 1e-6, 1e-5) == 1e-6
    for difference in (1e-4, float("nan")):
        with pytest.raises(SystemExit, match="losses differ"):
            bench.check("losses", difference, 1e-5)


def test_mock_trajectories_have_the_stated_sizes_and_pairs():
    groups = bench.make_groups(20, 698, 112, rollouts=2)
    lengths = [len(s.ids) for g in groups for s in g.sequences]
    actions = [s.action_tokens for g in groups for s in g.sequences]
    assert sum(lengths) / 100 == pytest.approx(698, rel=0.05)
    assert sum(actions) / 100 == pytest.approx(112, rel=0.05)
    assert all(len(g.sequences) == 5 and len(g.pairs) == 4 + 2 * 2 for g in groups)


@pytest.mark.parametrize("common, alike", [(1 / 7, 99), (1 / 2, 349)])
def test_mock_trajectories_of_an_instruction_begin_alike(common, alike):
    for g in bench.make_groups(3, 698, 112, common=common):
        assert len({tuple(s.ids[:alike]) for s in g.sequences}) == 1
        assert len({tuple(s.action_mask[:alike]) for s in g.sequences}) == 1
        assert len({tuple(s.ids[:alike + 3]) for s in g.sequences}) == 3


def test_the_rollout_section_compares_equal_episodes_and_writes_its_rows(tmp_path):
    out = tmp_path / "bench.json"
    bench.main(["--quick", "--out", str(out), "rollout"])
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2 and all(r["differences"]["episodes"] == 0 for r in rows)
