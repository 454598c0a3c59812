"""Distillation methods: one file per paper, with server and client halves together."""
