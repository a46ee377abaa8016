"""Settings that are solved for from what the reference gave."""


def tidied(value: float, uncertainty: float) -> float:
    """The shortest decimal number that is as near to a value as it is certain."""
    if abs(value) <= uncertainty:
        return 0.0
    for digits in range(16):
        near = float(f"{value:.{digits}e}")
        if abs(near - value) <= uncertainty:
            return near
    return value
