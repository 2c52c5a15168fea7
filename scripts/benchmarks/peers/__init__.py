"""axrt beside what a user would take instead, in the same processes at the same time; see
scripts/bench_peers."""
