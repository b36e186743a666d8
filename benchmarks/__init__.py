"""Benchmarks: rayloader beside its peers, in one run on one machine. See README.md here."""
