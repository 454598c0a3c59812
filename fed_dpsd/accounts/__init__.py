"""Privacy accounts: the charges of each client, kept for life, and the card that reports them.

A ledger holds every charge of a data set over all runs (ledger.py, entry.py). An account decides
whether a run may make another charge (account.py). The coordinator's tally holds what the clients
have stated (tally.py), and the card turns plans and charges into proven epsilons (card.py).
"""
