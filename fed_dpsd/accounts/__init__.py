"""Privacy accounts: each client's permanent charges, and the card that reports them.

Knows charges, budgets, answers and keyed digests, but no records, images or teachers. A ledger
(ledger.py) holds every charge (entry.py) of a data set, over all runs, in an SQLite file
(database.py), next to the secret of the client's noise (secret.py): both are PRIVATE. An account
decides whether a run may make another charge (account.py). The card (card.py) turns plans and
charges into proven epsilons, and words.py puts these into words; both are public. The coordinator's
log of statements is in server/.
"""
