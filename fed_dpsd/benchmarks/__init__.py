"""Measurements of whole runs, side by side: each row of a bench is a process of its own.

rows.py starts the processes and watches them, row.py is such a process, stages.py times what it
does, and flower_fedavg.py is the Flower app to compare with. report.py reads what
they measured.
"""
