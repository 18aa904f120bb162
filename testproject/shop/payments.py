"""A stand-in for the bank, which declines one payment in ten."""


class Declined(Exception):
    """The bank did not take the payment."""


def charge(reference: str, cents: int) -> None:
    """Take `cents` for the order `reference`, or raise `Declined`: for each reference that ends in 7.

    So one in ten is declined, always the same ones, and anybody can see by an order's reference what is due.
    """
    if reference.endswith("7"):
        raise Declined(f"the bank declined {cents / 100:.2f} for the order {reference}")
