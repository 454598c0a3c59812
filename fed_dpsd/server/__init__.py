"""The public side of a federation: the coordinator, which sees only what clients send.

Everything here is public by post-processing: run folders, checkpoints, summaries and exported
students are computed from released answers and the coordinator's own files. There are three
exceptions. With `noise_at: server`, the coordinator sees bounded sums without noise, so it must be
trusted (federation.py). In a simulation, it may see exact scores of teachers (diagnostics.py),
which no epsilon covers unless training was private. The coordinator's own test images are not
covered either.

A round starts in run.py, which calls a method; the method sends requests through federation.py.
sent_requests.py stores each request before it is sent, and the charge log (charge_log.py) stores
its cost before the responses are used. secure_sum.py opens a sum of masked responses without seeing
any individual response.

server/ and client/ never import each other, even indirectly (tests/test_architecture.py).
"""
