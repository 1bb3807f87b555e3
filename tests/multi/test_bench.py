"""`fedshard bench aggregate`: a table of right results, whose bytes are the formulas'; no time is looked at."""

import csv

import pytest

from multi_harness import BINARY, clean_environment, run_process

UNITS = [1000, 24, 3000]
N = sum(UNITS)
ELEMENT = {"fp32": 4, "bf16": 2}


def bench(*arguments):
    return run_process([BINARY, "bench", "aggregate", *arguments], clean_environment())


def rows_of(tmp_path, *arguments):
    path = tmp_path / "table.csv"
    done = bench("--units", ",".join(map(str, UNITS)), "--repeat", "2", "--csv", path, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    rows = list(csv.DictReader(path.open()))
    assert len(done.stdout.splitlines()) == 1 + len(rows)  # the same table, for people
    return rows


def test_every_case_has_its_row_and_the_formulas_bytes(tmp_path):
    rows = rows_of(tmp_path, "--ranks", "4", "--groups", "2", "--shard", "1", "--buckets", "whole,unit,1KiB")
    assert list(rows[0]) == ["dtype", "scheme", "bucket", "concurrency", "seconds", "bytes", "gb_per_s", "peak_bytes"]
    cases = [(r["dtype"], r["scheme"], r["bucket"], r["concurrency"]) for r in rows]
    assert cases == [(dtype, scheme, *bucket) for dtype in ("fp32", "bf16") for scheme in ("split", "leader", "naive")
                     for bucket in (("whole", "1"), ("unit", "1"), ("unit", "3"), ("1KiB", "1"), ("1KiB", "3"))]
    # Two groups of two replicas of one shard; all sizes are even, so no rank sends more than another of its kind.
    a_rank = {"split": N // 2 + N // 2,  # between groups, and to the other replica
              "leader": N + N,
              "naive": N}
    for row in rows:
        size = N * ELEMENT[row["dtype"]]
        assert int(row["bytes"]) == a_rank[row["scheme"]] * ELEMENT[row["dtype"]], row
        assert float(row["gb_per_s"]) == pytest.approx(size / float(row["seconds"]) / 1e9, rel=1e-2)
        # The gathered shard, and the messages of the rank's slice or a part of it; the allocator rounds up.
        assert size <= int(row["peak_bytes"]) <= 1.1 * 2 * size + 1024, row
    peak = {case: int(row["peak_bytes"]) for case, row in zip(cases, rows)}
    assert peak["fp32", "naive", "1KiB", "1"] < 1.2 * N * 4 < peak["fp32", "naive", "whole", "1"]


def test_unequal_groups(tmp_path):
    rows = rows_of(tmp_path, "--ranks", "4", "--groups", "3,1", "--shard", "3,1", "--schemes", "split",
                   "--buckets", "500B", "--concurrency", "2", "--dtypes", "fp32")
    assert len(rows) == 1
    assert int(rows[0]["bytes"]) == N * 4  # of the group of one rank: half of the model out, half back


@pytest.mark.parametrize("arguments, words", [
    (["--schemes", "ring"], "--schemes has no 'ring': it is one of split, leader, naive"),
    (["--buckets", "5MB"], 'a bucket is "whole", "unit" or a size'),
    (["--dtypes", "fp16"], "--dtypes has no 'fp16': it is one of fp32, bf16"),
    (["--concurrency", "0"], "--concurrency counts from 1, not 0"),
    (["--repeat", "0"], "--repeat counts from 1, not 0"),
    (["--units", "5,0"], "--units: a unit has at least 1 element, not 0"),
    (["--model", "llama-huge"], "llama-huge"),
    (["--ranks", "0"], "--ranks"),
    (["--ranks", "5"], "5 ranks"),
    (["--ranks", "3", "--groups", "2,1"], 'scheme = "naive" pairs the replicas of all groups'),
    (["--csv", "no/such/folder/table.csv"], "there is no folder no/such/folder"),
    (["--csv", "/dev/full"], "--csv /dev/full: that is no regular file"),
    (["--ranks", "1000000"], "1000000 ranks on this machine would take more than its"),
    (["--units", str(2**43)], "4 replicas of 8.8e+12 elements take at least 2.62e+05 GiB"),
    (["--units", str(2**63 - 1)], "--units: there are at most 17592186044416 elements in all"),
    (["surplus"], "surplus")])
def test_wrong_usage_is_refused(arguments, words):
    done = bench(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr
