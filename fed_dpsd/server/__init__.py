"""The public side: it draws queries, sums answers, trains the student and writes the run folder.

It sees nothing of a client but its replies, so all that it makes of them is post-processing. This
folder and `fed_dpsd/client` never import each other; tests/test_architecture.py checks it.
"""
