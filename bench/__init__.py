"""Benchmarks. Each runs its peers in the same run, interleaved, prints a table and writes JSON to bench/results/."""
