"""The report of runs: one HTML page that needs nothing else."""
