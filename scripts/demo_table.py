#!/usr/bin/env python3
"""demo_table.py RUN RUN...: the end of each run, side by side, from their metrics.jsonl.

A flat run has no groups to send between. To compare it with a federated one on the same ranks, its bytes are split at
the same place: a ring over P ranks in rank order has P equally loaded links, and G of them lead from one G-th of the
ranks to the next.
"""
import json
import pathlib
import sys


def human_bytes(count):
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024


def read_run(folder, parts):
    last = {}
    rounds = 0
    for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        last[record["kind"]] = record
        rounds += record["kind"] == "round"
    start, end, traffic, evaluation = last["start"], last["end"], last["traffic"], last["eval"]
    between = traffic["inter_group"]
    if len(start["groups"]) == 1:
        between = traffic["intra_group"] * parts / start["world"]
    total = traffic["intra_group"] + traffic["inter_group"]
    return {
        "strategy": start["strategy"],
        "groups of ranks": " + ".join(map(str, start["groups"])),
        "seconds": f"{end['seconds']:.0f}",
        "updates of each model": f"{end['steps']:,}",
        "rounds": f"{rounds:,}",
        "tokens": f"{end['tokens']:,}",
        "tokens/s": f"{end['tokens_per_s']:,.0f}",
        "evaluation perplexity (bytes)": f"{evaluation['perplexity']:.3f}",
        "sent in all": human_bytes(total),
        "  inside a half of the ranks": human_bytes(total - between),
        "  between the halves": human_bytes(between),
        "  between the halves, a token": f"{between / end['tokens']:,.1f} B",
    }


def main(folders):
    parts = max(len(json.loads((pathlib.Path(f) / "metrics.jsonl").open().readline())["groups"]) for f in folders)
    runs = [read_run(folder, parts) for folder in folders]
    rows = [[name] + [run[name] for run in runs] for name in runs[0]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    print()
    for row in rows:
        print(f"{row[0]:<{widths[0]}}" + "".join(f"  {cell:>{width}}" for cell, width in zip(row[1:], widths[1:])))
    print("\nSame model, data, hyperparameters and time. The halves are ranks 0-1 and 2-3; for the flat run, the bytes")
    print("between them follow from its rings (2 of 4 equally loaded links).")


if __name__ == "__main__":
    main(sys.argv[1:])
