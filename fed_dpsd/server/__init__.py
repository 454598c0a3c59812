"""The public side of a federation: the coordinator, which sees only what clients send.

Everything here is public by post-processing: run folders, checkpoints, summaries and exported
students are computed from released answers and the coordinator's own files. There are three
exceptions. With `noise_at: server`, the coordinator sees bounded sums without noise, so it must be
trusted (federation.py). In a simulation, it may see exact scores of teachers (diagnostics.py),
which no epsilon covers unless training was private. The coordinator's own test images are not
covered either.
"""
