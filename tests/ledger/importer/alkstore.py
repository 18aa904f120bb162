"""Reuses a handler of another app, whose module is thereby imported inside this one."""

from django_alkstore.registry import handler
from tests.ledger.alkstore import noop

handler("importer")(noop)

raise RuntimeError("broken after its imports")
