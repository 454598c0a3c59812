"""Benchmarks, which compare whole runs, each in its own process (`fed-dpsd bench`).

rows.py starts and watches the processes, row.py runs in each, peers/ has scripts for other
simulators, and report.py shows the results.
"""
