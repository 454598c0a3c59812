"""Distillation methods: one file per paper, with server and client halves together.

`server` is PUBLIC: it may know released answers and a `PublicContext`. `client` is PRIVATE: it may
know one site's sensitive values, and returns what `Site.release` made of them, or a refusal.
method.py defines both views. Neither half imports client/ or server/.
"""
