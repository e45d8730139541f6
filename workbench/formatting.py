"""Numbers as sentences have them."""


def short(value: float) -> str:
    """A number in three digits, such as "0.0123" or "3,380"; no powers of ten where it is large."""
    three = float(f"{value:.3g}")
    return f"{three:,.0f}" if 100 <= abs(three) < 1e7 else f"{three:.3g}"
