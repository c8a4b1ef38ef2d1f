"""What the benchmarks share: shapes without weights, servers, load generators, process accounting, reports."""
