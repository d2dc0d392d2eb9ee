"""Ten functions of a small shop, with state: what `order` takes from the stock is gone for the rest of a conversation.

    codechat tools --ckpt released/smollm2-tools --tools examples/shop.py --user "How many mugs are in stock?"
    codechat grpo --init-from my-shop --tools examples/shop.py --data-dir examples/shop.jsonl --run-name my-shop-rl

examples/shop.jsonl holds 50 requests with the expected calls: 30 to train on, 20 held out."""

from typing import Literal

Item = Literal["mug", "lamp", "chair", "clock"]
City = Literal["Oslo", "Rome", "Lima"]

PRICES = {"mug": 8.0, "lamp": 30.0, "chair": 55.0, "clock": 24.0}
STOCK = {"mug": 12, "lamp": 3, "chair": 0, "clock": 7}
ORDERS: dict[int, tuple[str, int]] = {}


def price(item: Item) -> float:
    """Price of an item."""
    return PRICES[item]


def stock(item: Item) -> int:
    """How many of an item are left."""
    return STOCK[item]


def order(item: Item, count: int = 1) -> int:
    """Order an item; the number of the order.

    Args:
        item: what to order
        count: how many
    """
    if count > STOCK[item]:
        raise ValueError(f"only {STOCK[item]} left")
    STOCK[item] -= count
    ORDERS[len(ORDERS) + 1] = (item, count)
    return len(ORDERS)


def cancel(number: int) -> str:
    """Cancel an order."""
    if number not in ORDERS:
        return f"order {number} is cancelled"
    item, count = ORDERS.pop(number)
    STOCK[item] += count
    return f"{count} {item} are back in stock"


def track(number: int) -> str:
    """Where a parcel is."""
    return ("packed", "on its way", "delivered")[number % 3]


def shipping(city: City) -> float:
    """Cost of delivery to a city."""
    return {"Oslo": 6.0, "Rome": 4.5, "Lima": 19.0}[city]


def hours(city: City) -> str:
    """Opening hours of the shop in a city."""
    return {"Oslo": "9 to 17", "Rome": "10 to 20", "Lima": "8 to 18"}[city]


def voucher(code: str) -> float:
    """Value of a voucher."""
    return float(len(code))


def rate(item: Item, stars: int) -> str:
    """Give an item stars."""
    if not 1 <= stars <= 5:
        raise ValueError("stars are from 1 to 5")
    return f"{item}: {stars} stars"


def convert(amount: float, currency: Literal["dollars", "pounds"]) -> float:
    """Euros in another currency."""
    return round(amount * {"dollars": 1.1, "pounds": 0.85}[currency], 2)
