"""Properties of the causal language model families in transformers, from `configs/transformers_families.yaml`."""

import yaml

from crosstrain.utils import paths

_TABLE = yaml.safe_load((paths.home() / "configs" / "transformers_families.yaml").read_text(encoding="utf-8"))
SOFTCAPS = {family: attribute for attribute, families in _TABLE["softcaps"].items() for family in families}
SCALES = {  # family -> (attribute, exponent)
    family: (attribute, exponent)
    for kind, exponent in (("multiplied", 1), ("divided", -1))
    for attribute, families in _TABLE[kind].items()
    for family in families
}
PRODUCTS = {*_TABLE["plain"], *SCALES, *SOFTCAPS}
NOT_CAUSAL, COMPARE_NAMES = set(_TABLE["not_causal"]), set(_TABLE["compare_names"])


def keys_beside_fields(family: str) -> set[str]:
    """Return the keys that a family's configuration reads in addition to its fields."""
    return {*_TABLE["read_by_all"], *_TABLE["older_keys"].get(family, ())}
