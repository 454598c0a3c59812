"""Privacy accounts: each client's permanent charges, and the card that reports them.

A ledger (ledger.py) holds every charge (entry.py) of a data set, over all runs, in an SQLite file
(database.py). The secret of the client's noise is stored next to it (secret.py). An account decides
whether a run may make another charge (account.py), and the card turns plans and charges into proven
epsilons (card.py). The coordinator's log of the clients' statements is in server/.
"""
