import json

import pytest

from benchmarks import streaming


def test_memory_and_time_of_a_profile_are_measured_and_estimated(tmp_path, capsys):
    streaming.write_checkpoint(tmp_path, 64, 128, 2)
    streaming.main(["--measure", str(tmp_path), "streamed", "8"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["n_layers"] == 2
    assert 0 < found["gigabytes"] < 1
    assert found["seconds"] > 0
    assert found["estimated_seconds"] > 0


@pytest.mark.slow
@pytest.mark.subprocess
def test_the_estimate_of_memory_is_an_upper_bound_within_a_factor_of_three(tmp_path):
    streaming.write_checkpoint(tmp_path, 1152, 2048, 2)
    for rank in (0, 64):
        found = streaming.in_a_process("--measure", str(tmp_path), "streamed", str(rank))
        assert found["estimated"] / 3 < found["gigabytes"] < 1.1 * found["estimated"]


def test_each_profile_has_a_row(capsys, monkeypatch):
    found = {"gigabytes": 1.0, "seconds": 6.0, "n_layers": 2, "estimated": 1.25, "estimated_seconds": 5.0}
    monkeypatch.setattr(streaming, "in_a_process", lambda *arguments: found)
    monkeypatch.setattr(streaming, "floor", lambda *shape: 2.0)
    rows = streaming.rows_of("tiny", 64, 128, 1, 1.2, 1.5)
    assert [row.split("|")[1].strip() for row in rows] == [
        "tiny, streamed, rank 64",
        "tiny, streamed as float32, rank 64",
        "tiny, resident, rank 64",
        "tiny, streamed, full rank",
        "tiny, resident, full rank",
    ]
    assert rows[0].split("|")[-2].strip() == "**1.50**"
