"""A small shop that uses django-alkstore: an example to read, and what `make demo` runs."""
