"""Measuring a storage: test data, sweeps over ranks and concurrency, plots and reports."""
