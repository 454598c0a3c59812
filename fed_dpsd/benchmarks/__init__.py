"""Benchmarks, which compare whole runs, each in its own process (`fed-dpsd bench`).

rows.py starts and watches the processes, row.py runs in each, stages.py times it, and
flower_fedavg.py is the Flower app to compare with. report.py shows the results.
"""
