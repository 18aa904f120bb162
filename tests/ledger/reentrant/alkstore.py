from django_alkstore.registry import handler, registrations
from tests.ledger.alkstore import noop

KNOWN = [registration.name for registration in registrations()]
handler("reentrant")(noop)
