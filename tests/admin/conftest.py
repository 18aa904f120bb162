"""Somebody who is logged in to the admin."""

import re
from collections.abc import Callable, Iterable
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.http import HttpResponse
from django.test import Client
from django.urls import reverse


class Browser:
    """A logged-in client that knows the admin's addresses. `model` is `job`, `schedule` or `lock`."""

    def __init__(self, user: User) -> None:
        self.user = user
        self.client = Client()
        self.client.force_login(user)

    def get(self, model: str, **query: Any) -> HttpResponse:
        return self.client.get(list_url(model), query)

    def page(self, model: str, query: str = "", **params: Any) -> str:
        """The list's text."""
        response = self.client.get(list_url(model) + query, params or None)
        assert response.status_code == 200
        return response.content.decode()

    def detail(self, model: str, pk: object) -> str:
        response = self.client.get(reverse(f"admin:django_alkstore_{model}_change", args=[pk]))
        assert response.status_code == 200
        return response.content.decode()

    def verdict(self, model: str, pk: object) -> list[str]:
        """What its page says at the top: the headline, and the sentences below it."""
        found = re.search(r'<section class="alkstore-verdict.*?</section>', self.detail(model, pk), re.DOTALL)
        assert found is not None
        return [unescape(said) for said in re.findall(r"<p[^>]*><bdi>(.*?)</bdi></p>", found[0], re.DOTALL)]

    def buttons(self, model: str, pk: object) -> list[str]:
        """The actions that its page offers."""
        return re.findall(r'name="action" value="(\w+)"', self.detail(model, pk))

    def ids(self, **query: Any) -> list[int]:
        """The jobs on a page of the list, in order."""
        response = self.get("job", **query)
        assert response.status_code == 200
        return [job.pk for job in response.context_data["cl"].result_list]  # type: ignore[attr-defined]

    def act(
        self, model: str, action: str, pks: Iterable[object], query: str = "", *, follow: bool = False, **more: Any
    ) -> Any:
        """Post an action as the list's form does; the response."""
        data = {"action": action, "index": 0, "_selected_action": list(pks), **more}
        return self.client.post(list_url(model) + query, data, follow=follow)

    def said(self, model: str, action: str, pks: Iterable[object], query: str = "", **more: Any) -> str:
        """Post an action; what it said."""
        response = self.act(model, action, pks, query, follow=True, **more)
        while "data-alkstore-continue" in response.content.decode():
            response = self.go_on(response, list_url(model) + query)
        assert response.status_code == 200
        return " | ".join(str(message) for message in response.context["messages"])

    def go_on(self, response: Any, url: str) -> Any:
        """Send the form of a page that asks for confirmation or goes on with an action."""
        fields: dict[str, list[str]] = {}
        for name, value in response.context["fields"]:
            fields.setdefault(name, []).append(value)
        return self.client.post(url, fields, follow=True)


def list_url(model: str) -> str:
    return reverse(f"admin:django_alkstore_{model}_changelist")


@pytest.fixture
def root(db: None) -> Browser:
    return Browser(User.objects.create_superuser("root"))


@pytest.fixture
def staff(db: None) -> Callable[..., Browser]:
    """Make a member of the staff with these permissions of the app: `staff("view_job")`."""

    def make(*codenames: str) -> Browser:
        user = User.objects.create_user("-".join(codenames) or "nobody", is_staff=True)
        user.user_permissions.set(
            Permission.objects.filter(content_type__app_label="django_alkstore", codename__in=codenames)
        )
        return Browser(user)

    return make
