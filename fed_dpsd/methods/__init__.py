"""Distillation methods: one paper, one file, server and client halves together."""
