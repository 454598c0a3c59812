"""How an experiment is set up, run, checkpointed and hosted."""
