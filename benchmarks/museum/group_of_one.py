"""The data-parallel group omits a mesh dimension and has only one rank, so its all-reduce does nothing.

https://github.com/ByteDance-Seed/VeOmni/pull/1115
"""

from crosstrain import Runner, registry

from . import Expected

EXPECTED = Expected("gradients", cause=r"all-reduce|exchang|not reduced")


@registry.register_runner("group_of_one")
class GroupOfOne(Runner):
    """Exchanges no gradients."""

    pass
