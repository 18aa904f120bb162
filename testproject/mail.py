"""Mail into a folder: one .eml file for each message, which any mail program opens."""

import uuid
from collections.abc import Sequence
from pathlib import Path

from django.conf import settings
from django.core.mail import EmailMessage
from django.core.mail.backends.base import BaseEmailBackend


class EmlBackend(BaseEmailBackend):
    """Django's own file backend puts several messages into one .log file, which no mail program opens."""

    def send_messages(self, email_messages: Sequence[EmailMessage]) -> int:
        folder = Path(settings.SHOP_MAIL_FOLDER)
        folder.mkdir(parents=True, exist_ok=True)
        for message in email_messages:
            # A message that is sent twice is two files, so that whoever counts sees it.
            target = folder / f"{uuid.uuid4()}.eml"
            part = target.with_suffix(".part")
            part.write_bytes(message.message().as_bytes())
            part.rename(target)  # in one step: an .eml is always whole
        return len(email_messages)
