"""The papers' algorithms as printed, and code only they use; the core never imports this room."""
