"""What an order must say, from the page and from the API alike."""

import json
from typing import Any

from django import forms

from testproject.shop.catalogue import CATALOGUE

PREFIX = "quantity_"


class OrderForm(forms.Form):
    reference = forms.RegexField(r"^[A-Z]-[0-9]{1,10}$", widget=forms.HiddenInput)
    email = forms.EmailField(label="E-mail", widget=forms.EmailInput(attrs={"placeholder": "you@example.com"}))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for article, product in CATALOGUE.items():
            self.fields[PREFIX + article] = forms.IntegerField(
                label=f"{product.name}, {product.cents / 100:.2f}",
                min_value=0,
                max_value=99,
                required=False,
                widget=forms.NumberInput(attrs={"placeholder": "0"}),
            )

    @classmethod
    def from_json(cls, text: bytes) -> "OrderForm":
        """`{"reference": "S-1", "email": "a@example.com", "lines": {"tea": 2}}`.

        `ValidationError` for another shape; what the values are worth is for `is_valid`.
        """
        try:
            body = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise forms.ValidationError(f"This is not JSON: {error}.") from error
        lines = body.get("lines") if isinstance(body, dict) else None
        if not isinstance(lines, dict):
            raise forms.ValidationError("The body must be an object whose lines are an object.")
        unknown = ", ".join(sorted(lines.keys() - CATALOGUE.keys()))
        if unknown:
            raise forms.ValidationError(f"There is no such article: {unknown}.")
        quantities = {PREFIX + article: quantity for article, quantity in lines.items()}
        return cls({"reference": body.get("reference"), "email": body.get("email"), **quantities})

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or self.cleaned_data
        if not self.errors and not self.quantities:
            raise forms.ValidationError("Order at least one article.")
        return cleaned

    @property
    def quantities(self) -> dict[str, int]:
        """What was ordered, by article."""
        wanted = {article: self.cleaned_data.get(PREFIX + article) for article in CATALOGUE}
        return {article: quantity for article, quantity in wanted.items() if quantity}
