"""The papers' algorithms as printed, with code that only they use; the core never imports it."""
