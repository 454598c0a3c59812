"""The public side of a federation: the coordinator, which sees only what clients send.

Run folders, checkpoints, summaries and exported students are computed from released answers and the
coordinator's own files, so they are public by post-processing, with four exceptions. With
`noise_at: server`, the coordinator sees bounded sums without noise, so it must be trusted
(federation.py). In a simulation, it may see exact scores of teachers (diagnostics.py), which only
private training covers, and counts of records and files. Nothing covers times, or the coordinator's
own test images. Nothing here may know client/, not even indirectly.
"""
