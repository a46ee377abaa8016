"""What checks annotations: beartype, to which an int is also a float (PEP 484's tower)."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
