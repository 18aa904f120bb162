from django.db.backends.dummy.base import DatabaseWrapper as DummyWrapper


class DatabaseWrapper(DummyWrapper):
    vendor = "elsewhere"
    display_name = "Elsewhere"
