"""The mail folder: one file for each message, which a mail program can open."""

import email
from email import policy
from pathlib import Path
from typing import Any

from django.core.mail import EmailMessage

from testproject.mail import EmlBackend


def test_each_message_is_one_file(settings: Any) -> None:
    folder = Path(settings.SHOP_MAIL_FOLDER)
    messages = [
        EmailMessage(f"Order {number}", "Thé, 茶", "shop@example.com", ["a@example.com"], headers={"X-Shop-Order": "T"})
        for number in range(3)
    ]
    assert EmlBackend().send_messages(messages) == 3
    assert EmlBackend().send_messages(messages[:1]) == 1  # sent again: one file more
    files = list(folder.iterdir())
    assert {file.suffix for file in files} == {".eml"}
    parsed = [email.message_from_bytes(file.read_bytes(), policy=policy.default) for file in files]
    assert sorted(message["Subject"] for message in parsed) == ["Order 0", "Order 0", "Order 1", "Order 2"]
    assert {message.get_content().strip() for message in parsed} == {"Thé, 茶"}
    assert {message["X-Shop-Order"] for message in parsed} == {"T"}
