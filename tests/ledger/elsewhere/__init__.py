"""A database backend that is not SQLite: Django's dummy, under a name of its own."""
