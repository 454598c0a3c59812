"""Privacy accounts: the charges of each client, kept for life, and the card that reports them.

A ledger holds every charge of a data set over all runs: an SQLite file (ledger.py, database.py,
errors.py; reading.py where it is only looked at) of entries (entry.py, charges.py). Next to it lies
the secret that the client's noise follows (secret.py).
An account decides whether a run may make another charge (account.py). The coordinator's tally holds
what the clients have stated (tally.py), and the card turns plans and charges into proven epsilons
(card.py).
"""
