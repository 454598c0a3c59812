"""The papers' loops as printed, and what only they use; the core never imports this room."""
